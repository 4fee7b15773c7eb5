from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from turnwise.arena import TreeSampler
from turnwise.arena.answers import Contribution
from turnwise.tasks import build_task
from turnwise.tasks.sudoku import SudokuEpisode, SudokuOptions, SudokuTask, sudoku_messages
from turnwise.tasks.sudoku.grid import format_grid, split_of, sudoku_puzzles

PUZZLE = "1_3_3412_1434_21"
SOLVED, EIGHT, NINE = "1234341221434321", "1432341221434321", "1134341221434321"  # 12, 8 and 9 of 12 units
ARTIFACT = {"puzzle": PUZZLE}


def team(**options):
    return SudokuTask(SudokuOptions(**options))


def solo(**options):
    return team(actors=("solver",), max_turns=1, **options)


def rewards(result):
    assert result.rollout.error is None
    return [(step.actor_id, step.turn, pytest.approx(step.reward)) for step in result.rollout.steps]


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_a_solved_first_draft_ends_the_episode(table):
    result = await table(team(), [format_grid(SOLVED)]).one(ARTIFACT)
    assert rewards(result) == [("proposer", 0, 2.0)]  # alpha * 1 + 12/12
    assert result.rollout.rewards == {"proposer": 2.0, "reviser": 1.0}
    assert result.rollout.metrics["solved/proposer"] == result.rollout.metrics["solved/reviser"] == 1.0
    assert result.rollout.extras["rounds"] == 1


async def test_reviser_is_scored_for_the_grid_that_it_leaves(table):
    seat = table(team(), [format_grid(EIGHT), format_grid(NINE), format_grid(EIGHT), format_grid(SOLVED)])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [
        ("proposer", 0, 8 / 12),
        ("reviser", 0, 9 / 12),
        ("proposer", 1, 8 / 12),
        ("reviser", 1, 1 + 12 / 12),
    ]
    assert result.rollout.rewards == {"proposer": pytest.approx(1 + 8 / 12), "reviser": pytest.approx(2.0)}
    assert result.rollout.extras["rounds"] == 2
    # Each prompt is the actor's instruction, the puzzle, the standing draft and the round: nothing else piles up.
    assert seat.seen == [
        ("proposer", sudoku_messages("proposer", PUZZLE)),
        ("reviser", sudoku_messages("reviser", PUZZLE, EIGHT)),
        ("proposer", sudoku_messages("proposer", PUZZLE, NINE, 1)),
        ("reviser", sudoku_messages("reviser", PUZZLE, EIGHT, 1)),
    ]


async def test_after_the_last_round_an_unsolved_grid_earns_its_share_only(table):
    result = await table(team(max_turns=1), [format_grid(EIGHT), format_grid(NINE)]).one(ARTIFACT)
    assert rewards(result) == [("proposer", 0, 8 / 12), ("reviser", 0, 9 / 12)]
    assert result.rollout.metrics["solved/proposer"] == 0.0
    assert result.rollout.rewards == {"proposer": pytest.approx(8 / 12), "reviser": pytest.approx(9 / 12)}


async def test_an_unreadable_reply_leaves_the_draft_and_pays(table):
    seat = table(team(), ["I do not know.", format_grid(EIGHT), "1234", format_grid(SOLVED)])
    result = await seat.one(ARTIFACT)
    assert rewards(result) == [
        ("proposer", 0, 3 / 12 - 0.25),  # the puzzle itself has 3 whole units
        ("reviser", 0, 8 / 12),
        ("proposer", 1, 8 / 12 - 0.25),
        ("reviser", 1, 2.0),
    ]
    assert [messages for _, messages in seat.seen][1:] == [
        sudoku_messages("reviser", PUZZLE, PUZZLE),
        sudoku_messages("proposer", PUZZLE, EIGHT, 1, unread=True),
        sudoku_messages("reviser", PUZZLE, EIGHT, 1),
    ]
    assert result.rollout.metrics["valid_format/proposer"] == 0.0
    assert result.rollout.metrics["valid_format/reviser"] == 1.0


