"""Whatever an episode met, its re-run meets it again in the same order, or tells where it went another way."""

from __future__ import annotations

import asyncio
import copy
import random
import time

import pytest

from turnwise.arena import (
    ArtifactStore,
    Episode,
    MultiTurnEpisode,
    Rubric,
    SingleTurnEpisode,
    TreeSampler,
    record_input,
)
from turnwise.arena.recording.rollouts_jsonl import EpisodeRecord, RecordError
from turnwise.arena.runtime.context import current_context
from turnwise.replay.idle_loop import DeadlockDetectingLoop
from turnwise.types import ContextLengthError, EpisodeRequest, ModelError

from .conftest import respond
from .helpers import nested
from .replaying import play, record

LATE = 0.03


class Silent:
    """In the place of a client: whoever asks it fails the test."""

    def __init__(self, client):
        self.version = client.version

    async def generate(self, requests):
        raise AssertionError("a replay asked a model")


def silenced(arena):
    arena.client = Silent(arena.client)
    return arena


class Race(SingleTurnEpisode):
    """An attempt of the nested kind; "slow" ones run into their time limit."""

    episode_type = "race"

    def get_prompt(self, artifact):
        return f"race {artifact}"


class Busy(Episode):
    """Clocks, tools, judges, calls at once, calls off the record, children, failures, and what its seed draws."""

    episode_type = "busy"

    def __init__(self, tool=lambda question: random.random()):
        self.tool = tool
        self.rubric = Rubric([self.judged, self.first], timeout=100.0)

    async def rollout(self, arena, artifact, state=None):
        data = state.data
        data["artifact"] = repr(artifact)
        data["clock"] = record_input("clock", time.time)
        data["tool"] = await record_input("tool", self.ask_tool, artifact[0])
        try:
            record_input("broken", lambda: 1 / 0)
        except ZeroDivisionError as error:
            data["broken"] = str(error)
        calls = [asyncio.ensure_future(arena.call_model("solver", f"call {number}")) for number in range(4)]
        order = [(await one).text for one in asyncio.as_completed(calls)]
        data["order"] = order
        data["off"] = (await arena.call_model("solver", "off the record", record=False)).text
        try:
            await arena.call_model("solver", "fail")
        except ModelError as error:
            data["failed"] = f"{type(error).__name__}: {error}"
        requests = [EpisodeRequest("race", number, timeout=None if number else LATE) for number in range(3)]
        children = await arena.generate_rollouts(requests)
        data["children"] = [child.rollout.rewards.get("solver") for child in children]
        data["luck"] = self.rng.random()
        if data["luck"] < 0.5 and not current_context().rollout.facts.attempt:
            raise RuntimeError(f"an unlucky {data['luck']}")
        return state

    async def ask_tool(self, question):
        await asyncio.sleep(random.random() * LATE / 4)
        return {"answer": self.tool(question), "of": (question,)}

    def get_extras(self, state):
        return dict(state.data)

    async def judged(self, arena, extras):
        asked = (arena.call_model(None, f"judge {extras['order']} {name}") for name in "ab")
        return {"solver": sum(float(answer.text) for answer in await asyncio.gather(*asked))}

    def first(self, extras):
        return {"solver": float(extras["order"][0]) + record_input("in a thread", random.random)}


async def moody(prompt, request):
    """Answers after a while that nobody can know, with digits that nobody can know; "race 0" comes too late."""
    await asyncio.sleep(random.random() * LATE / 8)
    if "race 0" in prompt:
        await asyncio.sleep(10)
    if "fail" in prompt:
        raise random.choice([ModelError, ContextLengthError])(f"for the {random.random()}th time")
    return str(random.randrange(10))


def busy_arena(make_arena, **options):
    arena = make_arena(moody, failure_threshold=1.0, **{"retries": 1, "seed": 5, "max_concurrency": 3} | options)
    race = Race()
    race.rubric = Rubric([lambda completion: float(completion)])
    arena.add_episode(race)
    arena.add_episode(Busy())
    return arena


def test_all_that_chance_brings_comes_again(make_arena):
    requests = [EpisodeRequest("busy", (f"q{number}", {"x": number})) for number in range(6)]
    rows = record(busy_arena(make_arena), requests)
    orders = [tuple(row["extras"]["order"]) for row in rows]
    assert len(set(orders)) > 1 and len({row["extras"]["clock"] for row in rows}) == 6
    assert any(row["meta"].get("attempt") for row in rows) and any(not row["meta"].get("attempt") for row in rows)
    for row in rows:
        assert [child["error"] is None for child in row["children"]] == [False, True, True]
        result, divergence, playback = play(silenced(busy_arena(make_arena)), row)
        assert divergence is None, str(divergence)
        assert result.rollout.extras["artifact"] == row["extras"]["artifact"], "tuples are tuples again"
        assert playback.played == sum(kind == "answer" for kind, key in playback.record.events if "tool" not in key) - (
            1 + row["meta"].get("attempt", 0)
        )


