"""Several choices of one call: all of them train, or only those that a later prompt goes on from."""

from __future__ import annotations

from typing import Any

import pytest

from .helpers import USER, play
from .sdks import OpenAI


async def best_of_three(seen: Any, models: Any) -> None:
    """Ask for three drafts, go on from the second, and end with three more."""
    async with OpenAI.client(models["solver"]) as client:
        ask = client.chat.completions.create
        drafts = (await ask(model="solver", messages=USER, n=3)).choices
        chat = [*USER, {"role": "assistant", "content": drafts[1].message.content}, {"role": "user", "content": "And?"}]
        await ask(model="solver", messages=chat, n=3)


@pytest.mark.parametrize(("choices", "trains"), [("all", "111111"), ("continued", "010000")])
def test_which_choices_train(choices: str, trains: str) -> None:
    found = play(best_of_three, ["a", "b", "c", "d", "e", "f"], choices=choices)
    assert [step.completion for step in found.steps] == list("abcdef")
    assert [step.turn for step in found.steps] == [0, 0, 0, 1, 1, 1]
    assert "".join(str(int(step.trainable)) for step in found.steps) == trains
    assert found.metrics["gateway/extended_rows/solver"] == 3, "the longer prompt extends the second draft"


def test_a_single_choice_always_trains() -> None:
    async def agent(seen: Any, models: Any) -> None:
        async with OpenAI.client(models["solver"]) as client:
            await client.chat.completions.create(model="solver", messages=USER)

    assert play(agent, ["a"], choices="continued").steps[0].trainable


def test_groups_of_different_prompts_are_counted() -> None:
    """Two attempts whose second calls differ: rows of the first call are comparable, those of the second are not."""
    from turnwise.credit import ATGRPOCredit
    from turnwise.samples.collect import collect_samples, mixed_prompts

    asked: list[int] = []

    async def agent(seen: Any, models: Any) -> float:
        asked.append(0)
        last = {"role": "user", "content": f"And {len(asked)}?"}
        async with OpenAI.client(models["solver"]) as client:
            for messages in (USER, [last]):
                await client.chat.completions.create(model="solver", messages=messages)
        return 1.0

    found = play(agent, ["a"], attempts=2)
    assert mixed_prompts(collect_samples(found.results), ATGRPOCredit()) == {"groups/mixed_prompts": 0.5}
    assert mixed_prompts(collect_samples(found.results), None) == {}