@pytest.mark.parametrize(
    ("reward", "first", "last"),
    [
        ({"alpha": 3.0}, 8 / 12, 4.0),
        ({"alpha": 0.25, "mode": "convex"}, 0.75 * 8 / 12, 1.0),
        ({"alpha": 0.0}, 8 / 12, 1.0),
    ],
)
async def test_mixes(table, reward, first, last):
    result = await table(team(), [format_grid(EIGHT), format_grid(SOLVED)], reward=reward).one(ARTIFACT)
    assert rewards(result) == [("proposer", 0, first), ("reviser", 0, last)]
    # The rubric mixes alike: the outcome for both, and the share that each one's last action left.
    share = {"proposer": first, "reviser": last - reward["alpha"]}
    assert result.rollout.rewards == {who: pytest.approx(reward["alpha"] + own) for who, own in share.items()}


async def test_the_solver_plays_alone_and_once(table):
    result = await table(solo(), [format_grid(NINE)]).one(ARTIFACT)
    assert rewards(result) == [("solver", 0, 9 / 12)]
    assert result.rollout.rewards == {"solver": pytest.approx(9 / 12)}
    assert solo().success_metric == "solved/solver" and team().success_metric == "solved/proposer"


async def test_a_changed_given_is_not_a_solution(table):
    result = await table(solo(), [format_grid("2143432112343412")]).one(ARTIFACT)
    assert result.rollout.metrics["solved/solver"] == 0.0


# --- a tree, worked by hand ------------------------------------------------------------------------------------------
async def test_the_reviser_repairs_the_best_of_the_drafts(table):
    lines = [format_grid(grid) for grid in (EIGHT, NINE, PUZZLE.replace("_", "1"), EIGHT, SOLVED, NINE)]
    seat = table(team(), lines, tree=TreeSampler(branches=3, select="best"))
    result = await seat.one(ARTIFACT)
    steps = defaultdict(list)
    for step in result.rollout.steps:
        steps[step.actor_id].append((step.branch, pytest.approx(step.reward), step.selected))
    # 1131 / 3412 / 1143 / 4121: rows 0, 2, 3, columns 0, 1, 3 and boxes 0, 1, 2 fail; row 1, column 2 and box 3 hold.
    assert steps["proposer"] == [(0, 8 / 12, False), (1, 9 / 12, True), (2, 3 / 12, False)]
    assert steps["reviser"] == [(0, 8 / 12, False), (1, 2.0, True), (2, 9 / 12, False)]
    assert {str(m) for actor, m in seat.seen if actor == "reviser"} == {str(sudoku_messages("reviser", PUZZLE, NINE))}
    assert result.rollout.metrics["solved/proposer"] == 1.0


# --- the task --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", [team(), solo()], ids=["team", "solo"])
async def test_oracle_and_random_players(table, task):
    requests = task.eval_requests("eval", 60)
    score = {}
    for name, player in (("oracle", task.oracle()), ("random", task.random_player(0))):
        results = await table(task, player).play(requests)
        score[name] = sum(result.rollout.metrics[task.success_metric] for result in results) / len(results)
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
        assert len({request.artifact["puzzle"] for request in copies}) == 1
    assert not {r.group_id for r in first} & {r.group_id for r in task.requests(6, 4, 3)}
    assert {r.artifact["puzzle"] for r in first} != {r.artifact["puzzle"] for r in team(seed=4).requests(5, 4, 3)}


def test_training_never_meets_a_held_out_puzzle():
    task = team(blanks=(4, 5))
    trained = {r.artifact["puzzle"] for step in range(40) for r in task.requests(step, 32, 1)}
    trained |= {messages[1]["content"].partition("\nDraft")[0] for _, messages, _ in task.demonstrations(300, 0)}
    for split in ("eval", "validation"):
        held_out = [request.artifact["puzzle"] for request in task.eval_requests(split, 200)]
        assert len(set(held_out)) == 200
        assert {split_of(puzzle) for puzzle in held_out} == {split}
        assert not trained & set(held_out) and not trained & {format_grid(puzzle) for puzzle in held_out}
    assert not any(request.is_trainable for request in task.eval_requests("eval", 3))
    assert team(seed=9, blanks=(4, 5)).eval_requests("eval", 5) == task.eval_requests("eval", 5)


