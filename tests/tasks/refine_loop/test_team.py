from __future__ import annotations

import pytest

from turnwise.tasks.refine_loop import (
    RefineLoopOptions,
    RefineLoopTask,
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
