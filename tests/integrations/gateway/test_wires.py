"""Each dialect through its SDK: answers equal the recorded steps, streams equal plain answers, and chats go on."""

from __future__ import annotations

import itertools

import anthropic
import openai
import pytest

from turnwise.types import Actor

from .helpers import FAMILIES, USER, call_of, dumped, needs_qwen3, play
from .wires import Chat, Messages, Responses, asked, both, every

SUM = call_of("add", '{"a": 2, "b": 2}')
MORE = call_of("add", '{"a": 4, "b": 1}')
THOUGHT = "<think>\nhm\n</think>\n\n"


def check_extended(played):
    """Check that each prompt begins with all that was seen and sampled before it."""
    for before, after in itertools.pairwise(played.steps):
        stream = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(stream)] == stream


@every
def test_answer_is_the_recorded_step(wire):
    messages, options = wire.with_system("Be brief.")
    solver = Actor("solver", system_prompt="Not shown.")
    played = asked(wire, ["It is 4."], {"messages": messages, **options}, actors=[solver])
    [answer], [step] = played.seen, played.steps
    assert (wire.text(answer), wire.reason(answer), answer.model) == ("It is 4.", wire.reasons[0], "solver")
    assert played.text(step.completion_token_ids) == "It is 4.<|im_end|>"
    assert played.text(step.prompt_token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2 = ?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (step.actor_id, step.turn, step.trainable, played.rewards) == ("solver", 0, True, {"solver": 1.0})
    assert wire.usage(answer) == (len(step.prompt_token_ids), len(step.completion_token_ids))


@pytest.mark.parametrize("family", FAMILIES)
@every
def test_streamed_answers_equal_plain_ones(wire, family):
    """What a model may say, asked for twice: text, ends, tool calls right and wrong, and reasoning."""
    tools = {"tools": wire.tools}
    cases = {
        "text": ("It is 4.", {}),
        "empty": ("", {}),
        "cut": ("It is 4.", {wire.limit: 3}),
        "call": (f"I add.\n{SUM}", tools),
        "two calls": (SUM + SUM, tools),
        "bad call": ("<tool_call>{]</tool_call>", tools),
        "reasoning": (f"{THOUGHT}It is 4.", {}),
        "reasoning and call": (THOUGHT + SUM, tools),
    }
    if wire is not Responses:
        cases["stop"] = "It is 4. Or 5.", {"stop" if wire is Chat else "stop_sequences": ["."]}
    if wire is Chat:
        cases |= {"logprobs": ("It is 4.", {"logprobs": True}), "choices": ("It is 4.", {"n": 3})}

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for _, options in cases.values():
                seen.append((await wire.ask(client, **options), await wire.streamed(client, **options)))

    texts = [text for text, options in cases.values() for _ in range(2 * options.get("n", 1))]
    played = play(agent, texts, family=family)
    ours = ["parsed", "parsed_arguments", "parsed_output"]  # what an SDK adds to a stream
    steps = iter(played.steps)
    for (name, (_, options)), (plain, stream) in zip(cases.items(), played.seen, strict=True):
        left_out = [*ours, "index", "tool_calls"] if wire is Chat else ours
        assert dumped(plain, *left_out) == dumped(stream, *left_out), name
        assert [given for _, given in wire.calls(plain)] == [given for _, given in wire.calls(stream)], name
        assert len(wire.calls(plain)) == {"call": 1, "two calls": 2, "reasoning and call": 1}.get(name, 0), name
        reason = wire.reasons[1] if name == "cut" else wire.reasons[2] if wire.calls(plain) else wire.reasons[0]
        assert wire.reason(plain) == ("stop_sequence" if name == "stop" and wire is Messages else reason), name
        rows = [next(steps) for _ in range(2 * options.get("n", 1))]
        assert len({tuple(step.completion_token_ids) for step in rows}) == 1, name
    assert not list(steps)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@every
def test_tools_over_several_rounds_extend_the_sampled_tokens(wire, family, streamed):
    async def agent(seen, models):
        messages, options = wire.with_system("Be brief.")
        messages = [*messages]
        async with wire.client(models["solver"]) as client:
            while True:
                ask = wire.streamed if streamed else wire.ask
                answer = await ask(client, messages, tools=wire.tools, **options)
                seen.append(answer)
                messages += wire.sent_back(answer)
                calls = wire.calls(answer)
                if not calls:
                    return
                messages += wire.results({call: str(given["a"] + given["b"]) for call, given in calls})

    thought = THOUGHT if family == "qwen3" else ""
    played = play(agent, [thought + SUM, f"Once more.\n{SUM}{MORE}", "4, 4 and 5."], family=family)
    tools, end = wire.reasons[2], wire.reasons[0]
    assert [wire.reason(answer) for answer in played.seen] == [tools, tools, end]
    assert [len(wire.calls(answer)) for answer in played.seen] == [1, 2, 0]
    assert [wire.text(answer) for answer in played.seen] == ["", "Once more.", "4, 4 and 5."]
    assert wire.thought(played.seen[0]) == ("hm" if thought else None)
    assert len({call for answer in played.seen for call, _ in wire.calls(answer)}) == 3
    check_extended(played)
    assert "Be brief." in played.text(played.steps[0].prompt_token_ids)
    assert [step.turn for step in played.steps] == [0, 1, 2]
    assert [step.facts.tool_calls for step in played.steps] == [["ok"], ["ok", "ok"], None]
    assert played.metrics["gateway/extended_rows/solver"] == 2
    assert played.metrics["gateway/rewritten_rows/solver"] == 0
    assert played.metrics["gateway/tool_calls/ok/solver"] == 3
    if wire is Chat:
        cached = played.seen[2].usage.prompt_tokens_details.cached_tokens
        assert cached == len(played.steps[1].prompt_token_ids) + len(played.steps[1].completion_token_ids)


@needs_qwen3
@pytest.mark.parametrize("sent_back", [True, False])
@both
def test_reasoning_is_apart_and_stays_in_the_context(wire, sent_back):
    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            answer = await wire.ask(client)
            seen.append(answer)
            [message] = wire.sent_back(answer)
            if not sent_back and wire is Chat:
                del message["reasoning_content"]
            elif not sent_back:
                del message["content"][0]
            await wire.ask(client, [*USER, message, {"role": "user", "content": "Sure?"}])

    played = play(agent, [f"{THOUGHT}It is 4."], family="qwen3")
    assert (wire.text(played.seen[0]), wire.thought(played.seen[0])) == ("It is 4.", "hm")
    check_extended(played)


@pytest.mark.parametrize("family", FAMILIES)
@every
def test_nothing_of_a_thought_is_an_answer_or_a_call(wire, family):
    """Drafts of calls and answers in a thought: finished, later, and cut by the request's limit."""
    draft = f"Never say 5. END {SUM} END"
    said = [f"<think>{draft}</think>4", f"<think>{draft}</think>4 <think>{draft}</think>", f"<think>{draft}{40 * 'x'}"]
    stops = {} if wire is Responses else {"stop" if wire is Chat else "stop_sequences": ["END"]}
    options = {"tools": wire.tools, **stops}
    played = asked(wire, said, options, options, {**options, wire.limit: len(said[2]) - 30}, family=family)
    assert [wire.text(answer).strip() for answer in played.seen] == ["4", "4", ""]
    assert [wire.calls(answer) for answer in played.seen] == [[]] * 3
    assert [wire.reason(answer) for answer in played.seen] == [wire.reasons[0], wire.reasons[0], wire.reasons[1]]
    assert all(draft in wire.thought(answer) for answer in played.seen)
    assert [step.in_thought for step in played.steps] == [False, False, True]
    assert all(step.trainable for step in played.steps)


@needs_qwen3
@every
def test_reasoning_that_this_session_did_not_sample_is_rendered(wire):
    first = asked(wire, [THOUGHT + SUM], {"tools": wire.tools}, family="qwen3")
    [(call, _)] = wire.calls(first.seen[0])
    messages = [*USER, *wire.sent_back(first.seen[0]), *wire.results({call: "4"})]
    [step] = (again := asked(wire, ["4"], {"messages": messages, "tools": wire.tools}, family="qwen3")).steps
    assert "<think>\nhm\n</think>" in again.text(step.prompt_token_ids)


@every
def test_limits_of_tokens(wire):
    """The request's, and the actor's where it is lower. A tool call that was cut is text."""
    calls = [{"tools": wire.tools, wire.limit: limit} for limit in (5, 500, 30)]
    digits = "0123456789" * 9
    played = asked(wire, [digits, digits, SUM], *calls, actors=[Actor("solver", max_tokens=40)])
    assert [wire.reason(answer) for answer in played.seen] == [wire.reasons[1]] * 3
    assert [wire.usage(answer)[1] for answer in played.seen] == [5, 40, 30]
    assert [wire.text(answer) for answer in played.seen[:2]] == ["01234", "0123456789" * 4]
    assert wire.text(played.seen[2]).startswith('<tool_call>\n{"name": "add"') and not wire.calls(played.seen[2])
    assert [step.finish_reason for step in played.steps] == ["length"] * 3
    assert all(step.trainable for step in played.steps)
    assert played.metrics["gateway/truncated/solver"] == 3
    assert played.metrics["gateway/max_tokens_lowered/solver"] == 1


@both
def test_stop_string_cuts_the_text_and_keeps_the_tokens(wire):
    stops = {"stop" if wire is Chat else "stop_sequences": ["never", "\nEND"]}

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            seen.append(await wire.ask(client, **stops))
            await wire.ask(client, [*USER, *wire.sent_back(seen[0]), {"role": "user", "content": "Go on."}])

    played = play(agent, ["It is 4.\nEND and more"])
    assert wire.text(played.seen[0]) == "It is 4."
    assert wire.reason(played.seen[0]) == ("stop" if wire is Chat else "stop_sequence")
    assert wire is Chat or played.seen[0].stop_sequence == "\nEND"
    assert played.text(played.steps[0].completion_token_ids) == "It is 4.\nEND"
    check_extended(played)  # the cut text is found again


@both
def test_tools_switched_off_and_single_calls(wire):
    none, single = {
        Chat: ({"tool_choice": "none"}, {"parallel_tool_calls": False}),
        Messages: (
            {"tool_choice": {"type": "none"}},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
    }[wire]
    tools = {"tools": wire.tools}
    played = asked(wire, [SUM + SUM], tools | none, tools | single)
    without, one = played.seen
    assert not wire.calls(without) and wire.text(without) == SUM + SUM
    assert len(wire.calls(one)) == 1 and not wire.text(one)
    counts = {key: value for key, value in played.metrics.items() if "tool_calls/" in key and value}
    assert counts == {"gateway/tool_calls/ok/solver": 1.0, "gateway/tool_calls/extra/solver": 1.0}


@pytest.mark.parametrize("family", FAMILIES)
@every
def test_calls_after_the_first_stay_in_the_tokens_that_the_next_prompt_extends(wire, family):
    single = {"parallel_tool_calls": False}
    if wire is Messages:
        single = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            answer = await wire.ask(client, tools=wire.tools, **single)
            [(call, arguments)] = wire.calls(answer)
            assert arguments == {"a": 1, "b": 1} and "add" not in wire.text(answer)
            seen += [wire.text(answer)]
            chat = [*USER, *wire.sent_back(answer), *wire.results({call: "2"})]
            await wire.ask(client, chat, tools=wire.tools, **single)

    calls = [call_of("add", f'{{"a": {n}, "b": 1}}') for n in (1, 2, 3)]
    broken = "<tool_call>\n{add}\n</tool_call>"
    played = play(agent, ["\n".join([calls[0], broken.replace("add", "x"), *calls[1:]]), "2"], family=family)
    assert played.steps[0].facts.tool_calls == ["ok", "invalid_json", "extra", "extra"]
    assert "{x}" in played.seen[0], "the agent sees a call that can't be read"
    check_extended(played)


@both
def test_synchronous_agent_runs_in_a_thread(wire):
    def agent(seen, models):
        model = models["solver"]
        if wire is Chat:
            with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
                seen.append(client.chat.completions.create(model=model.name, messages=USER))
                seen.append([found.id for found in client.models.list()])
        else:  # whose base URL may end in /v1
            with anthropic.Anthropic(base_url=model.base_url, api_key=model.api_key) as client:
                seen.append(client.messages.create(model=model.name, messages=USER, max_tokens=9))
                seen.append([found.id for found in client.models.list()])

    played = play(agent, ["4"], actors=("solver", "checker"))
    assert wire.text(played.seen[0]) == "4" and played.seen[1] == ["solver", "checker"]
    assert len(played.steps) == 1


@every
def test_later_system_messages_and_results_in_another_order_reach_the_model(wire):
    """They are in the prompt at their place, and each result follows its own call."""

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            answer = await wire.ask(client, tools=wire.tools)
            (first, _), (second, _) = wire.calls(answer)
            found = wire.results({second: "of the second", first: "of the first"})
            later = [{"role": "system" if wire is Messages else "developer", "content": "Be brief."}]
            await wire.ask(client, [*USER, *wire.sent_back(answer), *found, *later, *USER], tools=wire.tools)

    calls = "\n".join(call_of("add", f'{{"a": {n}, "b": 1}}') for n in (1, 2))
    played = play(agent, [calls, "4"])
    shown = played.client.tokenizer.decode(played.steps[1].prompt_token_ids, skip_special_tokens=False)
    places = [shown.index(part) for part in ("of the first", "of the second", "Be brief.")]
    assert sorted(places) == places and shown.rindex("2 + 2 = ?") > places[-1]
    assert played.metrics["gateway/extended_rows/solver"] == 1 and played.metrics["gateway/rewritten_rows/solver"] == 0