def test_an_episode_that_ran_out_of_time_does_so_again_at_the_same_call(make_arena):
    requests = [EpisodeRequest("busy", ("q", {}), timeout=LATE / 2)]
    [row] = record(busy_arena(make_arena, retries=0), requests)
    assert "ran past its deadline" in row["error"]
    result, divergence, _ = play(silenced(busy_arena(make_arena, retries=0)), row)
    assert divergence is None, str(divergence)
    assert "ran past its deadline" in result.rollout.error


def test_parent_and_child_that_ran_out_of_time_together(make_arena):
    async def never(prompt, request):
        await asyncio.sleep(9)

    arenas = [nested(make_arena, never if fresh else None, copies=2, failure_threshold=1.0) for fresh in (1, 0)]
    [row] = record(arenas[0], [EpisodeRequest("propose", "x", timeout=LATE)])
    assert row["error"] and not row["children"]

    async def then_never(prompt, request):
        return "7" if "Topic" in prompt else await never(prompt, request)

    [row] = record(
        nested(make_arena, then_never, copies=2, failure_threshold=1.0), [EpisodeRequest("propose", "x", timeout=LATE)]
    )
    assert row["error"]
    _, divergence, _ = play(silenced(arenas[1]), row)
    assert divergence is None, str(divergence)


class Board(MultiTurnEpisode):
    """Two players; each writes a digit on a board that both see."""

    episode_type = "board"
    actors = ("left", "right")
    max_turns = 3
    rubric = Rubric([lambda extras: {"left": extras["sum"], "right": -extras["sum"]}])
    worth = staticmethod(lambda digit: digit)

    def setup(self, state, arena, artifact):
        state.data = {"board": [artifact]}

    def build_messages(self, state, arena, artifact):
        return f"board {list(state.data['board'])}"

    def env_response(self, state, arena, artifact):
        state.data["board"].append(int(state.last_completion_text))

    def step_reward(self, state, arena, artifact):
        return float(self.worth(state.data["board"][-1]))

    def get_extras(self, state):
        return {"sum": float(sum(state.data["board"]))}


def board(make_arena, reply=None, episode=Board, **options):
    arena = make_arena(reply, actors=("left", "right"), seed=4, **options)
    arena.add_episode(episode(sampler=TreeSampler(branches=3, select="sample")))
    return arena


@pytest.fixture
def tree_row(make_arena):
    def flaky(prompt, request):
        digit = str(request.sampling.seed % 10)
        return ModelError("gone") if digit == "3" else digit

    [row] = record(board(make_arena, flaky), [EpisodeRequest("board", 0)])
    return row


def differs(arena, row):
    """The difference that a replay of ``row`` finds."""
    _, divergence, _ = play(silenced(arena), row)
    assert divergence is not None and divergence.expected != divergence.found
    return divergence


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("steps", "right", "reward"), 99.0, "the reward"),
        (("steps", "right", "prompt_token_ids"), lambda ids: [*ids[:-1], 1], "the prompt"),
        (("steps", "right", "actor_id"), "nobody", "the actor"),
        (("steps", "right", "turn"), 7, "the turn"),
        (("steps", "right", "policy"), "other", "the policy"),
        (("rewards", "left"), -1.5, "the rewards"),
        (("metrics", "tree/branches"), 2, "the metrics"),
        (("extras", "sum"), 0.5, "the extras"),
        (("meta", "ended"), "done", "the meta"),
        (("seed",), 1, "the seed"),
        (("error",), "Traceback\nValueError: no", "the error"),
    ],
)
def test_what_was_tampered_with_is_the_first_difference(make_arena, tree_row, path, value, what):
    row = inner = copy.deepcopy(tree_row)
    for key in path[:-1]:
        inner = next(step for step in inner if step["actor_id"] == key) if key == "right" else inner[key]
    inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value
    divergence = differs(board(make_arena), row)
    assert divergence.what == what
    if "right" in path:
        actor, turn = (value if name == path[-1] else usual for name, usual in (("actor_id", "right"), ("turn", 0)))
        assert f"turn {turn}, actor {actor!r}" in divergence.where
    else:
        assert "episode e0 (board)" in divergence.where


def test_a_tampered_completion_shows_where_the_environment_reacts(make_arena, tree_row):
    row = copy.deepcopy(tree_row)
    step = next(step for step in row["steps"] if step["selected"] and step["completion"] != "5")
    step["completion"] = "5"
    divergence = differs(board(make_arena), row)
    assert divergence.what == "the reward" and divergence.found == "5.0"
    assert f"actor {step['actor_id']!r}" in divergence.where


