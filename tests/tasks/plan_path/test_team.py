from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks import build_task
from turnwise.tasks.plan_path import PlanPathEpisode, PlanPathOptions, PlanPathTask, parse_maze, plan_path_messages
from turnwise.tasks.plan_path.maze import draw_mazes, format_maze, split_of_maze
from turnwise.tasks.plan_path.prompts import read_messages

MAZE = parse_maze("A#G\n...\n..#")  # 4 moves: D R R U
ARTIFACT = {"maze": format_maze(MAZE)}


def team(**options):
    return PlanPathTask(PlanPathOptions(**options))


def solo(**options):
    return team(actors=("solver",), max_turns=1, **options)


def rewards(result):
    assert result.rollout.error is None
    return [(step.actor_id, step.turn, pytest.approx(step.reward)) for step in result.rollout.steps]


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_the_planner_walks_and_the_goal_ends_the_episode(table):
    seat = table(team(), ["D R R U", "D R R U"])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [("tool", 0, 2.0), ("planner", 0, 2.0)]  # alpha * 4/4 + closeness 1
    assert result.rollout.rewards == {"tool": 2.0, "planner": 2.0}
    assert result.rollout.metrics["solved/tool"] == result.rollout.metrics["solved/planner"] == 1.0
    assert result.rollout.extras["path"] == [0, 3, 4, 5, 2] and result.rollout.extras["rounds"] == 1
    assert type(result.rollout.extras["path"]) is list
    assert seat.seen == [
        ("tool", plan_path_messages("tool", MAZE)),
        ("planner", plan_path_messages("planner", MAZE, 0, "DRRU", check="it works")),
    ]


async def test_two_rounds_by_hand(table):
    seat = table(team(), ["R", "D R", "So:\nR U", "D U R U U"])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [
        ("tool", 0, 0.0),  # into the wall at once: no closer
        ("planner", 0, 0.5),  # half-way
        ("tool", 1, 1 + 0.5),  # its route would arrive after 2 + 2 moves
        ("planner", 1, 4 / 6 + 0.5),  # after 2 + 4; the goal ended it before the last move that it names
    ]
    assert result.rollout.rewards == {"tool": pytest.approx(4 / 6 + 1), "planner": pytest.approx(4 / 6 + 1)}
    assert result.rollout.extras["path"] == [0, 3, 4, 7, 4, 5, 2] and result.rollout.extras["rounds"] == 2
    assert result.rollout.metrics["legal_moves/tool"] == 0.5
    assert result.rollout.metrics["legal_moves/planner"] == pytest.approx(0.9)
    assert result.rollout.metrics["moves/planner"] == 6
    # Each prompt is the actor's instruction, how the round before failed, this round's suggestion, and the board.
    note = "Round 2. Walked: 2 moves."
    assert seat.seen == [
        ("tool", plan_path_messages("tool", MAZE)),
        ("planner", plan_path_messages("planner", MAZE, 0, "R", check="0 moves, then R is blocked")),
        ("tool", plan_path_messages("tool", MAZE, 4, note=f"{note} Suggested: 0 moves, then R is blocked.")),
        ("planner", plan_path_messages("planner", MAZE, 4, "RU", note, "it works")),
    ]


async def test_a_suggestion_that_arrives_is_no_arrival(table):
    result = await table(team(max_turns=1), ["D R R U", "U"]).one(ARTIFACT)
    assert rewards(result) == [("tool", 0, 2.0), ("planner", 0, 0.0)]
    assert result.rollout.rewards == {"tool": pytest.approx(1.0), "planner": pytest.approx(0.0)}
    assert result.rollout.metrics[team().success_metric] == 0.0
    assert result.rollout.extras["path"] == [0]


