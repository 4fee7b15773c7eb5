from __future__ import annotations

from collections import Counter

import pytest

from turnwise.arena import TreeSampler
from turnwise.credit import VineCredit
from turnwise.samples.collect import collect_samples
from turnwise.tasks import build_task
from turnwise.tasks.split_clues import (
    RowPair,
    format_question,
    maximum,
    parse_question,
    read_messages,
    right_share,
    split_clues_messages,
)

ROWS = parse_question("195/278")
ARTIFACT = {"rows": "195/278"}


def team(**options):
    return build_task("split_clues", options)


async def test_no_one_sees_a_row_that_is_not_theirs(table):
    seat = table(team(), ["000", "278"])
    await seat.one(ARTIFACT)
    assert "278" not in str(seat.seen[0]) and "195" not in str(seat.seen[1])
    alone = table(team(actors=("writer",)), ["278"])
    await alone.one(ARTIFACT)
    assert "195" not in str(alone.seen) and alone.seen == [("writer", split_clues_messages("writer", ROWS))]
    whole = table(team(actors=("solver",)), ["298"])
    assert (await whole.one(ARTIFACT)).rollout.metrics["solved/solver"] == 1.0
    assert whole.seen[0][1][-1]["content"] == "195\n278"


async def test_in_a_tree_playouts_tell_what_a_message_is_worth(table):
    # Two messages, each with one playout; then two answers to the first message.
    sampler = TreeSampler(branches=2, select="first", playouts=1, score_by="value")

    def play(actor, messages):
        above, own = read_messages(messages)
        if actor == "reader":
            return next(messages_sent)
        return "298" if above == "195" else own

    messages_sent = iter(["195", "000"])
    result = await table(team(), play, tree=sampler).one(ARTIFACT)
    samples = collect_samples([result])
    advantages = VineCredit(team=True).compute_columns(samples)
    good, bad = (advantage for sample, advantage in zip(samples, advantages, strict=True) if sample.actor == "reader")
    assert good == pytest.approx((2 - 2 / 3) / 2) == -bad


def test_demonstrations_know_the_format_and_half_of_the_answer():
    made = team(actors=("reader", "writer", "solver")).demonstrations(900, 0)
    assert Counter(actor for actor, *_ in made) == {"reader": 300, "writer": 300, "solver": 300}
    sent = [text for actor, _, text in made if actor == "reader"]
    kept = [said == digit for actor, messages, text in made if actor == "reader"
            for said, digit in zip(text, read_messages(messages)[1], strict=True)]  # fmt: skip
    assert all(len(text) == 3 and text.isdigit() for text in sent)
    assert sum(kept) / len(kept) == pytest.approx(0.45 + 0.55 * 0.1, abs=0.05)  # a digit may be 0 itself
    unread = [messages for actor, messages, _ in made if actor == "writer" and read_messages(messages)[0] is None]
    assert 0.05 < len(unread) / 300 < 0.3
    assert team().demonstrations(30, 1) == team().demonstrations(30, 1) != team().demonstrations(30, 2)


def test_the_answer_is_the_maximum_of_each_place():
    assert maximum("195", "278") == "298" == RowPair("195", "278").answer
    assert right_share("298", "298") == 1.0 and right_share("208", "298") == pytest.approx(2 / 3)
    assert right_share(None, "298") == 0.0


def test_questions_read_back():
    assert parse_question(format_question(RowPair("195", "278"))) == RowPair("195", "278")
    for text in ("195", "195/27", "19a/278", "/", "1/2/3"):
        with pytest.raises(ValueError, match="expected two rows"):
            parse_question(text)
