"""Messages through Anthropic's SDK: answers equal the recorded steps, and streams equal plain answers."""

from __future__ import annotations

import anthropic
import pytest

from turnwise.types import Actor

from .helpers import ADD, FAMILIES, USER, answers_of_a_model, call_of, dumped, needs_qwen3, play

TOOL = {
    "name": "add",
    "description": ADD["function"]["description"],
    "input_schema": ADD["function"]["parameters"],
}
SUM = call_of("add", '{"a": 2, "b": 2}')


def client_of(model, **options):
    return anthropic.AsyncAnthropic(base_url=model.anthropic_base_url, api_key=model.api_key, **options)


async def ask(model, messages=USER, **options):
    async with client_of(model) as client:
        return await client.messages.create(model=model.name, messages=messages, **{"max_tokens": 200, **options})


async def streamed(model, messages=USER, **options):
    """Return what the SDK makes of a stream."""
    options = {"max_tokens": 200, **options}
    async with (
        client_of(model) as client,
        client.messages.stream(model=model.name, messages=messages, **options) as stream,
    ):
        return await stream.get_final_message()


def blocks_of(answer):
    """Return the content of an answer as agents send it back."""
    return [block.model_dump(exclude_none=True) for block in answer.content]


def test_answer_is_the_recorded_step():
    async def agent(seen, models):
        seen.append(await ask(models["solver"]))

    played = play(agent, ["It is 4."])
    [answer], [step] = played.seen, played.steps
    assert [(block.type, block.text) for block in answer.content] == [("text", "It is 4.")]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "solver", "end_turn")
    assert played.text(step.completion_token_ids) == "It is 4.<|im_end|>"
    assert (step.actor_id, step.turn, played.rewards) == ("solver", 0, {"solver": 1.0})
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(step.prompt_token_ids),
        len(step.completion_token_ids),
    )


def test_base_url_with_v1_is_served_too():
    async def agent(seen, models):
        model = models["solver"]
        async with anthropic.AsyncAnthropic(base_url=model.base_url, api_key=model.api_key) as client:
            await client.messages.create(model=model.name, messages=USER, max_tokens=9)
            seen.append([found.id async for found in client.models.list()])

    played = play(agent, ["4"], actors=("solver", "checker"))
    assert len(played.steps) == 1
    assert played.seen == [["solver", "checker"]]


def test_synchronous_agent_runs_in_a_thread():
    def agent(seen, models):
        model = models["solver"]
        with anthropic.Anthropic(base_url=model.anthropic_base_url, api_key=model.api_key) as client:
            seen.append(client.messages.create(model=model.name, messages=USER, max_tokens=9))

    assert play(agent, ["4"]).seen[0].content[0].text == "4"


CASES = answers_of_a_model(TOOL, "max_tokens") | {"stop": (["It is 4. Or 5."], {"stop_sequences": ["."]})}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_answer_equals_plain_answer(case, family):
    script, options = CASES[case]

    async def agent(seen, models):
        seen.append(await ask(models["solver"], **options))
        seen.append(await streamed(models["solver"], **options))

    played = play(agent, script, family=family)
    # The SDK's stream adds what it parsed, and ids of calls differ.
    plain, stream = (dumped(answer, "parsed_output") for answer in played.seen)
    assert plain == stream
    assert len(played.steps) == 2
    expected = {"cut": "max_tokens", "stop": "stop_sequence"}.get(
        case, "tool_use" if "tools" in options else "end_turn"
    )
    assert played.seen[0].stop_reason == ("end_turn" if case == "bad call" else expected)


def test_stop_sequence_is_named():
    async def agent(seen, models):
        seen.append(await ask(models["solver"], stop_sequences=["never", "4"]))

    played = play(agent, ["It is 4. Or 5."])
    answer = played.seen[0]
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "4", "It is ")
    assert played.text(played.steps[0].completion_token_ids) == "It is 4"


@pytest.mark.parametrize("asked", [ask, streamed])
@pytest.mark.parametrize("family", FAMILIES)
def test_tools_over_several_rounds_extend_the_sampled_tokens(asked, family):
    async def agent(seen, models):
        messages = [*USER]
        while True:
            answer = await asked(models["solver"], messages, tools=[TOOL], system="Be brief.")
            seen.append(answer)
            messages.append({"role": "assistant", "content": blocks_of(answer)})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})

    more = call_of("add", '{"a": 4, "b": 1}')
    played = play(agent, [SUM, f"Once more.\n{SUM}{more}", "4, 4 and 5."], family=family)
    assert [answer.stop_reason for answer in played.seen] == ["tool_use", "tool_use", "end_turn"]
    assert [[block.type for block in answer.content] for answer in played.seen] == [
        ["tool_use"],
        ["text", "tool_use", "tool_use"],
        ["text"],
    ]
    for before, after in zip(played.steps, played.steps[1:], strict=False):
        stream = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(stream)] == stream
    assert "Be brief." in played.text(played.steps[0].prompt_token_ids)
    assert [step.turn for step in played.steps] == [0, 1, 2]
    assert played.metrics["gateway/extended_rows/solver"] == 2
    assert played.metrics["gateway/rewritten_rows/solver"] == 0


@needs_qwen3
def test_thinking_is_a_block_and_stays_in_the_context():
    async def agent(seen, models):
        answer = await ask(models["solver"])
        seen.append(answer)
        again = [*USER, {"role": "assistant", "content": blocks_of(answer)}, {"role": "user", "content": "Sure?"}]
        await ask(models["solver"], again)

    played = play(agent, ["<think>\nhm\n</think>\n\nIt is 4."], family="qwen3")
    thinking, text = played.seen[0].content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm", "It is 4.")
    stream = played.steps[0].prompt_token_ids + played.steps[0].completion_token_ids
    assert played.steps[1].prompt_token_ids[: len(stream)] == stream


def test_system_blocks_and_parallel_calls_off():
    system = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]

    async def agent(seen, models):
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        seen.append(await ask(models["solver"], system=system, tools=[TOOL], tool_choice=choice))
        seen.append(await ask(models["solver"], system=system, tools=[TOOL], tool_choice={"type": "none"}))

    played = play(agent, [SUM + SUM])
    assert "Be brief.<|im_end|>" in played.text(played.steps[0].prompt_token_ids)
    assert [block.type for block in played.seen[0].content] == ["text", "tool_use"]
    assert [block.type for block in played.seen[1].content] == ["text"]


def test_length_limit_of_the_actor():
    async def agent(seen, models):
        seen.append(await ask(models["solver"], max_tokens=500))

    played = play(agent, ["0123456789" * 9], actors=[Actor("solver", max_tokens=20)])
    assert played.seen[0].stop_reason == "max_tokens"
    assert played.seen[0].usage.output_tokens == 20
    assert played.metrics["gateway/max_tokens_lowered/solver"] == 1