async def test_unreadable_replies_move_nobody_and_pay(table):
    seat = table(team(max_turns=2), ["Hm.", "I do not know.", "D R", ""])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [("tool", 0, -1), ("planner", 0, -1), ("tool", 1, 0.5), ("planner", 1, -1)]
    # Played to the end, an actor pays for the share of its replies that could not be read.
    assert result.rollout.rewards == {"tool": 0.5 - 0.5, "planner": -1.0}
    note = "Round 2. Walked: no moves read."
    assert [messages for _, messages in seat.seen][1:] == [
        plan_path_messages("planner", MAZE),
        plan_path_messages("tool", MAZE, note=f"{note} Suggested: no moves read."),
        plan_path_messages("planner", MAZE, 0, "DR", note, "2 moves"),
    ]
    assert result.rollout.metrics["valid_format/tool"] == 0.5
    assert result.rollout.metrics["valid_format/planner"] == 0.0


@pytest.mark.parametrize(
    ("reward", "first", "last"),
    [
        ({"alpha": 3.0}, 0.5, 4.0),
        ({"alpha": 0.25, "mode": "convex"}, 0.75 * 0.5, 1.0),
        ({"alpha": 0.0}, 0.5, 1.0),
    ],
)
async def test_mixes(table, reward, first, last):
    result = await table(team(), ["D R", "D R R U"], reward=reward).one(ARTIFACT)
    assert rewards(result) == [("tool", 0, first), ("planner", 0, last)]
    # The rubric mixes alike: the outcome for both, and how close each one's last route led.
    assert result.rollout.rewards == {"tool": pytest.approx(reward["alpha"] + first), "planner": pytest.approx(last)}


async def test_the_cost_of_what_cant_be_read_is_a_key(table):
    result = await table(team(max_turns=1), ["?", "U"], reward={"invalid_cost": 0.5}).one(ARTIFACT)
    assert rewards(result) == [("tool", 0, -0.5), ("planner", 0, 0.0)]
    assert result.rollout.rewards == {"tool": -0.5, "planner": 0.0}


async def test_the_goal_alone_may_earn(table):
    task, lines = team(goal="solved", shaping=0.0), ["D R R U", "D U D R", "R", "R U"]
    result = await table(task, lines, reward={"alpha": 2.0}).one(ARTIFACT)
    assert rewards(result) == [("tool", 0, 2.0), ("planner", 0, 0.0), ("tool", 1, 0.0), ("planner", 1, 2.0)]
    assert result.rollout.rewards == {"tool": 2.0, "planner": 2.0}


async def test_the_solver_plays_alone_and_once(table):
    result = await table(solo(), ["D R R"]).one(ARTIFACT)
    assert rewards(result) == [("solver", 0, 0.75)]
    assert result.rollout.rewards == {"solver": pytest.approx(0.75)}
    assert solo().success_metric == "solved/solver" and team().success_metric == "solved/tool"


async def test_three_hand_a_suggestion_on(table):
    task = team(actors=("tool", "planner", "solver"), max_turns=1)
    seat = table(task, ["D R R U", "no idea", "D"])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [("tool", 0, 2.0), ("planner", 0, -1.0), ("solver", 0, 0.25)]
    assert [read_messages(messages)[1] for _, messages in seat.seen] == [None, "DRRU", "DRRU"]