class Renamed(Board):
    def build_messages(self, state, arena, artifact):
        text = super().build_messages(state, arena, artifact)
        return text if state.current_actor == "left" else text.replace("board", "table")


class Dearer(Board):
    worth = staticmethod(lambda digit: digit + 1)


class Longer(Board):
    max_turns = 4


class Shorter(Board):
    max_turns = 2


class Gambler(Board):
    def setup(self, state, arena, artifact):
        super().setup(state, arena, artifact)
        self.rng.random()


@pytest.mark.parametrize(
    ("episode", "what", "where"),
    [
        (Renamed, "the prompt", "turn 0, actor 'right', call 3 of"),
        (Dearer, "the reward", "turn 0, actor 'left', call 0 of"),
        (Longer, "the order of calls", "turn 3"),
        (Shorter, "the number of recorded calls", ""),
        (Gambler, "the next random number of the episode", "the end of e0"),
    ],
)
def test_changed_code_is_told_at_the_first_thing_that_it_changes(make_arena, tree_row, episode, what, where):
    divergence = differs(board(make_arena, episode=episode), tree_row)
    assert what in divergence.what and where in divergence.where
    expected, found = divergence.expected, divergence.found
    if episode is Renamed:
        assert "'board" in expected.replace("<user>", "'") and "table" in found and "token 6 of" in expected
    elif episode is Dearer:
        first = next(step["reward"] for step in tree_row["steps"] if step["reward"] is not None)
        assert (expected, found) == (repr(first), repr(first + 1))
    elif episode in (Longer, Shorter):
        assert "no call" in (expected if episode is Longer else found)


class Both(Episode):
    """Asks these at once, after it read a clock by this name."""

    episode_type = "both"
    rubric = Rubric([lambda completion: 1.0])

    def __init__(self, asked=("a", "b"), title="clock"):
        self.asked, self.title = asked, title

    async def rollout(self, arena, artifact, state=None):
        record_input(self.title, time.time)
        await asyncio.gather(*(arena.call_model("solver", name) for name in self.asked))
        return state


def test_a_call_or_a_reading_that_is_missing_is_named_and_nobody_waits_for_ever(make_arena):
    [row] = record(make_arena(seed=2, episodes=[Both()]), [EpisodeRequest("both", 0)])
    assert play(silenced(make_arena(seed=2, episodes=[Both()])), row)[1] is None
    divergence = differs(make_arena(seed=2, episodes=[Both(asked=("a",))]), row)
    assert divergence.what == "the order: a call that the record has next" and "call 1 of 2 (e0#2)" in divergence.where
    divergence = differs(make_arena(seed=2, episodes=[Both(title="watch")]), row)
    assert divergence.what == "what was read" and divergence.expected == "clock of []"


class Library(Episode):
    """Reads and writes a store that others fill meanwhile."""

    episode_type = "library"
    rubric = Rubric([lambda completion: float(completion)])

    def stores(self):
        return [ArtifactStore("books", sampling="weighted")]

    async def rollout(self, arena, artifact, state=None):
        store = arena.stores["books"]
        for number in range(3):
            text = (await arena.call_model("solver", f"book {number}")).text
            added = store.add((artifact, text), id=f"{artifact}-{number}", weight=1.0 + number)
            store.set_weight(added.id, 0.5 + number)
            store.record(added.id, 1.0)
        await arena.call_model("solver", f"of {len(store)}: {[book.data for book in store]}")
        data = state.data
        data["drawn"] = [book.id for book in store.sample(2)], store.sample_one().weight, self.rng.random()
        data["sides"] = [book.id for book in store.split("train", share=0.5)], f"{artifact}-0" in store
        data["outcome"] = store.outcome(f"{artifact}-1").attempts
        try:
            store.add("taken", id=f"{artifact}-1")
        except ValueError as error:
            data["refused"] = str(error)
        return state

    def get_extras(self, state):
        return dict(state.data)


def test_stores_answer_as_they_did_though_others_filled_them(make_arena):
    def library():
        arena = make_arena(moody, seed=8, episodes=[Library()])
        return arena

    first = library()
    rows = record(first, [EpisodeRequest("library", f"shelf{number}") for number in range(5)])
    assert len(first.stores["books"]) == 15
    assert len({len(row["steps"][-1]["prompt"][0]["content"]) for row in rows}) > 1, "each met another store"
    for row in rows:
        arena = silenced(library())
        arena.stores = {name: store.frozen() for name, store in arena.stores.items()}
        result, divergence, _ = play(arena, row)
        assert divergence is None, str(divergence)
        assert "already has an artifact" in result.rollout.extras["refused"]
        assert len(arena.stores["books"]) == 0, "nothing is written again"

    async def live(call):
        return respond("7")

    again = library()
    again.stores["books"].add("before", id="old")
    again.stores = {name: store.frozen() for name, store in again.stores.items()}
    result, _, _ = play(silenced(again), rows[0], live=live, swapped=["solver"])
    assert result.rollout.error is None and result.rollout.extras["outcome"] == 1, "what it made is there for it"
    assert [book.id for book in again.stores["books"]] == ["old"]
    tampered = copy.deepcopy(rows[0])
    tampered["steps"][1]["completion"] = "99"
    divergence = play(silenced(library()), tampered)[1]
    assert divergence.what == "what was read" and "books.add of" in divergence.expected and '"99"' in divergence.found


