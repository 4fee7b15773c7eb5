"""Responses through OpenAI's SDK: answers equal the recorded steps, and streams equal plain answers."""

from __future__ import annotations

import json

import openai
import pytest

from turnwise.types import Actor

from .helpers import ADD, FAMILIES, answers_of_a_model, call_of, dumped, play

TOOL = {"type": "function", "strict": False, **ADD["function"]}
SUM = call_of("add", '{"a": 2, "b": 2}')


def client_of(model, **options):
    return openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, **options)


async def ask(model, given="2 + 2 = ?", **options):
    async with client_of(model) as client:
        return await client.responses.create(model=model.name, input=given, **options)


async def streamed(model, given="2 + 2 = ?", **options):
    """Return what the SDK makes of a stream's events, the deltas included."""
    async with (
        client_of(model) as client,
        client.responses.stream(model=model.name, input=given, **options) as stream,
    ):
        events = [event async for event in stream]
    texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    written = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    answer = events[-1].response
    assert texts == answer.output_text
    assert written == "".join(item.arguments for item in answer.output if item.type == "function_call")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return answer


def sent_back(answer):
    """Return the output of an answer as agents send it back."""
    return [item.model_dump(exclude_none=True) for item in answer.output]


def test_answer_is_the_recorded_step():
    async def agent(seen, models):
        seen.append(await ask(models["solver"], instructions="Be brief."))

    played = play(agent, ["It is 4."])
    [answer], [step] = played.seen, played.steps
    assert (answer.output_text, answer.status, answer.model) == ("It is 4.", "completed", "solver")
    assert played.text(step.completion_token_ids) == "It is 4.<|im_end|>"
    assert played.text(step.prompt_token_ids).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 "
    )
    assert (step.actor_id, step.turn, played.rewards) == ("solver", 0, {"solver": 1.0})
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(step.prompt_token_ids),
        len(step.completion_token_ids),
    )


CASES = answers_of_a_model(TOOL, "max_output_tokens")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_answer_equals_plain_answer(case, family):
    script, options = CASES[case]

    async def agent(seen, models):
        seen.append(await ask(models["solver"], **options))
        seen.append(await streamed(models["solver"], **options))

    played = play(agent, script, family=family)
    plain, stream = (dumped(answer, "parsed", "parsed_arguments") for answer in played.seen)
    assert plain == stream
    assert len(played.steps) == 2
    for answer in played.seen:
        reason = answer.incomplete_details and answer.incomplete_details.reason
        expected = ("incomplete", "max_output_tokens") if case == "cut" else ("completed", None)
        assert (answer.status, reason) == expected


@pytest.mark.parametrize("asked", [ask, streamed])
@pytest.mark.parametrize("family", FAMILIES)
def test_tools_over_several_rounds_extend_the_sampled_tokens(asked, family):
    async def agent(seen, models):
        items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]
        while True:
            answer = await asked(models["solver"], items, tools=[TOOL])
            seen.append(answer)
            items += sent_back(answer)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return
            for call in calls:
                given = json.loads(call.arguments)
                result = str(given["a"] + given["b"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})

    more = call_of("add", '{"a": 4, "b": 1}')
    thought = "<think>\nhm\n</think>\n\n" if family == "qwen3" else ""
    played = play(agent, [thought + SUM, f"Once more.\n{SUM}{more}", "4, 4 and 5."], family=family)
    kinds = [[item.type for item in answer.output] for answer in played.seen]
    reasoning = ["reasoning"] if thought else []
    assert kinds == [[*reasoning, "function_call"], ["message", "function_call", "function_call"], ["message"]]
    for before, after in zip(played.steps, played.steps[1:], strict=False):
        stream = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(stream)] == stream
    assert [step.turn for step in played.steps] == [0, 1, 2]
    assert played.metrics["gateway/extended_rows/solver"] == 2
    assert played.metrics["gateway/rewritten_rows/solver"] == 0


def test_length_limit_of_the_actor():
    async def agent(seen, models):
        seen.append(await ask(models["solver"], max_output_tokens=500))

    played = play(agent, ["0123456789" * 9], actors=[Actor("solver", max_tokens=20)])
    assert played.seen[0].usage.output_tokens == 20
    assert played.seen[0].status == "incomplete"


def test_chat_of_items_of_both_forms():
    items = [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]

    async def agent(seen, models):
        await ask(models["solver"], items)

    played = play(agent, ["4"])
    assert played.text(played.steps[0].prompt_token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