# --- a tree, worked by hand ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("branches", [3, 4])
async def test_each_walks_its_own_branch_and_the_best_goes_on(table, branches):
    suggested = ["R", "D R", "?", "U"][:branches]
    walked = ["D", "D R R", "D R", "R"][:branches]
    ends = ["L L", "U", "R", "D"][:branches]
    seat = table(
        team(), [*suggested, *walked, *(["U"] * branches), *ends], tree=TreeSampler(branches=branches, select="best")
    )
    result = await seat.one(ARTIFACT)
    steps = defaultdict(list)
    for step in result.rollout.steps:
        steps[step.actor_id, step.turn].append((pytest.approx(step.reward), step.selected))
    assert steps["tool", 0][:3] == [(0.0, False), (0.5, True), (-1.0, False)]
    assert steps["planner", 0][:3] == [(0.25, False), (0.75, True), (0.5, False)]
    # From cell 5 now: "L L" goes back two moves, "U" arrives.
    assert steps["planner", 1][:2] == [(-0.5, False), (1.25, True)]
    assert {str(m) for who, m in seat.seen[branches : 2 * branches]} == {
        str(plan_path_messages("planner", MAZE, 0, "DR", check="2 moves"))
    }
    note = "Round 2. Walked: 3 moves. Suggested: 2 moves."
    assert {str(m) for who, m in seat.seen[2 * branches : 3 * branches]} == {
        str(plan_path_messages("tool", MAZE, 5, note=note))
    }
    assert result.rollout.extras["path"] == [0, 3, 4, 5, 2]
    assert result.rollout.metrics["goal/tool"] == 1.0


# --- the task --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", [team(), solo()], ids=["team", "solo"])
async def test_oracle_and_random_players(table, task):
    requests = task.eval_requests("eval", 60)
    score = {}
    for name, player in (("oracle", task.oracle()), ("random", task.random_player(0))):
        results = await table(task, player).play(requests)
        score[name] = sum(result.rollout.metrics[task.success_metric] for result in results) / len(results)
        if name == "oracle":
            assert all(result.rollout.metrics[f"goal/{task.actors[0].id}"] == 1.0 for result in results)
    assert score["oracle"] == 1.0
    assert score["random"] < 0.1


def test_requests_depend_on_seed_and_step_alone():
    task = team(seed=3)
    first = task.requests(5, questions=4, copies=3)
    assert first == team(seed=3).requests(5, questions=4, copies=3)
    assert len(first) == 12
    groups = defaultdict(list)
    for request in first:
        groups[request.group_id].append(request)
    assert len(groups) == 4
    for copies in groups.values():
        assert len({request.seed for request in copies}) == 3
        assert len({request.artifact["maze"] for request in copies}) == 1
    assert not {r.group_id for r in first} & {r.group_id for r in task.requests(6, 4, 3)}
    assert {r.artifact["maze"] for r in first} != {r.artifact["maze"] for r in team(seed=4).requests(5, 4, 3)}


def test_training_never_meets_a_held_out_maze():
    task = team(side=5, walls=0.2, min_route=2)
    mazes = [parse_maze(r.artifact["maze"]) for step in range(20) for r in task.requests(step, 32, 1)]
    mazes += [read_messages(messages)[0] for _, messages, _ in task.demonstrations(300, 0)]
    trained = {(maze.cells, maze.goal) for maze in mazes}
    for split in ("eval", "validation"):
        held_out = [parse_maze(request.artifact["maze"]) for request in task.eval_requests(split, 200)]
        assert len(set(held_out)) == 200
        assert {split_of_maze(maze) for maze in held_out} == {split}
        assert not trained & {(maze.cells, maze.goal) for maze in held_out}
    assert not any(request.is_trainable for request in task.eval_requests("eval", 3))
    assert team(seed=9).eval_requests("eval", 5) == team().eval_requests("eval", 5)


def test_options_make_mazes_harder():
    for side, walls, min_route in ((6, 0.0, 3), (8, 0.35, 9)):
        task = team(side=side, walls=walls, min_route=min_route)
        boards = [request.artifact["maze"] for request in task.requests(0, 10, 1)]
        assert {board.count("\n") + 1 for board in boards} == {side}
        assert {board.count("#") for board in boards} == {round(walls * side * side)}
        assert all(len(task.oracle()("solver", [{"role": "user", "content": b}]).split()) >= min_route for b in boards)


def test_the_tokenizer_texts_do_not_depend_on_who_plays():
    assert team().texts() == solo().texts()
    for actor in (*team().actors, *solo().actors):
        assert actor.system_prompt in team().texts()
    assert sum(len(text) for text in team().texts()) < 40_000


