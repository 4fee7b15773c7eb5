"""Dynamic sampling: how many questions are kept, which, and what the others leave in the counts."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from turnwise.arena import Arena, Filters
from turnwise.credit import GRPOCredit, HierarchyCredit, RAECredit
from turnwise.types import EpisodeRequest, RequestFacts

from .helpers import Guess, columns, nested


def reply(prompt, request):
    """Questions ``even…`` are always right; the others differ from copy to copy."""
    return "9" if "even" in prompt else str(request.sampling.seed % 10)


def drawn_from(*draws):
    """A source of these draws of questions, two copies each; the last one for ever."""
    left = list(draws)

    def source():
        questions = left.pop(0) if len(left) > 1 else left[0]
        return [EpisodeRequest("guess", question, seed=copy) for question in questions for copy in (1, 2)]

    return source


def arena_of(make_arena, *draws, **filters):
    arena = make_arena(reply, credit=GRPOCredit(), filters=Filters(**filters), episodes=[Guess()])
    arena.source = drawn_from(*draws)
    return arena


DRAWS = (["even1", "odd1", "even2"], ["even3", "odd2"], ["odd3", "odd4", "even4"], ["odd9"])


def informative_groups(arena):
    return [top.group_id for top in arena.last_results[::2] if top.rollout.facts.drop_reason is None]


def test_questions_are_drawn_until_as_many_say_something(make_arena):
    arena = arena_of(make_arena, *DRAWS, dynamic_sampling_rounds=5)
    batch = asyncio.run(arena.step())
    assert informative_groups(arena) == ["odd1", "odd2", "odd3"], "in the order of the draws; odd4 is over"
    assert len(batch) == 6 and (batch.advantages != 0).all()
    assert batch.dropped == {"resample": 8, "over_quota": 2}
    assert batch.metrics["episodes"] == 16 and batch.metrics["sampled_tokens"] == 32
    assert batch.metrics["resampled_groups"] == 5 and batch.metrics["informative_groups"] == 3
    alone = asyncio.run(arena_of(make_arena, ["odd1", "odd2", "odd3"]).step())
    assert columns(batch) == columns(alone), "the same rows as when those alone were asked"


def test_no_more_draws_than_allowed_and_none_without_need(make_arena):
    arena = arena_of(make_arena, *DRAWS, dynamic_sampling_rounds=1)
    batch = asyncio.run(arena.step())
    assert informative_groups(arena) == ["odd1", "odd2"] and batch.metrics["episodes"] == 10
    arena = arena_of(make_arena, ["odd1", "odd2"], ["odd3"], dynamic_sampling_rounds=3)
    batch = asyncio.run(arena.step())
    assert batch.metrics["resampled_groups"] == 0 and batch.metrics["episodes"] == len(batch) == 4


def test_rows_that_other_filters_drop_say_nothing(make_arena):
    arena = arena_of(make_arena, ["odd1", "odd-with-a-long-name"], ["odd2"], dynamic_sampling_rounds=1, max_length=45)
    batch = asyncio.run(arena.step())
    assert informative_groups(arena) == ["odd1", "odd2"] and len(batch) == 4
    assert batch.dropped == {"resample": 2}


def test_a_question_whose_spawned_episodes_say_something_is_kept_whole(make_arena):
    """A proposer alone in its group says nothing of itself; its solvers do unless the question is easy."""

    asked = Counter()

    def play(prompt, request):
        if "Topic" in prompt:
            return "even" if "easy" in prompt else f"odd{prompt.partition('hard')[2][0]}"
        asked[prompt] += 1
        return "9" if "even" in prompt else "91"[asked[prompt] % 2]

    arena = nested(make_arena, play, credit=HierarchyCredit(), filters=Filters(dynamic_sampling_rounds=2))
    draws = iter([["easy1", "hard1"], ["hard2", "hard3"]])
    arena.source = lambda: [EpisodeRequest("propose", topic, seed=1) for topic in next(draws)]
    batch = asyncio.run(arena.step())
    assert [top.group_id for top in arena.last_results if top.rollout.facts.drop_reason is None] == ["hard1", "hard2"]
    assert len(batch) == 8 and batch.actors == ["solver"], "the eight solvers of both hard questions"
    assert batch.dropped == {"alone": 2, "resample": 5, "over_quota": 5}, "hard3 is over, and its solvers with it"
    assert batch.metrics["episodes"] == 20 and batch.metrics["informative_groups"] == 2


@pytest.mark.parametrize(("resample", "played"), [(5, [3, 2, 3]), (1, [3]), (0, [])])
def test_the_next_batch_draws_when_this_one_can_draw_no_more(make_arena, resample, played):
    """``drawn()`` comes once: before the last allowed draw is played, or when enough has been."""
    arena = arena_of(make_arena, *DRAWS, dynamic_sampling_rounds=resample)
    at_call = []
    asyncio.run(arena.sample(lambda: at_call.append(len(arena.client.prompts))))
    assert at_call == [2 * sum(played)]


def test_several_steps_may_sample_at_once(make_arena):
    """The second begins when the first has drawn all that it will, so both get what they would one by one."""

    def source_of():
        return arena_of(make_arena, *DRAWS[:3], ["odd5", "odd6", "even7"], ["odd8"], dynamic_sampling_rounds=2)

    async def both(arena):
        drawn = asyncio.Event()
        first = asyncio.ensure_future(arena.sample(drawn.set))
        await drawn.wait()
        return [arena.assign_credit_and_pack(results) for results in await asyncio.gather(first, arena.sample())]

    one_by_one = source_of()
    for batch in asyncio.run(both(source_of())):
        assert columns(batch) == columns(asyncio.run(one_by_one.step())) and batch.metrics["informative_groups"] == 3


@pytest.mark.parametrize(
    ("credit", "message"), [(RAECredit(), "RAECredit learns from each batch"), (None, "needs credit=")]
)
def test_a_rule_that_cannot_be_asked_twice_is_refused(make_arena, credit, message):
    with pytest.raises(ValueError, match=message):
        make_arena(credit=credit, filters=Filters(dynamic_sampling_rounds=1))
    assert isinstance(make_arena(credit=credit, filters=Filters()), Arena)


def test_each_of_several_tasks_keeps_as_many_questions_as_it_has_in_the_first_draw(make_arena):
    """One of "a" and two of "b". "a" has its odd question at once; what it draws later is over its quota, while "b"
    waits for its second one."""
    draws = [
        [("a", "odd1"), ("b", "even1"), ("b", "odd2")],
        [("a", "odd3"), ("b", "even2"), ("b", "even3")],
        [("a", "odd4"), ("b", "odd5"), ("b", "odd6")],
    ]
    left = [*draws]

    def source():
        return [
            EpisodeRequest("guess", question, seed=copy, facts=RequestFacts(task=task))
            for task, question in left.pop(0)
            for copy in (1, 2)
        ]

    arena = make_arena(reply, credit=GRPOCredit(), filters=Filters(dynamic_sampling_rounds=5), episodes=[Guess()])
    arena.source = source
    batch = asyncio.run(arena.step())
    assert not left and informative_groups(arena) == ["odd1", "odd2", "odd5"]
    assert batch.dropped == {"resample": 6, "over_quota": 6} and len(batch) == 6
