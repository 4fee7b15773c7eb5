"""Sub-agents: each has a trajectory of its own, below its agent's, in the order in which they were opened."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from turnwise.arena import Rubric, TreeSampler
from turnwise.arena.recording.rollouts_jsonl import json_line, plain_result
from turnwise.arena.rewards.rubric import DropRolloutError
from turnwise.credit import HierarchyCredit, LevelCredit
from turnwise.integrations.gateway import (
    AgentEpisode,
    Gateway,
    GatewaySettings,
    ReplayedEpisode,
)
from turnwise.integrations.gateway.service.standing import standing
from turnwise.report.credit import result_of
from turnwise.samples.collect import collect_samples
from turnwise.samples.step_metrics import describe
from turnwise.types import CHILD, EpisodeRequest, ModelError

from ...arena.replaying import play as replay
from ...arena.replaying import record
from .helpers import arena_of, play, scripted

TEAM = ("boss", "worker")


async def ask(model, text="go", **options):
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        answer = await client.chat.completions.create(model=model.name, messages=messages, **options)
        return answer.choices[0].message.content


def children(result):
    return [child for child in result.children if CHILD in child.rollout.meta]


def family(played):
    """Return (id, parent, order, after, reward or error) of all children of the first attempt."""
    return [
        (
            node.rollout.id,
            node.rollout.meta[CHILD]["parent"],
            node.rollout.meta[CHILD]["order"],
            node.rollout.meta[CHILD]["after"],
            node.rollout.rewards.get(node.rollout.meta[CHILD]["actor"]) if node.rollout.error is None else "failed",
        )
        for node in played.results[0].walk()
        if CHILD in node.rollout.meta
    ]


# -- trajectories ------------------------------------------------------------------------------------------------------
def test_each_child_is_a_trajectory_with_its_parent_its_order_and_its_cause():
    async def agent(seen, models):
        plan = await ask(models["boss"], "plan")
        async with models["worker"].child() as first, models["worker"].child() as second:
            seen += [await ask(second, plan), await ask(first, plan)]
            chat = [{"role": "user", "content": plan}, {"role": "assistant", "content": seen[1]}]
            await ask(first, [*chat, {"role": "user", "content": "on"}])
        await ask(models["boss"], "sum up")
        first.reward = 0.25
        third = models["worker"].child()
        await ask(third, "check")
        await ask(models["worker"], "no child")

    played = play(agent, list("pabcds"), actors=TEAM)
    [result] = played.results
    assert family(played) == [
        ("e0.0", "e0", 0, ["boss", 0], 0.25),
        ("e0.1", "e0", 1, ["boss", 0], 1.0),
        ("e0.2", "e0", 2, ["boss", 1], 1.0),
    ]
    rows = {
        node.rollout.id: [(step.completion, step.info["order"]) for step in node.rollout.steps]
        for node in result.walk()
    }
    assert rows == {
        "e0": [("p", 0), ("d", 4), ("s", 6)],
        "e0.0": [("b", 2), ("c", 3)],
        "e0.1": [("a", 1)],
        "e0.2": [("s", 5)],
    }
    first, *_ = children(result)
    assert [step.info["call"] for step in first.rollout.steps] == [0, 1]
    assert [step.info.get("extends") for step in first.rollout.steps] == [None, 0]
    assert played.metrics["gateway/extended_rows/worker"] == 1
    assert all(node.parent_id is None and node.group_id == f"{result.group_id}/child" for node in children(result))
    assert played.rewards == {"boss": 1.0, "worker": 1.0}
    seeds = [step.facts.seed for node in result.walk() for step in node.rollout.steps]
    assert len(set(seeds)) == 7
    counts = {name: played.metrics[f"gateway/{name}/worker"] for name in ("calls", "children", "children_failed")}
    assert counts == {"calls": 5, "children": 3, "children_failed": 0}
    # The reward of a child that inherits counts with its attempt: (1 + .25) / 2.
    assert describe(played.results)["reward/worker"] == pytest.approx(0.625)


# -- credit and order --------------------------------------------------------------------------------------------------
def advantages(agent, questions, credit, actors=TEAM, **options):
    """Play each question as an attempt of one group. Return the advantages by rollout, of those with rows."""
    arena = arena_of(scripted("a"), actors=actors, credit=credit)
    arena.add_episode(AgentEpisode(agent, Gateway(renderer="template"), actors=actors, **options))
    requests = [EpisodeRequest(next(iter(arena.episodes)), question, group_id="g") for question in questions]
    results = asyncio.run(arena.generate_rollouts(requests))
    errors = [result.rollout.error for result in results if result.rollout.error]
    assert not errors, errors[0]
    arena.assign_credit_and_pack(results)
    return {node.rollout.id: [step.advantage for step in node.rollout.steps] for top in results for node in top.walk()}


async def of_rewards(question, models):
    """Open a child for each of the rewards; ``None`` leaves the child without one."""
    await ask(models["boss"])
    for reward in question["children"]:
        child = models["worker"].child()
        await ask(child)
        child.reward = reward
    return {"boss": question["reward"], "worker": question["reward"]}


HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([(1.0, [None] * 3), (0.0, [None])], [[HALF / 3] * 3, [-HALF]]),
        # Means .5 and .25, so the mean is .375, and the variance ((.625^2 + .375^2) / 2 + .125^2) / (2 - 1) = .28125.
        ([(1.0, [1.0, 0.0]), (0.0, [0.25])], [[1.178511 / 2, -0.707107 / 2], [-0.235702]]),
        # One inherits 1, beside an own 0: as above with mean 1/4 of means .5 and 0, and variance (.5625 + .0625) / 2 +
        # .0625 = .375.
        ([(1.0, [None, 0.0]), (0.0, [None])], [[0.75 / 0.375**0.5 / 2, -0.25 / 0.375**0.5 / 2], [-0.25 / 0.375**0.5]]),
        ([(1.0, [None, None]), (0.0, [])], [[0.0, 0.0], []]),
    ],
    ids=["inherited", "own", "mixed", "alone"],
)
def test_children_weigh_once_and_are_compared_with_those_of_other_attempts(given, expected):
    questions = [{"reward": reward, "children": own} for reward, own in given]
    found = advantages(of_rewards, questions, HierarchyCredit(ddof=1, eps=0.0))
    assert (found["e0"], found["e1"]) == (pytest.approx([HALF]), pytest.approx([-HALF]))
    for number, row in enumerate(expected):
        rows = [found[f"e{number}.{order}"] for order in range(len(given[number][1]))]
        assert [value for one in rows for value in one] == pytest.approx(row, abs=1e-6)


def test_a_boss_can_be_paid_for_its_workers():
    """The children's mean rewards, .5 and .25, become the boss's: mean .375, deviations +-.125."""
    questions = [{"reward": 0.0, "children": [1.0, 0.0]}, {"reward": 0.0, "children": [0.25]}]
    name = AgentEpisode(of_rewards, Gateway()).episode_type
    edge = {"kind": "children", "parent": name, "actor": "boss", "child": f"{name}/child", "child_actor": "worker"}
    found = advantages(of_rewards, questions, LevelCredit(options={"normalize": False}, edges=[edge]))
    assert (found["e0"], found["e1"]) == (pytest.approx([0.125]), pytest.approx([-0.125]))
    assert found["e0.0"] + found["e0.1"] + found["e1.0"] == pytest.approx([0.625 / 2, -0.375 / 2, -0.125])


def test_twenty_children_at_once():
    async def one(models, number):
        async with models["worker"].child() as worker:
            for _ in range(2):
                assert await ask(worker, f"part {number}") == f"part {number}!"
            worker.reward = number / 20

    async def agent(seen, models):
        await asyncio.gather(*(one(models, number) for number in range(20)))

    def answer(request):
        return request.messages[-1]["content"] + "!"

    options = {"check_private": True}
    played = play(agent, answer, actors=TEAM, attempts=2, max_parallel=8, arena_options=options)
    for result in played.results:
        below = children(result)
        assert [child.rollout.meta[CHILD]["order"] for child in below] == list(range(20))
        for number, child in enumerate(below):
            assert child.rollout.rewards == {"worker": number / 20}
            assert {step.prompt[-1]["content"] for step in child.rollout.steps} == {f"part {number}"}
        orders = [step.info["order"] for child in below for step in child.rollout.steps]
        assert sorted(orders) == list(range(40))
    samples = [sample for sample in collect_samples(played.results)]
    assert len(samples) == 80
    assert {sample.weight for sample in samples} == {1 / 20}


def test_children_of_children():
    async def agent(seen, models):
        async with models["boss"].child() as boss:
            await ask(boss)
            async with boss.child("worker") as worker, worker.child() as helper:
                await ask(helper)
                worker.reward = 0.5
            async with boss.child() as second:
                await ask(second)
        return {"boss": 0.75}

    played = play(agent, ["a"], actors=TEAM)
    assert family(played) == [
        ("e0.0", "e0", 0, None, 0.75),
        ("e0.0.0", "e0.0", 0, ["boss", 0], 0.5),  # made no call, and has a reward, which its helper takes
        ("e0.0.0.0", "e0.0.0", 0, None, 0.5),
        ("e0.0.1", "e0.0", 1, ["boss", 0], 0.75),
    ]
    samples = collect_samples(played.results)
    assert {(s.rollout_id, s.attempt_id, s.weight) for s in samples} == {
        ("e0.0", "e0", 0.5),
        ("e0.0.1", "e0", 0.5),
        ("e0.0.0.0", "e0", 1.0),
    }


# -- failures and ends -------------------------------------------------------------------------------------------------
def test_child_that_fails_does_not_fail_its_attempt():
    async def sub_agent(model, raises):
        async with model.child() as worker:
            await ask(worker)
            below = worker.child()
            await ask(below)
            worker.reward = 1.0
            if raises:
                raise RuntimeError(f"broken, with the key {worker.api_key}")

    async def agent(seen, models):
        seen += await asyncio.gather(
            *(sub_agent(models["worker"], raises) for raises in (True, False)), return_exceptions=True
        )

    played = play(agent, ["a"], actors=TEAM)
    assert [type(one) for one in played.seen] == [RuntimeError, type(None)]
    assert [row[4] for row in family(played)] == ["failed", "failed", 1.0, 1.0]
    failed = children(played.results[0])[0].rollout
    assert "broken, with the key ***" in failed.error
    assert failed.rewards == {}
    assert {sample.rollout_id for sample in collect_samples(played.results)} == {"e0.1", "e0.1.0"}
    assert played.metrics["gateway/children_failed/worker"] == 1
    assert describe(played.results)["episodes/failed"] == 2


def test_child_whose_exception_the_agent_does_not_catch_fails_the_attempt_and_all_its_children():
    async def agent(seen, models):
        async with models["worker"].child() as worker:
            await ask(worker)
            worker.reward = 1.0
        async with models["worker"].child() as worker:
            await ask(worker)
            raise RuntimeError("broken")

    played = play(agent, ["a"], actors=TEAM, fails=True)
    assert "RuntimeError: broken" in played.error
    assert [row[4] for row in family(played)] == ["failed", "failed"]
    assert not collect_samples(played.results)


@pytest.mark.parametrize("on_context", ["end", "fail"])
def test_child_that_outgrows_its_context_is_left_to_its_agent(on_context):
    async def agent(seen, models):
        async def sub_agent(text):
            async with models["worker"].child() as worker:
                await ask(worker)
                return await ask(worker, text)

        seen += await asyncio.gather(sub_agent("x " * 300), sub_agent("short"), return_exceptions=True)

    played = play(agent, ["a"], actors=TEAM, arena_options={"max_context": 200}, on_context=on_context)
    assert isinstance(played.seen[0], openai.BadRequestError)
    assert played.seen[0].code == "context_length_exceeded"
    assert [row[4] for row in family(played)] == [1.0 if on_context == "end" else "failed", 1.0]
    assert played.metrics["gateway/children_failed/worker"] == (on_context == "fail")
    assert played.metrics["gateway/refused/context_length_exceeded/worker"] == 1


def test_model_that_fails_in_a_child_fails_the_attempt():
    """The reward of an attempt whose model was down would be wrong, even if the agent goes on."""

    async def agent(seen, models):
        async with models["worker"].child() as worker:
            with pytest.raises(openai.InternalServerError):
                await ask(worker)
        return 0.0

    played = play(agent, [ModelError("the server is down")], actors=TEAM, fails=True)
    assert "the server is down" in played.error
    assert not collect_samples(played.results)


def test_child_after_its_end_and_after_that_of_its_attempt():
    async def agent(seen, models):
        async with models["worker"].child() as ended:
            await ask(ended)
        with pytest.raises(openai.APIStatusError, match="session is over: its sub-agent has ended"):
            await ask(ended)
        with pytest.raises(RuntimeError, match="its sub-agent has ended"):
            ended.child()
        ended.reward = 0.5
        late = models["worker"].child()
        await ask(late)
        seen += [models["worker"], late]

    async def after():
        for model in kept:
            with pytest.raises(openai.APIStatusError, match="session is over: the episode has ended") as refused:
                await ask(model)
            assert refused.value.status_code == 410
            with pytest.raises(RuntimeError, match=r"child\(\): the session is over: the episode has ended"):
                model.child()
        with pytest.raises(RuntimeError, match="reward=1\\.0 of a child of 'worker': the session is over"):
            kept[1].reward = 1.0

    kept: list = []

    async def played_agent(seen, models):
        await agent(kept, models)

    played = play(played_agent, ["a"], actors=TEAM, after=after)
    assert [row[4] for row in family(played)] == [0.5, 1.0]
    assert not played.gateway.sessions


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "good", 1j])
def test_rewards_that_are_none(wrong):
    async def agent(seen, models):
        child = models["worker"].child()
        with pytest.raises((TypeError, ValueError), match="of a child of 'worker': expected a finite number"):
            child.reward = wrong
        with pytest.raises(ValueError, match="no such actor, expected one of \\['boss', 'worker'\\]"):
            child.child("judge")

    assert not children(play(agent, ["a"], actors=TEAM).results[0])


# -- keys, limits and threads ------------------------------------------------------------------------------------------
def test_keys_open_their_own_trajectory_alone():
    async def agent(seen, models):
        first, second = models["worker"].child(), models["worker"].child()
        for mixed in (first, models["worker"]):
            with pytest.raises(openai.AuthenticationError):
                async with openai.AsyncOpenAI(base_url=second.base_url, api_key=mixed.api_key) as client:
                    await client.models.list()
        async with openai.AsyncOpenAI(base_url=second.base_url, api_key=second.api_key) as client:
            seen += [model.id for model in (await client.models.list()).data]

    assert play(agent, ["a"], actors=TEAM).seen == ["worker"]


def test_calls_of_children_count_for_the_limit_of_the_attempt():
    async def agent(seen, models):
        await ask(models["boss"])
        child = models["worker"].child()
        await ask(child)
        with pytest.raises(openai.APIStatusError, match="has made its max_calls=2 calls"):
            await ask(child)

    assert len(collect_samples(play(agent, ["a"], actors=TEAM, max_calls=2).results)) == 2


def test_threads_of_an_agent_open_children():
    def agent(seen, models):
        barrier = threading.Barrier(8)

        def one(number):
            barrier.wait()
            with models["worker"].child() as worker:
                client = worker.openai_client()
                client.chat.completions.create(model=worker.name, messages=[{"role": "user", "content": f"{number}"}])
                worker.reward = number

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(8)))

    played = play(agent, lambda request: "ok", actors=TEAM)
    below = children(played.results[0])
    assert sorted(child.rollout.id for child in below) == [f"e0.{order}" for order in range(8)]
    assert [child.rollout.rewards["worker"] for child in below] == [
        float(child.rollout.steps[0].prompt[-1]["content"]) for child in below
    ]


# -- rewards of rubrics ------------------------------------------------------------------------------------------------
async def one_child(question, models):
    await ask(models["boss"])
    await ask(models["worker"].child())
    return {"score": question}


def of_rubric(rubric, questions=(1.0, 0.0), fails=False):
    arena = arena_of(scripted("a"), actors=TEAM, credit=HierarchyCredit(ddof=1, eps=0.0))
    arena.add_episode(AgentEpisode(one_child, Gateway(renderer="template"), actors=TEAM, rubric=rubric))
    [name] = arena.episodes
    results = asyncio.run(arena.generate_rollouts([EpisodeRequest(name, one, group_id="g") for one in questions]))
    if not fails:
        assert not [result.rollout.error for result in results if result.rollout.error]
        arena.assign_credit_and_pack(results)
    return results


def test_rewards_of_rubrics_reach_the_children():
    def score(extras):
        return extras["score"]

    def alone(rollouts):
        return [2 * rollout.extras["score"] for rollout in rollouts]

    for rubric, factor in ((Rubric([score]), 1), (Rubric([alone]), 2), (Rubric([score, alone]), 3)):
        results = of_rubric(rubric)
        assert [child.rollout.rewards for top in results for child in children(top)] == [
            {"worker": factor},
            {"worker": 0},
        ]
        rows = [node.rollout.steps[0].advantage for top in results for node in top.walk()]
        assert rows == pytest.approx([HALF, HALF, -HALF, -HALF])


def test_rubric_that_leaves_out_the_children():
    results = of_rubric(Rubric([lambda extras: {"boss": 1.0}]), fails=True)
    assert "actor 'worker' of a child of episode" in results[0].rollout.error
    assert not collect_samples(results)

    def boss(rollouts):
        return [{"boss": 1.0} for _ in rollouts]

    results = of_rubric(Rubric([boss]), fails=True)
    assert "actor 'worker' of a child of episode" in results[0].rollout.error
    assert not collect_samples(results)


def test_dropped_attempt_drops_the_children_that_take_its_reward():
    def score(extras):
        if not extras["score"]:
            raise DropRolloutError("unclear")
        return 1.0

    results = of_rubric(Rubric([score]))
    assert {sample.rollout_id for sample in collect_samples(results)} == {"e0", "e0.0"}


def test_reward_by_actor_lacks_that_of_a_child():
    async def agent(seen, models):
        await ask(models["worker"].child())
        return {"boss": 1.0}

    assert "lacks actor 'worker', which it called" in play(agent, ["a"], actors=TEAM, fails=True).error

    async def paid(seen, models):
        child = models["worker"].child()
        await ask(child)
        child.reward = 0.0
        return {}

    assert [row[4] for row in family(play(paid, ["a"], actors=TEAM))] == [0.0]

    async def also(seen, models):
        await paid(seen, models)
        return {"worker": 0.5}

    played = play(also, ["a"], actors=TEAM)
    assert (played.rewards, family(played)[0][4]) == ({"worker": 0.5}, 0.0)


# -- retries, evaluation and replay ------------------------------------------------------------------------------------
def test_retried_attempt_leaves_no_children_behind():
    left = [RuntimeError("broken"), None]

    async def agent(seen, models):
        if (error := left.pop(0)) is not None:
            await ask(models["worker"].child())
            raise error
        await ask(models["boss"])
        return {"boss": 1.0}

    played = play(agent, ["a"], actors=TEAM, arena_options={"retries": 1})
    assert not family(played) and played.rewards == {"boss": 1.0}
    lost = played.results[0].rollout.facts.lost_tokens
    assert lost == len(played.steps[0].completion_token_ids), "the child said the same"


def test_evaluation_trains_nothing():
    async def agent(seen, models):
        await ask(models["worker"].child())

    played = play(agent, ["a"], actors=TEAM, evaluation=True)
    assert [row[4] for row in family(played)] == [1.0]


def test_replay_of_an_attempt_with_children():
    async def agent(question, models):
        await ask(models["boss"])

        async def one(number):
            async with models["worker"].child() as worker:
                await ask(worker, f"part {number}")
                worker.reward = number

        await asyncio.gather(*(one(number) for number in range(5)))
        return 1.0

    def arena(script):
        arena = arena_of(script, actors=TEAM)
        arena.add_episode(AgentEpisode(agent, Gateway(renderer="template"), actors=TEAM))
        return arena

    first = arena(scripted(*"abcdef"))
    [row] = record(first, [EpisodeRequest(next(iter(first.episodes)), "x")])
    result, difference, _ = replay(arena([]), row)
    assert difference is None
    again = collect_samples([result_of(row)])
    assert [(sample.attempt_id, sample.weight) for sample in again] == [(None, 1.0)] + [("e0", 1 / 5)] * 5
    assert [child.rollout.rewards for child in children(result)] == [{"worker": number} for number in range(5)]


# -- bounds ------------------------------------------------------------------------------------------------------------
def test_sub_agents_are_bounded_in_number_and_depth():
    async def agent(seen, models):
        deepest = models["worker"]
        for _ in range(3):
            deepest = deepest.child()
        with pytest.raises(RuntimeError, match=r"there are max_depth=3 in each other"):
            deepest.child()
        await ask(deepest)
        for _ in range(2):
            models["worker"].child()
        with pytest.raises(RuntimeError, match=r"the attempt has max_children=5"):
            models["worker"].child()
        seen.append("so")

    played = play(agent, ["a"], actors=TEAM, max_depth=3, max_children=5)
    assert played.seen == ["so"] and played.metrics["gateway/children/worker"] == 5
    with pytest.raises(ValueError, match="max_depth=65: expected at most 64"):
        GatewaySettings(max_depth=65)


def test_the_deepest_sub_agents_are_kept_recorded_and_packed():
    async def agent(seen, models):
        deepest = models["worker"]
        for _ in range(64):
            deepest = deepest.child()
        await ask(deepest)

    played = play(agent, ["a"], actors=TEAM, max_depth=64)
    [result] = played.results
    depth, node = 0, result
    while children(node):
        depth, [node] = depth + 1, children(node)
    assert depth == 64 and node.rollout.rewards == {"worker": 1.0}
    assert json_line(plain_result(result))
    played.arena.assign_credit_and_pack(played.results)


def test_standing_server_has_no_children():
    async def run():
        arena = arena_of(scripted("a"))
        arena.add_episode(AgentEpisode(lambda question, models: 1.0, Gateway(), actors=["solver"]))
        key = "k" * 43
        async with (
            standing(arena, GatewaySettings(renderer="template"), key) as url,
            openai.AsyncOpenAI(base_url=url, api_key=key) as client,
        ):
            with pytest.raises(openai.NotFoundError, match="this server has no episodes"):
                await client.post("/children", body={"model": "solver"}, cast_to=object)

    asyncio.run(run())


def test_trees_have_no_children():
    async def agent(seen, models):
        await ask(models["worker"].child())

    arena = arena_of(scripted("a"), actors=TEAM)
    episode = ReplayedEpisode(agent, Gateway(renderer="template"), actors=TEAM, sampler=TreeSampler(branches=2))
    arena.add_episode(episode)
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest(episode.episode_type, "x")]))
    assert "an agent that is branched has no sub-agents" in result.rollout.error
