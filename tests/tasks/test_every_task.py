"""The contract of all shipped tasks. The rules of each game have tests of their own, in a folder of its name."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import pytest

from turnwise.arena import Arena, TreeSampler
from turnwise.inference.scripted import ByteTokenizer
from turnwise.run.build import train_from_config
from turnwise.tasks import TASKS
from turnwise.tasks.base import split_of
from turnwise.tasks.code_duel import prompts as code_duel
from turnwise.tasks.code_duel.prompts import demonstrations as demonstrate_code
from turnwise.tasks.math_orchestra import MathOrchestraEpisode
from turnwise.tasks.math_orchestra import read_view as read_math
from turnwise.tasks.plan_path import PlanPathEpisode, parse_maze
from turnwise.tasks.plan_path import prompts as plan_path
from turnwise.tasks.plan_path.maze import split_of_maze
from turnwise.tasks.plan_path.prompts import demonstrations as demonstrate_routes
from turnwise.tasks.proposer_solver import Size
from turnwise.tasks.proposer_solver.episodes import ProposeEpisode, propose_message, read_example
from turnwise.tasks.refine_loop import team as refine_loop
from turnwise.tasks.search_orchestra import SearchOrchestraEpisode
from turnwise.tasks.search_orchestra import prompts as search
from turnwise.tasks.search_orchestra.corpus import Passage
from turnwise.tasks.sokoban import State, parse_level
from turnwise.tasks.sokoban import prompts as sokoban
from turnwise.tasks.sokoban.level import split_of_layout
from turnwise.tasks.sokoban.prompts import demonstrations as demonstrate_pushes
from turnwise.tasks.sudoku import prompts as sudoku
from turnwise.tasks.sudoku.prompts import demonstrations as demonstrate_grids
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.validate import config_from_dict
from turnwise.types import Messages, Sampling

from .any_text import Babbler, Blind, NoSandbox, Writer, any_text

STRINGS = int(os.environ.get("TURNWISE_FUZZ", "1000"))
"""Number of random texts per task in a slow test."""
SOLO = {"max_turns": 1}


class Shipped(NamedTuple):
    """What the contract needs to know of a task."""

    luck: float
    """Share of successes that the random player stays below. The oracle has 1, or in a game for two just more."""
    rewards: tuple[float, float] = (0.0, 1.0)
    """The least and the most that an action or an actor earns."""
    alone: Mapping[str, Any] | None = None
    """Options with which one actor plays by itself."""
    harder: Mapping[str, Any] | None = None
    """Other options that the oracle and the random player play."""
    asked: Callable[[Any], Any] | None = None
    """The question of an artifact, in the form that decides its split."""
    shown: Callable[[Messages], Any] | None = None
    """The question in the prompt of a demonstration, in the same form."""
    split: Callable[[Any], str] = split_of
    games: int = 40
    """Number of held-out games that the oracle and the random player play."""
    oracle: Mapping[str, float] = {}
    """Functions of the rubric, and the least that the oracle gets from each for every actor."""
    trains: Mapping[str, Any] | None = None
    """Options of a small run."""


def text_of(artifact: Any) -> str:
    return artifact["question"]


SHIPPED = {
    "code_duel": Shipped(
        0.1, (-0.25, 2.0), {"actors": ["coder"], **SOLO}, games=16, oracle={"discernment": 2 / 3},
        asked=lambda artifact: artifact["problem"], shown=lambda messages: code_duel.read_view(messages).statement,
        trains={"families": ["sums"], "max_cases": 2, "max_tokens": 48},
    ),
    "gsm8k": Shipped(0.01, games=15, asked=text_of, shown=lambda messages: messages[-1]["content"]),
    "kuhn_poker": Shipped(1.0, (-3.0, 3.0), games=300),
    "lookup": Shipped(0.2, games=20, harder={"hops": 2}, asked=text_of),
    "math_orchestra": Shipped(0.01, games=15, asked=text_of, shown=lambda messages: read_math(messages).question),
    "negotiation": Shipped(
        1.0, (-1.5, 1.5), games=100, split=lambda question: split_of(str(question)),
        asked=lambda artifact: {key: artifact[key] for key in ("pool", "values")},
    ),
    "plan_path": Shipped(
        0.1, (-1.0, 2.0), {"actors": ["solver"], **SOLO}, games=60, oracle={"goal": 1.0},
        asked=lambda artifact: parse_maze(artifact["maze"]),
        shown=lambda messages: plan_path.read_messages(messages)[0],
        split=split_of_maze,
    ),
    "proposer_solver": Shipped(
        0.15, (-0.25, 1.0), asked=lambda artifact: artifact.get("example") or artifact["question"],
        shown=lambda messages: read_example(messages) or messages[-1]["content"],
        trains={"numbers": 2, "largest": 3, "attempts": 2, "max_tokens": 8},
    ),
    "refine_loop": Shipped(
        0.2, (-0.25, 2.0), {"actors": ["generator"], **SOLO}, {"rules": 5}, oracle={"found_faults": 1.0},
        asked=text_of, shown=lambda messages: refine_loop.read_view(messages).question,
        trains={"rules": 2, "max_tokens": 12},
    ),
    "search_orchestra": Shipped(
        0.4, harder={"hops": 3}, games=30, oracle={"found_share": 1.0},
        asked=text_of, shown=lambda messages: search.read_view(messages).question,
        trains={"hops": 1, "max_searches": 1, "max_tokens": 16},
    ),
    "sokoban": Shipped(
        0.25, (-1.0, 2.0), {"actors": ["solver"], **SOLO}, {"boxes": 2, "min_route": 6},
        asked=lambda artifact: parse_level(artifact["level"]),
        shown=lambda messages: sokoban.read_messages(messages)[0],
        split=lambda level: split_of_layout(level.cells, level.goals),
        trains={"side": 5, "min_route": 2, "shaping": 0.5, "max_turns": 2, "max_tokens": 12},
    ),
    "split_clues": Shipped(0.05, (0.0, 2.0), {"actors": ["solver"]}, asked=lambda artifact: artifact["rows"]),
    "sudoku": Shipped(
        0.1, (-0.25, 2.0), {"actors": ["solver"], **SOLO}, games=60,
        asked=lambda artifact: artifact["puzzle"], shown=lambda messages: sudoku.read_messages(messages)[0],
    ),
    "tic_tac_toe": Shipped(1.0, (-1.5, 1.5), games=60),
}  # fmt: skip
GAMES_FOR_TWO = ("kuhn_poker", "negotiation", "tic_tac_toe")
NO_TREE = (*GAMES_FOR_TWO, "gsm8k", "lookup")


@pytest.fixture(params=sorted(TASKS))
def task(request, build):
    return build(request.param)


def test_every_shipped_task_is_here():
    assert SHIPPED.keys() == TASKS.keys()


# --- the protocol -----------------------------------------------------------------------------------------------------
def test_actors_episodes_and_the_metric_belong_together(task):
    prompts = {actor.id: actor.system_prompt for actor in task.actors}
    assert len(set(prompts.values())) == len(prompts), "each actor has its own instruction"
    episodes = task.episodes()
    assert {request.episode_type for request in task.requests(0, 2, 2)} == {task.name} <= set(episodes)
    metric, _, actor = task.success_metric.partition("/")
    (evaluated,) = {request.episode_type for request in task.eval_requests("eval", 2)}
    assert actor in {*prompts, "model"} and metric in episodes[evaluated].rubric.names
    assert {actor.max_tokens for actor in task.actors} == {task.options.max_tokens}


def test_requests_depend_on_seed_and_step_alone(task, build):
    first = task.requests(5, questions=4, copies=3)
    assert first == build(task.name).requests(5, questions=4, copies=3) != build(task.name, seed=1).requests(5, 4, 3)
    groups = defaultdict(list)
    for request in first:
        groups[request.group_id].append(json.dumps(request.artifact))
    assert [len(copies) for copies in groups.values()] == [3] * 4
    assert all(len(set(copies)) == 1 for copies in groups.values()), "copies of a question share a group"
    seeds = {request.seed for request in first}
    assert len(seeds) == 12 and all(request.is_trainable for request in first)
    for other in (task.requests(6, 4, 3), build(task.name, seed=1).requests(5, 4, 3)):
        assert not seeds & {request.seed for request in other}
    assert not groups.keys() & {request.group_id for request in task.requests(6, 4, 3)}
    with pytest.raises(ValueError, match="copies=0"):
        task.requests(0, 1, 0)


def test_questions_of_a_held_out_split_are_always_the_same(task, build):
    for split in ("eval", "validation"):
        few, more = task.eval_requests(split, 2), task.eval_requests(split, 4)
        assert more[:2] == few and len({json.dumps(request.artifact) for request in more}) == 4
        assert more == build(task.name, seed=9).eval_requests(split, 4), "whatever seed the task has"
        assert not any(request.is_trainable for request in more)
    with pytest.raises(ValueError, match="split='test'"):
        task.eval_requests("test", 2)


@pytest.mark.parametrize("name", [name for name, shipped in SHIPPED.items() if shipped.asked])
def test_training_never_meets_a_held_out_question(name, build):
    task, shipped = build(name), SHIPPED[name]
    trained = [shipped.asked(request.artifact) for step in range(20) for request in task.requests(step, 16, 1)]
    if shipped.shown:
        trained += [shipped.shown(messages) for _, messages, _ in task.demonstrations(400, 0)]
    assert {shipped.split(question) for question in trained} == {"train"}
    for split in ("eval", "validation"):
        held_out = [shipped.asked(request.artifact) for request in task.eval_requests(split, 14)]
        assert {shipped.split(question) for question in held_out} == {split}
        assert not any(question in trained for question in held_out)


# --- demonstrations and texts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_are_prompts_of_each_actor_and_replies_that_fit(name, build):
    task, shipped = build(name), SHIPPED[name]
    made = task.demonstrations(60, 0)
    assert len(made) == 60 and made == build(name).demonstrations(60, 0) != task.demonstrations(60, 1)
    prompts = {actor.id: actor.system_prompt for actor in task.actors}
    tools = {actor.id for actor in task.actors if actor.tools}
    tokenizer = build_tokenizer(task.texts())
    for actor, messages, reply in task.demonstrations(300, 0):
        assert messages[0] == {"role": "system", "content": prompts[actor]}
        assert messages[-1]["role"] == "user" or (messages[-1]["role"] == "tool" and actor in tools)
        assert 0 < len(tokenizer(reply)["input_ids"]) < task.options.max_tokens
    assert {actor for actor, *_ in made} == set(prompts)
    if shipped.alone:
        [actor] = shipped.alone["actors"]
        assert {who for who, *_ in build(name, **shipped.alone).demonstrations(20, 0)} == {actor}


@pytest.mark.parametrize("name", TASKS)
def test_texts_have_every_prompt_and_do_not_depend_on_who_plays(name, build):
    task = build(name)
    texts = task.texts()
    assert all(isinstance(text, str) and text for text in texts) and sum(map(len, texts)) < 70_000
    assert {actor.system_prompt for actor in task.actors} <= set(texts)
    if SHIPPED[name].alone:
        other = build(name, **SHIPPED[name].alone)
        assert other.texts() == texts and {actor.system_prompt for actor in other.actors} <= set(texts)


BOARD = parse_maze("A#G\n...\n..#")
BOXES = parse_level("#####\n#A..#\n#.BG#\n#...#\n#####")
PUZZLE, DRAFT = "1_3_3412_1434_21", "1432341221434321"
ASKED = "Write 3 numbers from 1 to 9: sum 9, different, largest 5."
PROGRAM = "def f(x):\n    return x"
FOUND = (Passage("Bo", "Bo is here."), Passage("b c", "It: 3."))
# For each task: how a prompt is written for an actor, how it is read, and what it may show.
PROMPTS: dict[str, tuple[Any, Any, Any, list[tuple[Any, ...]]]] = {
    "code_duel": (
        code_duel.code_duel_messages, code_duel.read_view, lambda view: view,
        [(code_duel.CodeDuelView("Say."),), (code_duel.CodeDuelView("Say.", PROGRAM),),
         (code_duel.CodeDuelView("Say.", PROGRAM, "f(1) == 1, not None"),)],
    ),
    "plan_path": (
        plan_path.plan_path_messages, plan_path.read_messages,
        lambda maze, cell=0, route=None: (maze._replace(start=cell), route), [(BOARD,), (BOARD, 4, "RU")],
    ),
    "refine_loop": (
        lambda actor, view: [{"content": refine_loop.SYSTEM_PROMPTS[actor]}, refine_loop.view_message(actor, view)],
        refine_loop.read_view, lambda view: view,
        [(refine_loop.RefineLoopView(ASKED, *rest),) for rest in ((), ((1, 2),), ((1, 2), "wrong: sum"))],
    ),
    "search_orchestra": (
        search.search_messages, search.read_view, lambda view: view,
        [(search.SearchView("Who?"),), (search.SearchView("Who?", FOUND),)],
    ),
    "sokoban": (
        sokoban.sokoban_messages, sokoban.read_messages,
        lambda level, state=BOXES.start, route=None: (level._replace(start=state), route),
        [(BOXES,), (BOXES, State(11, (12,)), "RU")],
    ),
    "sudoku": (
        sudoku.sudoku_messages, sudoku.read_messages, lambda puzzle, draft=None: (puzzle, draft),
        [(PUZZLE,), (PUZZLE, DRAFT), (PUZZLE, PUZZLE)],
    ),
}  # fmt: skip
MODULES = {"code_duel": code_duel, "plan_path": plan_path, "refine_loop": refine_loop, "search_orchestra": search,
           "sokoban": sokoban, "sudoku": sudoku}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_read_back(name):
    write, read, expected, views = PROMPTS[name]
    for actor, instruction in MODULES[name].SYSTEM_PROMPTS.items():
        for view in views:
            messages = write(actor, *view)
            assert read(messages) == expected(*view) and messages[0]["content"] == instruction


def test_an_example_reads_back():
    assert read_example([propose_message("3 + 4", Size())]) == "3 + 4"


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (plan_path.read_messages, "maze='hello'"),
        (sokoban.read_messages, "level='hello'"),
        (sudoku.read_messages, "sudoku prompt"),
    ],
)
def test_a_foreign_prompt_is_refused(read, named):
    with pytest.raises(ValueError, match=named):
        read([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "demonstrations", [demonstrate_code, demonstrate_routes, demonstrate_pushes, demonstrate_grids]
)
def test_demonstrations_need_actors_and_a_quality(demonstrations):
    with pytest.raises(ValueError, match=r"quality=1\.5"):
        demonstrations([], ("a",), 0, quality=1.5)
    with pytest.raises(ValueError, match="actors"):
        demonstrations([], (), 0)


# --- players ----------------------------------------------------------------------------------------------------------
def teams_of(name):
    shipped = SHIPPED[name]
    return [options for options in ({}, shipped.alone, shipped.harder) if options is not None]


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, options, id=f"{name}{options or ''}") for name in TASKS for options in teams_of(name)],
)
async def test_the_oracle_wins_and_the_random_player_loses(table, build, name, options):
    task, shipped, score = build(name, **options), SHIPPED[name], {}
    requests = task.eval_requests("eval", shipped.games)
    for who, player in (("oracle", task.oracle()), ("random", task.random_player(0))):
        results = await table(task, player).play(requests)
        metrics = [result.rollout.metrics for result in results]
        score[who] = sum(one[task.success_metric] for one in metrics) / len(metrics)
        for one in metrics if who == "oracle" or name in GAMES_FOR_TWO else ():
            least = {**shipped.oracle, "legal": 1.0, "readable": 1.0, "valid_format": 1.0}
            assert all(value >= least.get(key.partition("/")[0], -math.inf) for key, value in one.items()), one
    assert score["random"] < (score["oracle"] if name in GAMES_FOR_TWO else shipped.luck)
    assert score["oracle"] == 1.0 or name in GAMES_FOR_TWO


@pytest.mark.parametrize("strings", [200, pytest.param(STRINGS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TASKS)
async def test_no_text_crashes_an_episode(name, build, strings):
    """A slow test plays a thousand texts per task, or as many as ``TURNWISE_FUZZ=10000`` says."""
    task, rng = build(name, **({"hops": 1} if name == "search_orchestra" else {})), Random(0)
    valid, said = [reply for *_, reply in task.demonstrations(40, 0)], []

    def reply(request):
        said.append(any_text(rng, valid))
        return said[-1]

    tools = any(actor.tools for actor in task.actors)
    client, tokenizer = (Writer(reply), ByteTokenizer()) if tools else (Babbler(reply), Blind())
    arena = Arena(client, tokenizer, sampling=Sampling(max_tokens=4096), failure_threshold=1.0)
    for actor in task.actors:
        arena.add_actor(actor)
    for kind, episode in task.episodes().items():
        if name == "code_duel":
            episode.sandbox = NoSandbox(rng)
        arena.add_episode(kind, episode)
    low, high = SHIPPED[name].rewards
    step = 0
    while len(said) < strings:
        first = len(said)
        asked = task.requests(step, questions=50, copies=1) if step % 2 else task.eval_requests("validation", 5)
        for result in await arena.generate_rollouts(asked):
            assert result.rollout.error is None, f"{said[first:]!r:.2000}\n{result.rollout.error}"
            assert all(map(math.isfinite, result.rollout.rewards.values()))
            assert all(low <= step.reward <= high for step in result.rollout.steps if step.reward is not None)
            if name in GAMES_FOR_TWO:
                assert all(low <= reward <= high for reward in result.rollout.rewards.values())
        step += 1


@pytest.mark.parametrize(
    ("name", "actors", "metric"),
    [
        ("code_duel", ["coder"], "solved/coder"),
        ("math_orchestra", ["solver"], "correct/solver"),
        ("plan_path", ["planner"], "solved/planner"),
        ("refine_loop", ["generator"], "solved/generator"),
        ("search_orchestra", ["searcher", "answerer"], "correct/answerer"),
        ("sokoban", ["tool"], "solved/tool"),
        ("split_clues", ["writer"], "solved/writer"),
        ("sudoku", ["reviser"], "solved/reviser"),
    ],
)
async def test_some_actors_play_without_the_others(table, build, name, actors, metric):
    task = build(name, max_tokens=77)
    some = task.with_actors(actors)
    assert [actor.id for actor in some.actors] == actors != [actor.id for actor in task.actors], (
        "the task keeps its team"
    )
    assert some.success_metric == metric and some.options.max_tokens == 77
    [result] = await table(some, task.oracle()).play(some.requests(0, 1, 1))
    assert result.rollout.error is None and [step.actor_id for step in result.rollout.steps][-1] in actors


@pytest.mark.parametrize(
    ("name", "actors", "named"),
    [
        ("code_duel", ["tester"], "expected the coder first"),
        ("math_orchestra", ["verifier"], r"actors=\('verifier',\): expected 'solver' among them"),
        ("search_orchestra", ["verifier", "searcher"], "expected 'answerer' among them"),
    ],
)
def test_those_who_can_not_play_alone_are_named(build, name, actors, named):
    with pytest.raises(ValueError, match=named):
        build(name).with_actors(actors)


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NO_TREE)
def test_a_tree_is_refused_by_name(name, build):
    with pytest.raises(
        ValueError, match=f"task '{name}' (is played to its end: .*branches = 1|has one (call|turn) a qu)"
    ):
        build(name).episodes(TreeSampler(branches=4))


ONCE, GOALS = "each actor once", "the planner or the solver last"
OPTIONS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "code_duel": [
        ({"actors": ["tester", "coder"]}, "the coder first"), ({"actors": ["coder", "coder"]}, ONCE),
        ({"actors": []}, "actors"), ({"max_cases": 0}, "max_cases=0"), ({"cpu_seconds": 0}, "cpu_seconds=0"),
        ({"demonstrated": ["graphs"]}, "graphs.* unknown, expected some of lists, strings, sums"),
        ({"families": ["graphs"]}, "graphs.* unknown, expected some of lists, strings, sums"),
        ({"max_case": 3}, "unknown option 'max_case'; did you mean 'max_cases'"),
    ],
    "kuhn_poker": [
        ({"invalid_cost": 1.5}, "invalid_cost=1.5"), ({"alpha": 0.5}, "alpha=0.5"),
        ({"opponent": "me"}, "opponent='me'"), ({"oponent": "random"}, "did you mean 'opponent'"),
    ],
    "math_orchestra": [
        ({"max_loop": 3}, "unknown option 'max_loop'; did you mean 'max_loops'"), ({"max_loops": 0}, "max_loops=0"),
    ],
    "negotiation": [
        ({"payoff": "none"}, "payoff='none'"), ({"turns": 1}, "turns=1"), ({"invalid_cost": 0.1}, "invalid_cost=0.1"),
    ],
    "plan_path": [
        ({"size": 6}, "unknown option 'size'; did you mean 'side'"), ({"side": 2}, "side=2"),
        ({"walls": 0.9}, r"walls=0\.9"), ({"side": 4, "min_route": 16}, "min_route=16: expected 1 to 15"),
        ({"actors": []}, "actors"), ({"actors": ["planner", "tool"]}, GOALS), ({"actors": ["solver"] * 2}, ONCE),
        ({"actors": ["proposer", "planner"]}, "actors.0='proposer'"), ({"max_turns": 0}, "max_turns=0"),
        ({"quality": 1.5}, "quality=1.5"), ({"goal": "reached"}, "goal='reached'"),
        ({"step_cost": 0.01}, "unknown option 'step_cost'"),
    ],
    "proposer_solver": [
        ({"curve": "cubic"}, "curve='cubic'"), ({"numbers": 1}, "numbers=1"), ({"attempts": 0}, "attempts=0"),
        ({"attempt": 2}, "unknown option 'attempt'; did you mean 'attempts'"),
    ],
    "refine_loop": [
        ({"actors": ["critic", "generator"]}, "the generator first"), ({"actors": ["generator"] * 2}, ONCE),
        ({"rules": 8}, "rules=8"), ({"rules": 1}, "rules=1"),
        ({"rule": 2}, "unknown option 'rule'; did you mean 'rules'"),
    ],
    "search_orchestra": [
        ({"corpus": "docs"}, "expected 'corpus' and 'questions' together"), ({"hops": 4}, "hops=4"),
        ({"max_searches": 0}, "max_searches=0"), ({"hop": 1}, "unknown option 'hop'; did you mean 'hops'"),
        ({"quality": 2}, "quality=2"), ({"passages": 0}, "passages=0"),
    ],
    "sokoban": [
        ({"side": 4}, "side=4"), ({"side": 10, "boxes": 3}, "boxes=3"), ({"actors": ["planner", "tool"]}, GOALS),
        ({"shaping": -1}, "shaping=-1"), ({"step_cost": 0.01}, "unknown option 'step_cost'"),
        ({"box": 2}, "unknown option 'box'; did you mean 'boxes'"),
    ],
    "split_clues": [
        ({"actors": ["reader"]}, "the writer or the solver last"), ({"digits": 1}, "digits=1"),
        ({"max_turns": 2}, "max_turns=2"),
    ],
    "sudoku": [
        ({"blank": [4, 6]}, "unknown option 'blank'; did you mean 'blanks'"),
        ({"blanks": [8, 6]}, r"blanks=\[8, 6\].*low <= high"), ({"blanks": [8, 13]}, "blanks"),
        ({"actors": []}, "actors"),
        ({"actors": ["proposer", "critic"]}, "actors.1='critic'"), ({"actors": ["solver", "solver"]}, ONCE),
        ({"max_turns": 0}, "max_turns=0"), ({"quality": 1.5}, "quality=1.5"),
    ],
    "tic_tac_toe": [({"invalid_cost": 0.5}, "invalid_cost=0.5")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "named"), [(name, *row) for name, rows in OPTIONS.items() for row in rows])
def test_bad_options_are_named(name, options, named, build):
    with pytest.raises(ValueError, match=named):
        build(name, **options).episodes()


@pytest.mark.parametrize(
    ("episode", "options", "named"),
    [
        (MathOrchestraEpisode, {"max_loops": 0}, "max_loops=0"),
        (PlanPathEpisode, {"max_turns": 0}, "max_turns=0"),
        (ProposeEpisode, {"attempts": 0}, "attempts=0"),
        (ProposeEpisode, {"curve": "cubic"}, "curve='cubic'"),
        (SearchOrchestraEpisode, {"index": None, "passages": 0}, "passages=0"),
    ],
)
def test_an_episode_by_itself_refuses_them_too(episode, options, named):
    with pytest.raises(ValueError, match=named):
        episode(**options)


# --- training ---------------------------------------------------------------------------------------------------------
TREES = {"code_duel": 2, "sokoban": 2, "refine_loop": 2}
SMALL = {
    "steps": 2,
    "threads": 1,
    "health": {"start_questions": 0},  # these models know nothing yet
    "warm_start": {"steps": 20, "batch_size": 8},
    "update": {"lr": 1e-3},
    "eval": {"num_prompts": 3},
    "log": {},
}


@pytest.mark.usefixtures("narrow_model")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "refine_loop" else pytest.mark.slow)
        for name, shipped in SHIPPED.items()
        if shipped.trains
    ],
)
def test_it_trains(name, tmp_path):
    """Two steps of the tiny model, in a tree where the task branches: every step samples, and loses nothing."""
    branches = TREES.get(name, 1)
    settings = {
        "task": name,
        "task_options": SHIPPED[name].trains,
        "credit": {"rule": "hierarchy" if name == "proposer_solver" else "at_grpo"},
        "rollout": {"prompts_per_step": 2, "group_size": 1 if name == "code_duel" else 2, "branches": branches},
        "run_dir": str(tmp_path),
    }
    run = train_from_config(config_from_dict({**SMALL, **settings}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["sampled_tokens"] > 0 and line["episodes/failed"] == 0 for line in lines)
    last = "proposer" if name == "proposer_solver" else run.task.actors[-1].id
    assert all(f"reward/{last}" in line for line in lines)
    assert run.evaluate().failed == 0
