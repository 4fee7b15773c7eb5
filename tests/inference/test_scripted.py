from __future__ import annotations

import asyncio

import pytest

from turnwise.inference import Reply, ScriptedClient
from turnwise.inference.common.base import stop_check
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import ModelError, ModelRequest, Sampling

TOKENIZER = ByteTokenizer()


def ask(text: str = "?", **sampling: object) -> ModelRequest:
    return ModelRequest(TOKENIZER.encode(text), Sampling(**sampling))  # type: ignore[arg-type]


async def test_a_sequence_is_played_in_order_and_recorded() -> None:
    client = ScriptedClient(["one", [50, 51], Reply("three", finish_reason="abort")])
    first, second = await client.generate([ask("a"), ask("b")])
    [third] = await client.generate([ask("c")])
    assert [first.text, second.text, third.text] == ["one", "23", "three"]
    assert [first.finish_reason, second.finish_reason, third.finish_reason] == ["stop", "length", "abort"]
    assert first.completion_token_ids == [*b"one", 256]
    assert [bytes(call.prompt_token_ids) for call in client.calls] == [b"a", b"b", b"c"]
    with pytest.raises(ModelError, match=r"3 lines and this is request 4"):
        await client.generate([ask("d")])


async def test_a_mapping_answers_by_the_prompt() -> None:
    client = ScriptedClient({"capital": "Paris", tuple(b"2+2"): "4"})
    responses = await client.generate([ask("2+2"), ask("the capital of France")])
    assert [response.text for response in responses] == ["4", "Paris"]
    with pytest.raises(ModelError, match="no line for the prompt 'weather'"):
        await client.generate([ask("weather")])


async def test_functions_sync_and_async() -> None:
    async def later(request: ModelRequest) -> str:
        await asyncio.sleep(0)
        return "later"

    assert (await ScriptedClient(lambda request: str(request.sampling.seed)).generate([ask(seed=3)]))[0].text == "3"
    assert (await ScriptedClient(later).generate([ask()]))[0].text == "later"


async def test_given_logprobs_follow_the_cut() -> None:
    client = ScriptedClient([Reply(token_ids=(5, 6, 7), logprobs=(-0.1, -0.2, -0.3))] * 2)
    full, cut = await client.generate([ask(), ask(stop_token_ids=(6,))])
    assert full.logprobs == [-0.1, -0.2, -0.3]
    assert (cut.completion_token_ids, cut.logprobs, cut.finish_reason) == ([5, 6], [-0.1, -0.2], "stop")


@pytest.mark.parametrize(
    ("prompt", "said", "sampled"),
    [
        ("?", "a STOP b", "a STOP"),
        ("?", "<think>a STOP b</think>c STOP d", "<think>a STOP b</think>c STOP"),
        ("? <think>", "a STOP b</think>c STOP d", "a STOP b</think>c STOP"),
        ("?", "<think>a STOP</think>\n\nc", "<think>a STOP</think>\n\nc"),
        ("?", "<think>a STOP", "<think>a STOP"),
        ("?", '<tool_call>{"a": "STOP"}</tool_call>b STOP c', '<tool_call>{"a": "STOP"}</tool_call>b STOP'),
        ("?", '<tool_call>{"a": "STOP', '<tool_call>{"a": "STOP'),
    ],
)
async def test_stop_strings_end_the_answer_and_not_a_thought_or_a_call(prompt: str, said: str, sampled: str) -> None:
    """The rule is that of ``stop_check``, by which all clients stop."""
    [response] = await ScriptedClient([said]).generate([ask(prompt, stop=("STOP",))])
    assert response.text == sampled and response.finish_reason == "stop"


def test_a_long_completion_with_many_stop_strings_in_thoughts_is_not_read_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = ByteTokenizer()
    stopped = stop_check(Sampling(stop=("STOP",)), tokenizer, [])
    ids = list(tokenizer.encode("<think>a STOP </think>b " * 60))
    assert stopped is not None
    decode, read = tokenizer.decode, 0

    def counted(given: list[int], **options: bool) -> str:
        nonlocal read
        read += len(given)
        return str(decode(given, **options))

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert not any(stopped(ids[:end]) for end in range(1, len(ids) + 1))
    assert read < 100 * len(ids)
    assert [stopped([*ids, *tokenizer.encode("STOP"[:end])]) for end in range(1, 5)] == [False, False, False, True]


async def test_failing_and_hanging_on_demand() -> None:
    client = ScriptedClient([RuntimeError("boom"), Reply("never", delay=float("inf")), "fine"])
    with pytest.raises(RuntimeError, match="boom"):
        await client.generate([ask()])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.generate([ask()]), 0.01)
    assert (await client.generate([ask()]))[0].text == "fine"


async def test_weights_are_noted() -> None:
    client = ScriptedClient(["x"])
    client.load_weights("default", [("a", 0), ("b", 0)], 4)
    assert client.loads == [("default", ["a", "b"], 4)]
    assert (await client.generate([ask()]))[0].policy_versions == [(2, 4)]


def test_bad_scripts() -> None:
    with pytest.raises(TypeError, match="not one text"):
        ScriptedClient("hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of the two"):
        Reply()
    with pytest.raises(ValueError, match="one for each of 2"):
        Reply(token_ids=(1, 2), logprobs=(0.0,))


def test_byte_tokenizer() -> None:
    assert TOKENIZER.decode([*"né".encode(), 256]) == "né"
    assert TOKENIZER.decode([65, 256, 299], skip_special_tokens=False) == "A<eos>\ufffd"
    chat = [{"role": "user", "content": "hi"}]
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == "user: hi\nassistant: "
    assert TOKENIZER.apply_chat_template(chat, return_dict=True) == {"input_ids": list(b"user: hi\nassistant: ")}
    called = {"name": "add", "arguments": {"a": 1}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": called}]},
        {"role": "tool", "content": "2"},
    ]
    assert TOKENIZER.apply_chat_template(asked, tokenize=False, tools=tools) == (
        'tools: {"type": "function", "function": {"name": "add"}}\n'
        'assistant: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\ntool: 2\nassistant: '
    )
    with pytest.raises(TypeError, match="colour"):
        TOKENIZER.apply_chat_template(chat, colour="blue")
