"""Tools that an agent's own search loads: prompts don't begin with them, and a result that names one shows it."""

from __future__ import annotations

import pytest

from .helpers import FAMILIES, USER, call_of, play
from .wires import Messages, refusal

SEARCH = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"volume": {"type": "integer", "description": "in decibels"}}}
SING = {"name": "sing", "description": "Sings.", "input_schema": SCHEMA, "defer_loading": True}
LATER = {"name": "later", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True}
LINES = [call_of("search", '{"query": "music"}'), call_of("sing", '{"volume": 3}'), "Done."]


def found(answer, *names):
    [(call, _)] = Messages.calls(answer)
    parts = [{"type": "text", "text": "Found:\n"}, *({"type": "tool_reference", "tool_name": name} for name in names)]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": parts}]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("sent", ["all", "found", "thread"])
def test_a_result_shows_the_tools_that_it_names(family, streamed, sent):
    """Some agents send all deferred tools, some those that were found, and a thread keeps its own."""

    async def agent(seen, models):
        async with Messages.client(models["solver"]) as client:
            ask, thread = Messages.streamed if streamed else Messages.ask, sent == "thread"
            more = {"extra_body": {"thread": {"type": "create"}}} if thread else {}
            first = await ask(client, tools=[SEARCH, LATER, *([] if sent == "found" else [SING])], **more)
            chat = [*USER, *Messages.sent_back(first), found(first, "sing")]
            more = {"extra_body": {"thread": {"type": "continue", "previous_message_id": first.id}}} if thread else {}
            tools = {} if thread else {"tools": [SEARCH, LATER, SING]}
            second = await ask(client, messages=chat[-1:] if thread else chat, **tools, **more)
            [(call, arguments)] = Messages.calls(second)
            assert arguments == {"volume": 3}
            results = Messages.results({call: "La."})
            more = {"extra_body": {"thread": {"type": "continue", "previous_message_id": second.id}}} if thread else {}
            await ask(
                client, messages=results if thread else [*chat, *Messages.sent_back(second), *results], **tools, **more
            )

    played = play(agent, LINES, family=family)
    first, second, _ = (played.text(step.prompt_token_ids) for step in played.steps)
    assert "search" in first and "sing" not in first and "later" not in second
    assert "Found:\n" in second and "in decibels" in second and "Sings." in second
    assert [step.info.get("extends") for step in played.steps] == [None, 0, 1]
    assert played.metrics["gateway/tool_calls/ok/solver"] == 2


def test_a_name_without_a_tool_is_refused():
    async def agent(seen, models):
        async with Messages.client(models["solver"]) as client:
            first = await Messages.ask(client, tools=[SEARCH, SING])
            chat = [*USER, *Messages.sent_back(first), found(first, "sing", "dance")]
            call = Messages.ask(client, messages=chat, tools=[SEARCH, SING])
            seen.append(await refusal(Messages, call, 400, "BadRequestError"))

    [error] = play(agent, LINES).seen
    assert "messages[2].content[0].content[2].tool_name: got 'dance', expected a tool of the request" in str(error)


def test_a_choice_may_name_a_deferred_tool():
    async def agent(seen, models):
        async with Messages.client(models["solver"]) as client:
            choice = {"type": "tool", "name": "sing"}
            answer = await Messages.ask(client, tools=[SEARCH, SING], tool_choice=choice)
            assert Messages.calls(answer)[0][1] == {"volume": 3}

    assert play(agent, LINES[1:]).metrics["gateway/forced_calls/solver"] == 1
