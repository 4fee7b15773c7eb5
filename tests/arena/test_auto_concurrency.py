"""The limit of calls that follows the engines: on a server with vLLM's metrics, and rule by rule."""

from __future__ import annotations

import asyncio
import json
import warnings
from random import Random

import pytest
from pydantic import ValidationError
from virtual_clock import run_virtually

from turnwise.arena import Arena
from turnwise.arena.stages.auto_concurrency import AutoConcurrency, FollowingSemaphore
from turnwise.inference import PoolClient, RoutingClient, ScriptedClient, VLLMServerClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server.load import METRICS, read_report
from turnwise.run.checks import dry_run
from turnwise.train.config.sampling import RolloutConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.types import EngineReport
from turnwise.types.play import MAX_CONCURRENCY
from turnwise.workers.listen import play
from turnwise.workers.messages import Job

from ..inference.fake_server import Say, faking

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny {{x}} 7"}} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="tiny {{x}} 7"}} {waiting}.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny {{x}} 7",reason="capacity"}} 900.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny {{x}} 7"}} {use}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="tiny {{x}} 7"}} {preemptions}.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="tiny {{x}} 7"}} 400.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="tiny {{x}} 7"}} 96.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{{engine="0",model_name="tiny {{x}} 7"}} 1.76449e+09
"""
"""The samples that count, and their neighbours, as vLLM 0.32 writes them."""


def text(running=0, waiting=0, use=0.0, preemptions=0):
    return VLLM.format(running=running, waiting=waiting, use=use, preemptions=preemptions)


def test_the_metrics_of_vllm_are_summed_over_engines_and_the_fullest_cache_counts():
    assert read_report(text(96, 12, 0.83, 4)) == EngineReport(96, 12, 0.83, 4, 400, 96)
    both = text(96, 12, 0.83, 4) + text(4, 3, 0.5, 1).replace('engine="0"', 'engine="1"')
    assert read_report(both) == EngineReport(100, 15, 0.83, 5, 800, 192)
    assert read_report(text().replace("kv_cache_usage_perc", "gpu_cache_usage_perc")) is None
    assert read_report(text(use="nan")) is None and read_report(text(use="?")) is None


class Engine:
    """An engine of ``room`` calls that takes about a second for each, and twice that for one that it preempts."""

    def __init__(self, room):
        self.room, self.running, self.preemptions, self.most = room, 0, 0, 0
        self.random = Random(0)

    async def load(self):
        return {"engine": EngineReport(self.running, 0, min(self.running / self.room, 1.0), self.preemptions)}

    async def answer(self):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.random.uniform(0.5, 1.5))
        if self.running > self.room:
            self.preemptions += 1
            await asyncio.sleep(1)
        self.running -= 1


async def calls(budget, engine, count):
    """Make calls that all wait at once; return the limits at their ends."""
    seen = []

    async def one(number):
        async with budget.slot((number,)):
            await engine.answer()
            seen.append(budget.limit)

    await asyncio.gather(*map(one, range(count)))
    return seen


def test_the_limit_settles_below_what_preempts_recovers_and_never_passes_its_bound():
    async def main():
        engine = Engine(room=80)
        budget = FollowingSemaphore(engine)
        budget.bound = 256
        narrow = await calls(budget, engine, 3_000)
        engine.room = 40
        narrower = await calls(budget, engine, 1_500)
        engine.room = 10_000
        return narrow, narrower, await calls(budget, engine, 12_000), engine

    narrow, narrower, wide, engine = run_virtually(main())
    assert narrow[0] == 32 and min(narrow[-1_000:]) >= 42 and max(narrow[-1_000:]) <= 88
    assert min(narrower[-500:]) >= 21 and max(narrower[-500:]) <= 44
    assert wide[-1] == engine.most == 256


def test_workers_that_follow_the_same_engine_alone_share_it():
    async def main():
        engine = Engine(room=200)
        budgets = [FollowingSemaphore(engine) for _ in range(4)]
        for budget in budgets:  # as a job sets it
            budget.bound = MAX_CONCURRENCY // 4
        budgets[0].load_state_dict({"limit": 160.0, "ramps": False})
        working = [asyncio.ensure_future(calls(budget, engine, 6_000)) for budget in budgets]
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        limits = [budget.limit for budget in budgets]
        await asyncio.gather(*working)
        return limits

    limits = run_virtually(main())
    assert 120 <= sum(limits) <= 220 and max(limits) < 2 * min(limits), limits  # they began with 160 and 32


def look(budget, **report):
    budget.adjust(
        {"engine": EngineReport(**{"running": 0, "waiting": 0, "kv_cache_use": 0.0, "preemptions": 0} | report)}
    )
    return budget.limit


def test_a_queue_that_stays_is_left_here_and_new_weights_cut_nothing():
    budget = FollowingSemaphore(ScriptedClient([]))
    budget.in_use = 128
    assert [look(budget, running=64, waiting=64) for _ in range(3)] == [128, 128, 72]  # 64 and an eighth of them
    assert look(budget, running=64, waiting=64, preemptions=1) == 72  # until it has taken effect
    budget.in_use = 72
    assert look(budget, running=64, waiting=8, preemptions=1) == 72
    assert look(budget, running=64, preemptions=60, kv_cache_use=0.9) == 72  # all at once: new weights in flight
    assert look(budget, running=64, preemptions=62, kv_cache_use=0.9) == 54
    budget._ended, budget.in_use = 108, 54
    assert look(budget, preemptions=62, kv_cache_use=0.79) == 54 + 2 * 16  # twice as many calls ended as run
    budget._ended = 86
    assert look(budget, preemptions=62, kv_cache_use=0.81) == 86 + 16 // 4
    assert look(budget, preemptions=0) == 90  # a restarted engine
    budget.in_use = 90
    for _ in range(70):  # the batch ends
        budget.release()
    assert look(budget, running=20, preemptions=5) == 67


def test_prefixes_that_stay_lost_cut_the_limit_while_running_calls_fill_the_cache():
    budget = FollowingSemaphore(ScriptedClient([]))
    budget.load_state_dict({"limit": 100.0, "ramps": False})
    prompts, hits = 0, 0

    def round_of_calls(held, use=0.7, ended=None):
        nonlocal prompts, hits
        prompts, hits = prompts + 1000, hits + 1000 * held
        budget.in_use, budget._ended = 0, budget.limit if ended is None else ended
        budget.in_use = budget.limit
        return look(budget, running=50, waiting=2, kv_cache_use=use, prompt_tokens=prompts, cached_tokens=round(hits))

    assert round_of_calls(0.0) == round_of_calls(0.8, use=0.81) - 4 == 116
    limit = budget.limit
    assert round_of_calls(0.2, ended=3) >= limit, "the round is not over"
    limit = budget.limit
    assert round_of_calls(0.2) > limit, "new weights empty the cache for one round"
    limit = budget.limit
    assert round_of_calls(0.2, use=0.49) > limit, "running calls leave half of the cache"
    limit = budget.limit
    assert round_of_calls(0.2) == int(0.75 * limit)
    assert round_of_calls(0.72) > int(0.75 * limit), "nearly as good as the best"


def test_a_lower_bound_for_a_while_leaves_what_was_learned():
    budget = FollowingSemaphore(ScriptedClient([]))
    budget.load_state_dict({"limit": 300.0, "ramps": False})
    with budget.limited_to(8):
        budget._ended, budget.in_use = 100, 8
        assert (budget.limit, budget.bound, look(budget)) == (8, 8, 8)
    assert (budget.limit, budget.bound) == (300, MAX_CONCURRENCY)


async def test_a_server_with_vllms_metrics_is_followed_over_http_and_one_without_is_told_once():
    served, silent = {METRICS: Say(text(3, 1, 0.5, 2))}, {}
    with faking(served) as one, faking({METRICS: Say(text(5))}) as two, faking(silent) as three:
        clients = {server.url: VLLMServerClient(server.url, ByteTokenizer()) for server in (one, two, three)}
        pool = PoolClient({url: clients[url] for url in (one.url, two.url)})
        both = RoutingClient({"default": pool, "judge": ScriptedClient(["4"], versions={"judge": 0})})
        try:
            reports = await both.load()
            assert reports == {
                one.url: EngineReport(3, 1, 0.5, 2, 400, 96),
                two.url: EngineReport(5, 0, 0.0, 0, 400, 96),
                "ScriptedClient": None,
            }
            budget = FollowingSemaphore(both)
            assert budget.bound == 3 * MAX_CONCURRENCY
            served[METRICS] = Say("busy", 503)
            assert await clients[one.url].load() == {}
            assert await clients[three.url].load() == {three.url: None}
            budget.adjust({})
            assert budget.counts["unread"] == 1 and not budget.fixed
            fixed = FollowingSemaphore(clients[three.url])
            with pytest.warns(RuntimeWarning, match=rf"{three.url} reports no load, so the limit stays at 1024 calls"):
                async with fixed.slot((0,)):
                    while not fixed.fixed:
                        await asyncio.sleep(0)
            assert fixed.limit == MAX_CONCURRENCY
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                async with fixed.slot((0,)):
                    await asyncio.sleep(0)
            assert three.count(METRICS) == 2
        finally:
            await both.close()
            await clients[three.url].close()


def test_an_arena_logs_the_limit_and_a_resumed_one_goes_on_from_it():
    def arena(limit="auto"):
        return Arena(ScriptedClient(["4"]), max_concurrency=limit)

    first = arena()
    assert first.state_dict()["stages"].get("auto_concurrency") is None  # nothing is learned yet
    assert first.stages["auto_concurrency"].trained() == {}
    first.budget.in_use = 128
    look(first.budget, running=64)
    look(first.budget, running=64, preemptions=3)
    assert first.stages["auto_concurrency"].trained() == {
        "concurrency/limit": 96, "concurrency/cuts": 1, "concurrency/unread": 0,
    }  # fmt: skip
    assert first.stages["auto_concurrency"].trained()["concurrency/cuts"] == 0
    state = json.loads(json.dumps(first.state_dict()))
    second, fixed = arena(), arena(7)
    second.load_state_dict(state)
    fixed.load_state_dict(state)
    assert second.budget.limit == 96 and fixed.budget.limit == 7
    assert isinstance(second.stages["auto_concurrency"], AutoConcurrency) and "auto_concurrency" not in fixed.stages


def test_another_word_is_refused_and_a_dry_run_says_what_auto_does(tmp_path):
    with pytest.raises(ValueError, match="max_concurrency='fast': expected 'auto' or a number"):
        Arena(ScriptedClient([]), max_concurrency="fast")
    with pytest.raises(ValidationError, match="expected auto, or a number of at least 1"):
        RolloutConfig(max_concurrency=0)
    for client, said in (
        ("transformers", "1024, as the client reports no load"),
        ("vllm", "128 for each engine at the"),
    ):
        rollout = {"client": client, "max_concurrency": "auto"}
        config = TrainConfig.model_validate(
            {"run_dir": str(tmp_path / "run"), "task": "kuhn_poker", "rollout": rollout}
        )
        assert f"# rollout.max_concurrency = 'auto': {said}" in dry_run(config)


async def test_a_job_of_the_loop_sets_a_workers_part_of_the_bound():
    arena = Arena(ScriptedClient([]), max_concurrency="auto")
    job = Job([], [], None, False, None, arena.sampling, started=0, batches=0, episodes=8, calls=256)
    await play(arena, job, {}, lambda actors: {})
    assert (arena.budget.bound, arena.budget.limit) == (256, 32)