def test_a_move_is_a_token():
    from turnwise.tasks.tiny import build_tokenizer

    tokenizer = build_tokenizer(team().texts())
    assert len(tokenizer("D R R U L D")["input_ids"]) == 6
    longest = max(len(tokenizer(reply)["input_ids"]) for *_, reply in team().demonstrations(200, 0))
    assert longest < team().options.max_tokens


def test_demonstrations_cover_the_actors():
    assert {actor for actor, *_ in team().demonstrations(10, 0)} == {"tool", "planner"}
    assert {actor for actor, *_ in solo().demonstrations(10, 0)} == {"solver"}
    assert team().demonstrations(10, 0) != team().demonstrations(10, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 6}, "unknown option 'size'; did you mean 'side'"),
        ({"side": 2}, "side=2"),
        ({"walls": 0.9}, r"walls=0\.9"),
        ({"side": 4, "min_route": 16}, "min_route=16: expected 1 to 15"),
        ({"actors": []}, "actors"),
        ({"actors": ["planner", "tool"]}, "the planner or the solver last"),
        ({"actors": ["solver", "solver"]}, "each actor once"),
        ({"actors": ["proposer", "planner"]}, "actors.0='proposer'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"quality": 1.5}, "quality=1.5"),
        ({"alpha": 2.0}, "unknown option 'alpha': it is a key of every task, expected reward.alpha"),
        ({"invalid_cost": 1}, "unknown option 'invalid_cost': .* expected reward.invalid_cost"),
        ({"step_cost": 0.01}, "unknown option 'step_cost'"),
        ({"goal": "reached"}, "goal='reached'"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        build_task("plan_path", options).episodes()


def test_bad_counts_are_named():
    with pytest.raises(ValueError, match="copies=0"):
        team().requests(0, 1, 0)
    with pytest.raises(ValueError, match="max_turns=0"):
        PlanPathEpisode(max_turns=0)


async def test_random_replies_never_break_the_scoring(table):
    rng = Random(0)
    noise = ["".join(rng.choice("UDLR \nx,") for _ in range(rng.randint(0, 12))) for _ in range(200)]
    for maze in draw_mazes("train", 20, 1):
        result = await table(team(), [rng.choice(noise) for _ in range(6)]).one({"maze": format_maze(maze)})
        assert result.rollout.error is None
        assert all(-1.0 <= step.reward <= 2.0 for step in result.rollout.steps)


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_the_planner_is_judged_by_where_its_walk_ends(table):
    """It breaks a right suggestion, repeats a wrong one, and mends a wrong one. The tool is handed nothing."""
    lines = ["D R R U", "D R", "U", "U", "no moves", "R U"]
    assert await table(team(), lines).contributions(ARTIFACT) == [
        ("planner", 0, Contribution(handed=1, changed=1, right=1, broke=1)),
        ("planner", 1, Contribution(handed=1, changed=0, wrong=1, mended=0)),
    ], "in the last round there was no suggestion"
    mending = await table(team(), ["U", "D R R U"]).contributions(ARTIFACT)
    assert mending == [("planner", 0, Contribution(handed=1, changed=1, wrong=1, mended=1))]
    babbling = await table(team(max_turns=1), ["D R R U", "Hm."]).contributions(ARTIFACT)
    assert babbling == [("planner", 0, Contribution(handed=1, changed=1, right=1, broke=1))]


async def test_without_the_planner_the_tool_s_route_is_walked(table):
    task = team().with_actors(["tool"])
    seat = table(task, ["D R", "R U"])
    result = await seat.one(ARTIFACT)
    assert result.rollout.extras["path"] == [0, 3, 4, 5, 2] and result.rollout.metrics["solved/tool"] == 1.0
    note = "Round 2. Walked: 2 moves. Suggested: 2 moves."  # as the tool reads it in the team
    assert seat.seen[1] == ("tool", plan_path_messages("tool", MAZE, 4, note=note))
    assert task.success_metric == "solved/tool"
