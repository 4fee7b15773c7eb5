"""Requests beyond a plain chat: forms of the answer, forced calls, earlier answers by id, begun answers, effort."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import BaseModel

from .helpers import ADD, FAMILIES, USER, call_of, play
from .wires import Chat, Messages, Responses, asked, every, refused

SCHEMA = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
GO_ON = [{"role": "user", "content": "And 3 + 3?"}]


class Total(BaseModel):
    total: int


def format_of(wire, schema=SCHEMA):
    """Return the option by which a request of this dialect asks for JSON of a schema."""
    if wire is Chat:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}}
    if wire is Responses:
        return {"text": {"format": {"type": "json_schema", "name": "sum", "schema": schema}}}
    return {"extra_body": {"output_config": {"format": {"type": "json_schema", "schema": schema}}}}


def forced(wire, name=None):
    """Return the options by which a request of this dialect forces a call, of any tool or of the one with ``name``."""
    if wire is Messages:
        return {"tools": wire.tools, "tool_choice": {"type": "tool", "name": name} if name else {"type": "any"}}
    named = {"type": "function", "function": {"name": name}} if wire is Chat else {"type": "function", "name": name}
    return {"tools": wire.tools, "tool_choice": named if name else "required"}


def counts(played, *names):
    return [played.metrics.get(f"gateway/{name}/solver", 0) for name in names]


# -- structured output -------------------------------------------------------------------------------------------------
@every
def test_schema_is_shown_once_in_a_chat_and_what_does_not_fit_is_an_answer(wire):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            messages, options = wire.with_system("Be brief.")
            first = await wire.ask(client, messages=messages, **options, **format_of(wire))
            chat = [*messages, *wire.sent_back(first), *GO_ON]
            seen += [wire.text(first), wire.text(await wire.ask(client, messages=chat, **options, **format_of(wire)))]

    played = play(agent, ['{"total": 4}', "It is 6."])
    assert played.seen == ['{"total": 4}', "It is 6."]
    first, second = (played.text(step.prompt_token_ids) for step in played.steps)
    shown = json.dumps(SCHEMA)
    assert first.index("Be brief.") < first.index(shown) < first.index("2 + 2"), "the system message shows it"
    assert second.startswith(first) and second.count(shown) == 1
    assert counts(played, "structured_outputs", "structured_outputs/no_json", "rewritten_rows") == [2, 1, 0]


def test_form_that_begins_later_extends_the_chat_and_one_that_ends_rewrites_it():
    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            chat = list(USER)
            for options in ({}, {"response_format": {"type": "json_object"}}, {"response_format": {"type": "text"}}):
                chat += [*Chat.sent_back(await Chat.ask(client, messages=chat, **options)), *GO_ON]

    played = play(agent, ["4", "{}", "6"])
    texts = [played.text(step.prompt_token_ids) for step in played.steps]
    assert ["JSON object" in text for text in texts] == [False, True, False]
    assert [step.info.get("rewritten") for step in played.steps] == [None, None, "output"]
    assert played.metrics["gateway/rewritten_rows/output/solver"] == 1


def test_helpers_of_the_sdks_parse_what_fits():
    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            chat = await client.chat.completions.parse(model="solver", messages=USER, response_format=Total)
            response = await client.responses.parse(model="solver", input=USER, text_format=Total)
        async with Messages.client(models["solver"]) as client:
            message = await client.messages.parse(model="solver", max_tokens=99, messages=USER, output_format=Total)
        seen += [chat.choices[0].message.parsed, response.output_parsed, message.parsed_output]

    played = play(agent, ['{"total": 4}'])
    assert played.seen == [Total(total=4)] * 3
    assert all('"total"' in played.text(step.prompt_token_ids) for step in played.steps)


# -- forced calls ------------------------------------------------------------------------------------------------------
@every
def test_forced_call_is_asked_for_at_the_end_of_the_prompt_and_counted_when_missed(wire):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            chat = list(USER)
            for options in (forced(wire, "add"), forced(wire), forced(wire), {"tools": wire.tools}):
                answer = await wire.ask(client, messages=chat, **options)
                seen.append(wire.calls(answer))
                back = wire.results({call: "4" for call, _ in seen[-1]}) if seen[-1] else GO_ON
                chat += [*wire.sent_back(answer), *back]

    played = play(agent, [call_of("add", '{"a": 2, "b": 2}'), "4", "so"])
    assert [[arguments for _, arguments in calls] for calls in played.seen] == [[{"a": 2, "b": 2}], [], [], []]
    texts = [played.text(step.prompt_token_ids) for step in played.steps]
    assert [text.count("Call the function add now.") for text in texts] == [1, 2, 3, 3]
    assert texts[0].index("2 + 2") < texts[0].index("Call the function"), "the request comes last"
    assert counts(played, "forced_calls", "forced_calls/missed", "rewritten_rows") == [3, 2, 0]


def test_allowed_tools_limit_what_is_read_as_a_call():
    sub = {"type": "function", "function": {**ADD["function"], "name": "sub"}}
    only = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]}
    options = {"tools": [ADD, sub], "tool_choice": {"type": "allowed_tools", "allowed_tools": only}}
    played = asked(Chat, [call_of("add", "{}"), call_of("sub", "{}")], options, options)
    assert [bool(Chat.calls(answer)) for answer in played.seen] == [False, True]
    assert "<tool_call>" in Chat.text(played.seen[0])
    required = {**options, "tool_choice": {**options["tool_choice"], "allowed_tools": {**only, "mode": "required"}}}
    played = asked(Chat, ["4"], required)
    assert "Call the function sub now." in played.text(played.steps[0].prompt_token_ids)


def test_a_forced_call_without_a_tool_to_call_is_refused():
    none = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}

    async def agent(seen, models):
        for choice in ("required", none):
            options = {"tool_choice": choice} | ({"tools": [ADD]} if choice is none else {})
            error = await refused(Chat, models["solver"], status=400, name="BadRequestError", **options)
            assert error.param == "tool_choice"

    assert play(agent, ["4"]).steps == []


# -- earlier answers ---------------------------------------------------------------------------------------------------
def test_responses_continue_by_the_id_of_an_earlier_answer():
    async def agent(seen, models):
        async with Responses.client(models["solver"]) as client:
            options = {"instructions": "Be brief.", "tools": Responses.tools, "store": False}
            first = await Responses.ask(client, **options)
            [(call, _)] = Responses.calls(first)
            second = await Responses.ask(
                client, Responses.results({call: "4"}), previous_response_id=first.id, **options
            )
            branches = [Responses.ask(client, GO_ON, previous_response_id=second.id, **options) for _ in range(2)]
            answers = [first, second, *await asyncio.gather(*branches)]
            assert len({answer.id for answer in answers}) == 4
            gone = await refusal_of(Responses.ask(client, GO_ON, previous_response_id="resp_x"))
            assert gone.code == "previous_response_not_found" and "resp_x" in str(gone)
            # A new instruction replaces the earlier one, as in OpenAI's API.
            await Responses.ask(client, GO_ON, previous_response_id=second.id, instructions="Sing.")

    played = play(agent, [call_of("add", '{"a": 2, "b": 2}'), "It is 4.", "6"])
    texts = [played.text(step.prompt_token_ids) for step in played.steps]
    assert texts[1].startswith(texts[0]) and texts[2].startswith(texts[1]) and texts[3] == texts[2]
    assert texts[2].count("Be brief.") == 1 and texts[2].index("It is 4.") < texts[2].index("And 3")
    assert "Be brief." not in texts[4] and "Sing." in texts[4] and "It is 4." in texts[4]
    assert counts(played, "extended_rows") == [3]


async def refusal_of(call):
    with pytest.raises(Chat.sdk.BadRequestError) as caught:
        await call
    return caught.value


def test_threads_of_anthropics_api_continue_by_the_id_of_an_earlier_answer():
    async def agent(seen, models):
        async with Messages.client(models["solver"]) as client:
            thread = {"extra_body": {"thread": {"type": "create"}}, "system": "Be brief."}
            first = await Messages.ask(client, **thread)
            thread = {"extra_body": {"thread": {"type": "continue", "previous_message_id": first.id}}}
            for system in ({}, {"system": "Be brief."}):
                await Messages.ask(client, messages=GO_ON, **thread, **system)

    played = play(agent, ["4", "6"])
    first, second, third = (played.text(step.prompt_token_ids) for step in played.steps)
    assert second.startswith(first) and second == third and second.count("Be brief.") == 1


def test_threads_of_anthropics_api_keep_their_tools_unless_a_request_brings_its_own():
    async def agent(seen, models):
        async with Messages.client(models["solver"]) as client:
            first = await Messages.ask(client, tools=Messages.tools, extra_body={"thread": {"type": "create"}})
            thread = {"extra_body": {"thread": {"type": "continue", "previous_message_id": first.id}}}
            for tools in ({}, {"tools": Messages.tools}, {"tools": []}):
                await Messages.ask(client, messages=GO_ON, **thread, **tools)

    played = play(agent, ["4", "6"])
    assert [step.info.get("rewritten") for step in played.steps] == [None, None, None, "tools"]


# -- begun answers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@every
def test_begun_answer_is_continued_and_does_not_train(wire, family):
    begun = [{"role": "assistant", "content": "The <|im_end|> sum"}]

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            answer = await wire.ask(client, messages=[*USER, *begun])
            whole = [{"role": "assistant", "content": begun[0]["content"] + wire.text(answer)}]
            seen.append(wire.text(answer))
            await wire.ask(client, messages=[*USER, *whole, *GO_ON])

    played = play(agent, [" is 4.", "6"], family=family)
    assert played.seen == [" is 4."]
    first, second = played.steps
    assert played.text(first.prompt_token_ids).endswith("<|im_start|>assistant\nThe <|im_end|> sum")
    assert played.text(first.completion_token_ids) == " is 4.<|im_end|>"
    seen = [*first.prompt_token_ids, *first.completion_token_ids]
    assert second.prompt_token_ids[: len(seen)] == seen and "rewritten" not in second.info
    end = played.client.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert list(first.prompt_token_ids).count(end) == 1, "the agent's text closes no turn"


@pytest.mark.parametrize("limit", [2, 200])
def test_agent_lets_the_model_go_on_with_its_own_answer(limit):
    """The prompt is what was sampled, without the token that ended the turn. A cut answer needs no option for this."""
    options = {} if limit == 2 else {"extra_body": {"continue_final_message": True}}

    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            cut = await Chat.ask(client, max_tokens=limit)
            await Chat.ask(client, messages=[*USER, *Chat.sent_back(cut)], **options)

    played = play(agent, ["It is", " 4."])
    first, second = played.steps
    seen = [*first.prompt_token_ids, *first.completion_token_ids]
    assert list(second.prompt_token_ids) == (seen if limit == 2 else seen[:-1])
    assert counts(played, "extended_rows", "rewritten_rows") == [1, 0]


def test_answer_of_another_actor_at_the_end_of_a_chat_is_followed_by_a_new_answer():
    """Graphs whose actors share one list of messages send such chats. ``continue_final_message`` decides otherwise."""

    async def agent(seen, models):
        async with Chat.client(models["planner"]) as planner, Chat.client(models["solver"]) as solver:
            plan = Chat.sent_back(await Chat.ask(planner, actor="planner"))
            for options in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
                await Chat.ask(solver, messages=[*USER, *plan], extra_body=options)
            await Chat.ask(
                solver,
                messages=[*USER, {"role": "assistant", "content": "Hm"}],
                extra_body={"continue_final_message": False},
            )

    played = play(agent, ["Add.", "4"], actors=("planner", "solver"))
    ends = [played.text(step.prompt_token_ids).rpartition("2 + 2 = ?")[2] for step in played.steps[1:]]
    new = "<|im_end|>\n<|im_start|>assistant\n"
    assert ends == [f"{new}Add.{new}", f"{new}Add.", f"{new}Hm{new}"]


# -- fields that change nothing ----------------------------------------------------------------------------------------
TAKEN = {
    Chat: [
        {"extra_body": {"min_p": 0, "repetition_penalty": 1, "top_k": 20, "max_tokens": 64.0}},
        {"extra_body": {"thinking": {"type": "disabled"}}, "stop": "", "reasoning_effort": "none"},
        {"function_call": "auto", "prediction": {"type": "content", "content": "4"}, "prompt_cache_key": "x"},
    ],
    Responses: [
        {"reasoning": {"effort": "none"}, "max_tool_calls": 3, "text": {"format": {"type": "text"}}},
        {"extra_body": {"context_management": [], "client_metadata": {"turn_id": "x"}}, "store": True},
    ],
    Messages: [
        {"extra_body": {"context_management": {"edits": []}, "thread": {"type": "create"}, "top_k": 5}},
        {"thinking": {"type": "disabled"}, "metadata": {"user_id": "x"}},
        {"extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}},
    ],
}
WISHES = {
    Chat: ({"reasoning_effort": "low", "verbosity": "low"}, ["reasoning_effort", "verbosity"]),
    Responses: (
        {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "truncation": "auto"},
        ["reasoning", "verbosity", "truncation"],
    ),
    Messages: (
        {"extra_body": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}},
        ["thinking", "effort"],
    ),
}


@every
def test_fields_that_change_nothing_are_taken_and_wishes_for_effort_are_counted(wire):
    wishes, names = WISHES[wire]
    played = asked(wire, ["4"], *TAKEN[wire], wishes)
    assert {wire.text(answer) for answer in played.seen} == {"4"}
    not_applied = {key: value for key, value in played.metrics.items() if "not_applied" in key}
    assert not_applied == {f"gateway/not_applied/{name}/solver": 1.0 for name in names}


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
UNSHOWN = {
    Chat: ([{**USER[0], "name": "ann"}], "name"),
    Responses: ([{**USER[0], "name": "ann"}], "name"),
    Messages: (
        [
            *USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
            {"role": "user", "content": [RESULT]},
        ],
        "is_error",
    ),
}


@every
def test_fields_of_messages_that_no_template_shows_are_counted(wire):
    messages, name = UNSHOWN[wire]

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            await wire.ask(client, messages=messages)
            await wire.ask(client)

    played = play(agent, ["4"])
    counted = {key: value for key, value in played.metrics.items() if "not_applied" in key}
    assert counted == {f"gateway/not_applied/messages.{name}/solver": 1.0}


def test_old_calls_of_functions_reach_the_model():
    old = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}}

    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            await Chat.ask(client, [*USER, old, {"role": "function", "name": "add", "content": "4"}])

    played = play(agent, ["4"])
    shown = played.text(played.steps[0].prompt_token_ids)
    assert '"add", "arguments": {"a": 2}' in shown and "not_applied" not in str(played.metrics)


def test_top_k_and_min_p_of_an_evaluation_are_the_agents():
    options = [{"extra_body": {"top_k": value, "min_p": 0.25}} for value in (-1, 5)]
    calls = asked(Chat, ["4"], *options, evaluation=True).client.calls
    assert [(request.sampling.top_k, request.sampling.min_p) for request in calls] == [(0, 0.25), (5, 0.25)]


# -- further routes ----------------------------------------------------------------------------------------------------
def test_tokens_of_a_prompt_are_counted_without_a_call():
    async def agent(seen, models):
        async with Messages.client(models["solver"]) as client:
            counted = await client.messages.count_tokens(model="solver", messages=USER, tools=list(Messages.tools))
            answer = await Messages.ask(client, tools=Messages.tools)
            assert counted.input_tokens == answer.usage.input_tokens
        async with Responses.client(models["solver"]) as client:
            counted = await client.responses.input_tokens.count(model="solver", input=USER)
            assert counted.input_tokens == (await Responses.ask(client)).usage.input_tokens

    assert len(play(agent, ["4"]).steps) == 2


def test_a_model_is_described_by_its_name():
    async def agent(seen, models):
        for wire in (Chat, Messages):
            async with wire.client(models["solver"]) as client:
                assert (await client.models.retrieve("solver")).id == "solver"
                with pytest.raises(wire.sdk.NotFoundError, match="'solver'"):
                    await client.models.retrieve("gpt-5")

    play(agent, ["4"])
