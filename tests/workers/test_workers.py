"""Episodes that workers play: the results, batches and stores of one arena, for any number of workers."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from turnwise.arena import Arena, ArtifactStore, BatchFailedError
from turnwise.arena.runtime.context import current_context
from turnwise.run.build import TaskArena
from turnwise.types import CHILD, Artifact, EpisodeRequest, Sampling

from .playing import KEY, Leave, Try, Workers, attach, build, difference, own_arena, until

pytestmark = pytest.mark.xdist_group("workers")

SEQUENTIAL = {"nested", "stores"}
"""Arenas whose stores one arena changes in the order of time. Workers change them in the order of the requests, which
is one arena's order if its episodes run one after the other."""


def requests_of(name: str, arena: Arena, step: int) -> list[EpisodeRequest]:
    if name == "stores":
        return [EpisodeRequest("keep", {"step": step, "question": n % 4}) for n in range(8)]
    if name == "tools":
        return [EpisodeRequest("look", n) for n in range(4)]
    if name == "agents":
        return [EpisodeRequest(next(iter(arena.episodes)), f"{n % 2}", group_id=f"{n % 2}", seed=n) for n in range(6)]
    if name == "own":
        numbers = [n % 7 for n in range(14)]
        asked = [(n, {"number": n, "more": n % 3, "joins": f"after {n}"}) for n in numbers]
        return [EpisodeRequest("wonder", artifact, group_id=f"{n}", seed=5, timeout=60.0) for n, artifact in asked]
    return arena.task.requests(step, 4, 2)


def plain(arena: Arena, results: list[Any], batch: Any) -> list[Any]:
    """Everything that a step leaves: results, recordings, columns, and the arena's state."""
    recordings = []
    for result in results:
        told = result.recording.to_json(result)
        for event in told["events"]:  # answers that other episodes of the batch change in one arena
            if event[0] == "read" and event[2]["read"] in ("solved.add", "said.record"):
                event[2]["value"] = None
        recordings.append({**told, "events": sorted(map(repr, told["events"]))})
    names = ("token_ids", "cu_seqlens", "loss_mask", "rollout_logprobs", "advantages", "rewards", "min_version")
    columns = {name: getattr(batch, name).tolist() for name in names}
    return [results, recordings, columns, batch.metrics, batch.drops, arena.state_dict()]


class OneByOne(TaskArena):
    """Plays its top episodes one after the other."""

    async def generate_rollouts(self, requests: Any, concurrency: int | None = None) -> Any:
        return await super().generate_rollouts(requests, concurrency if current_context() else 1)


