from __future__ import annotations

import pytest

from turnwise.tasks.refine_loop import (
    RefineLoopOptions,
    RefineLoopTask,
    View,
    broken_rules,
    parse_draft,
    parse_question,
)
from turnwise.tasks.refine_loop.rules import parse_review
from turnwise.tasks.refine_loop.team import CRITIC, GENERATOR, read_view

TEXT = "Write 3 numbers from 1 to 9: sum 9, different, largest 5."  # four rules, the count among them
ARTIFACT = {"question": TEXT}


def team(**options):
    return RefineLoopTask(RefineLoopOptions(**options))


# --- one episode, worked by hand -------------------------------------------------------------------------------------


async def test_two_rounds_by_hand(table):
    seat = table(team(), ["2 2 6", "wrong: sum, largest", "1 3 5", "wrong: count"])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        (GENERATOR, 0, 1 / 4),  # the count alone is right
        (CRITIC, 0, 3 / 4),  # of what it says all is so; that two are equal it does not see
        (GENERATOR, 1, 2.0),
        (CRITIC, 1, 1 + 3 / 4),
    ]
    assert result.rollout.rewards == {GENERATOR: 2.0, CRITIC: pytest.approx(1.75)}
    assert [read_view(messages) for _, messages in seat.seen] == [
        View(TEXT),
        View(TEXT, (2, 2, 6)),
        View(TEXT, (2, 2, 6), "wrong: largest, sum"),
        View(TEXT, (1, 3, 5)),
    ]
    assert result.rollout.extras["broken"] == [] and result.rollout.metrics["found_faults/critic"] == 0.0


async def test_what_can_not_be_read_changes_nothing_and_pays(table):
    seat = table(team(), ["Hm.", "Well.", "1 3 5", "?"])
    result = await seat.one(ARTIFACT)
    assert table.rewards(result) == [
        (GENERATOR, 0, -0.25),
        (CRITIC, 0, -0.25),
        (GENERATOR, 1, 2.0),
        (CRITIC, 1, 1 - 0.25),
    ]
    assert "Draft: none" in seat.seen[1][1][-1]["content"] and "Draft" not in seat.seen[0][1][-1]["content"]
    assert result.rollout.metrics["valid_format/generator"] == 0.5


# --- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_demonstrations_are_well_formed_and_quality_is_the_share_that_is_right(quality):
    made = team(quality=quality).demonstrations(800, 1)
    right = {GENERATOR: [], CRITIC: []}
    drafted = 0
    for actor, messages, reply in made:
        view = read_view(messages)
        question = parse_question(view.question)
        if actor == GENERATOR:
            right[actor].append(not broken_rules(question, parse_draft(reply)))
            drafted += view.draft is not None
            assert view.review is None or parse_review(view.review) == broken_rules(question, view.draft) != set()
        else:
            right[actor].append(parse_review(reply) == broken_rules(question, view.draft))
    assert {len(share) for share in right.values()} == {400} and 140 < drafted < 260
    assert sum(right[GENERATOR]) / 400 == pytest.approx(quality, abs=0.07)
    assert sum(right[CRITIC]) / 400 == pytest.approx(quality + (1 - quality) / 16, abs=0.07)
    assert team().demonstrations(20, 1) == team().demonstrations(20, 1) != team().demonstrations(20, 2)