def test_until_stops_after_so_many_calls_with_the_state_of_each_branch(make_arena, tree_row):
    calls = len(EpisodeRecord(tree_row).calls)
    for until in (0, 1, 3, 4, calls - 1):
        result, divergence, playback = play(silenced(board(make_arena)), tree_row, until=until)
        assert (result, divergence) == (None, None)
        assert playback.played == until
        numbers = [playback.record.calls[call.key].number for _, call in playback.left]
        assert min(numbers) <= until and len(numbers) in (1, 2, 3)
    boards = [list(context.state.data["board"]) for context, _ in play(board(make_arena), tree_row, until=3)[2].left]
    winner = next(step for step in tree_row["steps"] if step["actor_id"] == "left" and step["selected"])
    assert boards == [[0, int(winner["completion"])]] * 3
    result, divergence, _ = play(silenced(board(make_arena)), tree_row, until=calls)
    assert divergence is None and result is not None


@pytest.mark.parametrize("until", [None, 5])
def test_a_swapped_actor_is_sampled_anew_and_the_others_once_their_prompts_differ(make_arena, tree_row, until):
    asked = []

    async def live(call):
        asked.append(call)
        return respond("8")

    result, divergence, playback = play(
        silenced(board(make_arena)), tree_row, until=until, live=live, swapped=["right"]
    )
    assert divergence is None and result.rollout.error is None
    first_right = [step.completion for step in result.rollout.steps if step.actor_id == "right"][:3]
    assert asked[0].actor_id == "right" and "8" in first_right
    lefts = [call for call in asked if call.actor_id == "left"]
    assert lefts and min(call.turn for call in lefts) >= 1, "the first turn of the left is the record's"
    assert playback.played + playback.sampled == len(playback.calls)


def test_lines_without_a_tape_or_of_another_format_are_refused(tree_row):
    without = {name: value for name, value in tree_row.items() if name != "replay"}
    with pytest.raises(RecordError, match=r"'e0' was written without what a replay needs: see log.record_for_replay"):
        EpisodeRecord(without)
    with pytest.raises(RecordError, match=r"format 99, this version plays"):
        EpisodeRecord({**tree_row, "replay": {**tree_row["replay"], "format": 99}})
    lost = copy.deepcopy(tree_row)
    lost["replay"]["request"]["artifact"] = {"$lost": "<a lock>"}
    with pytest.raises(RecordError, match=r"<a lock> could not be recorded"):
        EpisodeRecord(lost)
    lost["replay"]["request"]["artifact"] = {"$dataclass": ["subprocess:Popen", {"args": ["true"]}]}
    with pytest.raises(RecordError, match=r"it names subprocess\.Popen.*--allow-pickle"):
        EpisodeRecord(lost)
    lost["replay"]["request"]["artifact"] = {"$array": {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}}
    with pytest.raises(RecordError, match=r"'e0' can't be played again: "):
        EpisodeRecord(lost)
    del lost["replay"]["request"]
    with pytest.raises(RecordError, match=r"'e0' can't be played again: its record is damaged \(KeyError: 'request'\)"):
        EpisodeRecord(lost)


# -- the loop that tells of whoever waits for ever --------------------------------------------------------------------
def run_on_loop(main):
    with asyncio.Runner(loop_factory=DeadlockDetectingLoop) as runner:
        return runner.run(main())


def test_who_waits_for_ever_is_told_of():
    async def main():
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        loop.on_idle = told.set
        await told.wait()
        return "told"

    assert run_on_loop(main) == "told"


def test_timers_threads_and_pipes_are_no_idleness():
    async def main():
        calls = []
        asyncio.get_running_loop().on_idle = lambda: calls.append("idle")
        await asyncio.sleep(0.3)
        await asyncio.to_thread(time.sleep, 0.3)
        process = await asyncio.create_subprocess_exec("sleep", "0.3", stdout=asyncio.subprocess.PIPE)
        await process.communicate()
        return calls, asyncio.get_running_loop().in_threads

    assert run_on_loop(main) == ([], 0)