async def play(name: str, arena: Arena) -> list[Any]:
    """Play three steps and an evaluation."""
    arena.record_episodes, step = True, 0

    def get_batch() -> list[EpisodeRequest]:
        nonlocal step
        step += 1
        return requests_of(name, arena, step)

    arena.get_batch = get_batch
    told = []
    for _ in range(3):
        results = await arena.sample()
        told.append(plain(arena, results, arena.assign_credit_and_pack(results)))
        arena.record_attempts()
    view = arena.evaluation(Sampling(temperature=0.5, max_tokens=40))
    asked = arena.task.eval_requests("eval", 6) if arena.task is not None else requests_of(name, arena, 9)
    return [*told, await view.generate_rollouts(asked), view.stores.keys(), arena.state_dict()]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one arena plays, by its name."""
    return {}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "name",
    [
        *("sudoku", "nested", "stores", "dynamic", "games", "own"),
        pytest.param("agents", marks=pytest.mark.needs("aiohttp", "openai")),
        pytest.param("tools", marks=[pytest.mark.needs("mcp"), pytest.mark.slow]),
    ],
)
async def test_equal_to_one_arena(name: str, count: int, workers: Workers, alone: dict[str, Any]) -> None:
    if name not in alone:
        alone[name] = await play(name, build(name, OneByOne if name in SEQUENTIAL else TaskArena))
    arena = build(name, TaskArena)
    remote = attach(arena, name, workers.members(count), count=count)
    await until(lambda: len(remote.playing()) == count)
    found = await play(name, arena)
    expected = alone[name]
    assert remote.deaths == 0
    assert difference(found, expected) == ""
    results = [result for step in range(3) for result in found[step][0]]
    if name == "dynamic":
        assert max(result.rollout.facts.draw for result in results) > 0
    if name in SEQUENTIAL:
        [state] = found[2][5]["stores"].values()
        assert len(state["artifacts"]) > 2 and "pending" not in repr(found)
    if name == "agents":
        children = [child.rollout.meta[CHILD] for result in results for child in result.children]
        assert {child["inherits"] for child in children} == {True, False} and max(c["order"] for c in children) > 0
    if name == "tools":
        assert {result.rollout.steps[-1].completion for result in results} == {"found"}
    if name == "own":
        assert any(result.rollout.error for result in results) and any("group" in r.rollout.meta for r in results)
        assert any(child.rollout.meta.get("continues") for result in results for child in result.children)


async def test_an_evaluation_without_some_actors_plays_on_workers(workers: Workers) -> None:
    from turnwise.run.parts import ablations_of

    [first, *_] = ablations_of(build("sudoku", TaskArena).task)
    played = []
    for remote in (False, True):
        arena = build("sudoku", TaskArena)
        if remote:
            attach(arena, "sudoku", workers.members(2))
        view = copy.copy(arena)
        view.actors = {actor: arena.actors[actor] for actor in first.without.actors}
        view.episodes = dict(first.without.episodes)
        asked = arena.task.eval_requests("eval", 3)
        played.append(await view.evaluation().generate_rollouts(asked))
    assert played[0] == played[1]
    assert {step.actor_id for result in played[0] for step in result.rollout.steps} == set(first.without.actors)


async def test_a_call_may_limit_its_episodes(workers: Workers) -> None:
    asked = [EpisodeRequest("try", Artifact(f"a-{n}", n)) for n in range(6)]
    arena = build("own", TaskArena)
    expected = await build("own", TaskArena).generate_rollouts(asked)
    attach(arena, "own", workers.members(2))
    assert await arena.generate_rollouts(asked, concurrency=1) == expected
    with arena.budget.limited_to(1):
        assert len(await arena.generate_rollouts(asked)) == 6
    with pytest.raises(ValueError, match="concurrency=0"):
        await arena.generate_rollouts(asked, concurrency=0)


async def test_too_many_failures_end_the_call(workers: Workers) -> None:
    arena = build("own", TaskArena)
    arena.failure_threshold = 0.2
    attach(arena, "own", workers.members(2))
    asked = [EpisodeRequest("try", None, group_id=f"{n % 3}") for n in range(9)]  # None has no data
    with pytest.raises(BatchFailedError, match=r"(?s)of 9 episodes failed.*AttributeError") as caught:
        await arena.generate_rollouts(asked)
    assert "playing.py" in str(caught.value)
    assert len(await arena.generate_rollouts([EpisodeRequest("try", Artifact("a-1", 1))])) == 1, "the workers go on"


async def test_cancelling_a_call_frees_the_workers(workers: Workers) -> None:
    arena = build("stores", TaskArena)
    remote = attach(arena, "stores", workers.members(1))
    call = asyncio.ensure_future(arena.generate_rollouts(requests_of("stores", arena, 1) * 20))
    await until(lambda: any(link.groups for link in remote._links.values()))
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    await until(lambda: not any(link.groups for link in remote._links.values()))
    arena.started = arena.batches = 0
    assert await arena.generate_rollouts(requests_of("stores", arena, 1)) == await build(
        "stores", TaskArena
    ).generate_rollouts(requests_of("stores", arena, 1), concurrency=1)
    await remote.close()
    with pytest.raises(RuntimeError, match="connections are closed"):
        await arena.generate_rollouts(requests_of("stores", arena, 1))


# -- what can't be the same --------------------------------------------------------------------------------------------
async def test_groups_in_two_workers_and_objects_that_can_not_travel_are_refused(workers: Workers) -> None:
    """Group functions would see a part of it in each."""
    arena = build("own", TaskArena)
    attach(arena, "own", workers.members(2))
    asked = [EpisodeRequest("wonder", {"number": n, "more": 1, "joins": "same"}, group_id=f"{n}") for n in range(2)]
    with pytest.raises(RuntimeError, match=r"'wonder' has group functions, and its group 'same'"):
        await arena.generate_rollouts(asked)
    arena = build("own", TaskArena)
    attach(arena, "own", workers.members(2))
    with pytest.raises(TypeError, match=r"request 'e0' of episode 'try' can't be sent to a worker"):
        await arena.generate_rollouts([EpisodeRequest("try", lambda: 0, group_id="f")])
    arena.add_store(ArtifactStore("held")).add(lambda: 0)
    with pytest.raises(TypeError, match="store 'held' can't be sent to the workers"):
        await arena.generate_rollouts([EpisodeRequest("try", Artifact("a-1", 1))])


def gone() -> Any:
    raise OSError("the shared folder is gone")


@pytest.mark.parametrize(
    ("members", "error", "said"),
    [
        (dict, RuntimeError, "no worker for 0 seconds: none has an address"),
        (
            lambda: {"worker-0": "127.0.0.1:9"},
            RuntimeError,
            "worker-0 at 127.0.0.1:9: .*Connect call failed",
        ),
        (gone, OSError, "the shared folder is gone"),
    ],
)
async def test_no_worker_is_left(members: Any, error: Any, said: str) -> None:
    arena = build("own", TaskArena)
    attach(arena, "own", members, wait=0.3)
    with pytest.raises(error, match=said):
        await arena.generate_rollouts([EpisodeRequest("leave", "x")])


async def test_another_key_is_refused(workers: Workers) -> None:
    arena = build("own", TaskArena)
    attach(arena, "own", workers.members(1), key="another key")
    with pytest.raises(RuntimeError, match=r"no worker can play this run: worker-0.*refuses this run's key"):
        await arena.generate_rollouts([EpisodeRequest("leave", "x")])
    arena = own_arena(TaskArena, Leave(), Try())
    attach(arena, "own", workers.members(1), key=KEY)
    assert len(await arena.generate_rollouts([EpisodeRequest("leave", "x")])) == 1
