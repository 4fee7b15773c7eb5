"""Agents that edit the answers they got: each call is extended or counted as rewritten."""

from __future__ import annotations

import aiohttp
import pytest

from .helpers import play


@pytest.mark.parametrize(
    ("edit", "stop", "extended", "rewritten"),
    [
        (lambda text, turn: text, None, 3, 0),
        (lambda text, turn: text.strip(), None, 3, 0),
        (lambda text, turn: text, ["</code>"], 3, 0),
        (lambda text, turn: f"{text}</code>", ["Never", "</code>"], 3, 0),
        (lambda text, turn: text.replace("Thought: ", ""), None, 0, 3),
        (lambda text, turn: text if turn else text + "!", None, 2, 1),
    ],
    ids=["unchanged", "stripped", "stop left out", "stop put back", "each edited", "first one edited"],
)
def test_each_answer_that_comes_back_is_extended_or_counted(edit, stop, extended, rewritten):
    async def agent(seen, models):
        model, chat = models["solver"], [{"role": "user", "content": "hi"}]
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for turn in range(4):
                async with http.post(
                    f"{model.base_url}/chat/completions", json={"messages": chat, "stop": stop}
                ) as sent:
                    text = (await sent.json())["choices"][0]["message"]["content"]
                chat += [{"role": "assistant", "content": edit(text, turn)}, {"role": "user", "content": f"on {turn}"}]

    played = play(agent, ["Thought: x <code>y</code>\n"])
    metrics = {name.removeprefix("gateway/").removesuffix("/solver"): n for name, n in played.metrics.items()}
    assert (metrics["extended_rows"], metrics["rewritten_rows"]) == (extended, rewritten)
    assert metrics.get("rewritten_rows/history", 0) == rewritten
    assert [step.info.get("rewritten") for step in played.steps].count("history") == rewritten
    assert [step.info["order"] for step in played.steps] == [0, 1, 2, 3]
    assert [step.info.get("extends") for step in played.steps] == [*[None] * (1 + rewritten), *range(3 - extended, 3)]
    for step, later in zip(played.steps, played.steps[1:], strict=False):
        seen = [*step.prompt_token_ids, *step.completion_token_ids]
        assert (list(later.prompt_token_ids[: len(seen)]) == seen) == ("rewritten" not in later.info)


SUMMARY = "The user plans a trip of three days to Rome and wants quiet hotels near the station."


@pytest.mark.parametrize(
    ("begins", "carried"),
    [
        (lambda text: f"<summary>\n{text}\n</summary>\nGo on.", [None, 0, None]),
        (lambda text: text[:-20] + "…", [None, None, None]),
        (lambda text: "Go on.", [None, None, None]),
    ],
    ids=["its own summary", "a cut one", "without"],
)
def test_an_agent_that_compacts_its_chat_begins_a_row_that_carries_its_answer(begins, carried):
    """The new chat continues none, and says so; what continues it is extended as ever."""

    async def agent(seen, models):
        model = models["solver"]
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(chat):
                async with http.post(f"{model.base_url}/chat/completions", json={"messages": chat}) as sent:
                    return (await sent.json())["choices"][0]["message"]["content"]

            system = {"role": "system", "content": "You plan trips."}
            text = await ask([system, {"role": "user", "content": "A trip to Rome. Now sum up our talk."}])
            chat = [system, {"role": "user", "content": begins(text)}]
            chat += [{"role": "assistant", "content": await ask(chat)}, {"role": "user", "content": "And then?"}]
            await ask(chat)

    played = play(agent, [SUMMARY, "Take the train.", "Sleep."])
    assert [step.info.get("carries") for step in played.steps] == carried
    metrics = {name.removeprefix("gateway/").removesuffix("/solver"): n for name, n in played.metrics.items()}
    assert metrics.get("carried_rows", 0) == (carried[1] is not None)
    assert (metrics["extended_rows"], metrics["rewritten_rows"]) == (1, 0)