def test_the_tokenizer_texts_do_not_depend_on_who_plays():
    assert team().texts() == solo().texts()
    words = " ".join(team().texts())
    for actor in (*team().actors, *solo().actors):
        assert actor.system_prompt in words
    assert sum(len(text) for text in team().texts()) < 20_000


def test_demonstrations_cover_the_actors():
    assert {actor for actor, *_ in team().demonstrations(10, 0)} == {"proposer", "reviser"}
    assert {actor for actor, *_ in solo().demonstrations(10, 0)} == {"solver"}
    assert team().demonstrations(10, 0) != team().demonstrations(10, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"blank": [4, 6]}, "unknown option 'blank'; did you mean 'blanks'"),
        ({"blanks": [8, 6]}, r"blanks=\[8, 6\].*low <= high"),
        ({"blanks": [8, 13]}, "blanks"),
        ({"actors": []}, "actors"),
        ({"actors": ["proposer", "critic"]}, "actors.1='critic'"),
        ({"actors": ["solver", "solver"]}, "each actor once"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"quality": 1.5}, "quality=1.5"),
        ({"alpha": 2.0}, "unknown option 'alpha': it is a key of every task, expected reward.alpha"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        build_task("sudoku", options).episodes()


def test_bad_counts_are_named():
    with pytest.raises(ValueError, match="copies=0"):
        team().requests(0, 1, 0)
    with pytest.raises(ValueError, match="max_turns=0"):
        SudokuEpisode(max_turns=0)


async def test_random_grids_never_break_the_scoring(table):
    rng = Random(0)
    puzzles = sudoku_puzzles("train", 20, 1)
    noise = ["".join(rng.choice("1234_\n x") for _ in range(20)) for _ in range(200)]
    for puzzle in puzzles:
        result = await table(team(), [rng.choice(noise) for _ in range(4)]).one({"puzzle": puzzle.givens})
        assert result.rollout.error is None
        assert all(-0.25 <= step.reward <= 2.0 for step in result.rollout.steps)


# --- what each actor adds --------------------------------------------------------------------------------------------
async def test_units_of_the_draft_are_mended_and_broken(table):
    """EIGHT lacks columns 2 and 4 and boxes 1 and 2; NINE lacks row 1, column 2 and box 1."""
    seat = table(team(), [format_grid(EIGHT), format_grid(NINE), "1234", format_grid(SOLVED)])
    assert await seat.contributions(ARTIFACT) == [
        ("reviser", 0, Contribution(handed=1, changed=1, wrong=4, mended=2, right=8, broke=1)),
        ("proposer", 1, Contribution(handed=1, changed=0, wrong=3, mended=0, right=9, broke=0)),  # unreadable
        ("reviser", 1, Contribution(handed=1, changed=1, wrong=3, mended=3, right=9, broke=0)),
    ]


async def test_one_actor_plays_the_teams_rounds_with_its_own_prompt(table):
    task = team(blanks=(4, 6), quality=0.5).with_actors(("reviser",))
    assert (task.success_metric, task.options.blanks, task.options.quality) == ("solved/reviser", (4, 6), 0.5)
    seat = table(task, [format_grid(EIGHT), format_grid(SOLVED)])
    result = await seat.one(ARTIFACT)
    assert result.rollout.metrics["solved/reviser"] == 1.0
    assert seat.seen == [
        ("reviser", sudoku_messages("reviser", PUZZLE)),
        ("reviser", sudoku_messages("reviser", PUZZLE, EIGHT, 1)),
    ]
