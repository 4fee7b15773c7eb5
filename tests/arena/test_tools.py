"""Actors with tools: schemas, rounds of one turn, results in order, errors as answers, limits, trees and replays."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from turnwise.arena import Arena, BatchFailedError, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.runtime import watch
from turnwise.arena.runtime.tool_rounds import answer_of
from turnwise.chat.tools import by_name, schemas, tool_of
from turnwise.credit import ATGRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.samples.step_metrics import with_zero_counts
from turnwise.types import Actor, EpisodeRequest, GenerateResult, ModelRequest

from ..chat.families import chat_tokenizer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def slow_add(a: int, b: int) -> str:
    """Add two numbers, the larger the later.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0.01 * (10 - a))
    return f"sum {a + b}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Sum(SingleTurnEpisode):
    episode_type = "sum"
    rubric = Rubric([lambda completion: float("4" in completion)])

    def get_prompt(self, artifact: Any) -> str:
        return artifact


def arena_of(script: Any, *tools: Any, episode: Any = None, **options: Any) -> Arena:
    client = ScriptedClient(script, tokenizer=chat_tokenizer("template"))
    arena = Arena(client, ATGRPOCredit())
    arena.add_actor(Actor("solver", "Be brief.", tools=tools, **options))
    arena.add_episode(Sum() if episode is None else episode)
    return arena


def play(arena: Arena, kind: str = "sum") -> GenerateResult:
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest(kind, "2 + 2 = ?")]))
    return result


def prompts(arena: Arena) -> list[str]:
    tokenizer = arena.client.tokenizer  # type: ignore[attr-defined]
    return [tokenizer.decode(request.prompt_token_ids) for request in arena.client.calls]  # type: ignore[attr-defined]


def test_a_call_its_result_and_the_answer() -> None:
    arena = arena_of([call("add", a=2, b=2), "It is 4."], add)
    result = play(arena)
    first, second = result.rollout.steps
    assert (first.turn, first.info["round"], first.facts.tool_calls) == (0, 0, ["ok"])
    assert (second.turn, second.info["round"], second.completion) == (0, 1, "It is 4.")
    assert [message["role"] for message in second.prompt] == ["system", "user", "assistant", "tool"]
    assert second.prompt[-1] == {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "4"}
    stream = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(stream)] == stream, "the second prompt extends the sampled tokens"
    assert '"name": "add"' in prompts(arena)[0], "the schema is in the prompt"
    assert result.rewards == {"solver": 1.0} and all(step.trainable for step in result.rollout.steps)


@pytest.mark.parametrize("tools", [(), (add,)], ids=["plain", "tools"])
def test_system_messages_and_earlier_results_are_shown_alike_with_and_without_tools(tools: tuple[Any, ...]) -> None:
    made = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": n, "b": 1}}}
        for n, name in enumerate("xy")
    ]
    chat = [
        {"role": "developer", "content": "Count."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "0 + 1, 1 + 1"},
        {"role": "assistant", "content": "", "tool_calls": made},
        {"role": "tool", "content": "2", "tool_call_id": "y"},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "system", "content": "Now answer."},
        {"role": "user", "content": "So?"},
    ]
    arena = arena_of(["4"], *tools)
    results = asyncio.run(arena.generate_rollouts([EpisodeRequest("sum", chat)]))
    [step] = results[0].rollout.steps
    shown = arena.tokenizer.decode(step.prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>system\nCount.\n\nBe kind.<|im_end|>" in shown
    assert "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>system\nNow answer." in shown
    wrong = [*chat[:5], *chat[6:]]
    with pytest.raises(BatchFailedError, match=r"tool_calls: no result for \['x'\]"):
        asyncio.run(arena_of(["4"], *tools).generate_rollouts([EpisodeRequest("sum", wrong)]))


def test_calls_of_one_answer_run_together_and_answer_in_their_order() -> None:
    arena = arena_of([call("slow_add", a=1, b=1) + call("slow_add", a=9, b=1), "done"], slow_add)
    steps = play(arena).rollout.steps
    assert [message["content"] for message in steps[1].prompt[-2:]] == ["sum 2", "sum 10"]


def test_errors_are_answers() -> None:
    def fail(text: str) -> str:
        """Fail.

        Args:
            text: What to say.
        """
        raise LookupError(text * 2000)

    arena = arena_of([call("fail", text="no ") + call("add", a=1) + call("add", a=1, b="x"), "done"], fail, add)
    contents = [message["content"] for message in play(arena).rollout.steps[1].prompt[-3:]]
    assert contents[0].startswith("error: LookupError: no no") and len(contents[0]) == 2001
    assert contents[1].startswith("error: TypeError:") and contents[2].startswith("error: TypeError:")


@pytest.mark.parametrize(
    ("written", "status", "told"),
    [
        (
            '{"name": "sum", "arguments": {"a": 2, "b": 2}}',
            "unknown_tool",
            "there is no tool 'sum': expected one of add",
        ),
        ('{"name": "add", "arguments": {"a": 2, "b": 2,}}', "invalid_json", "Expecting property name"),
        (
            '{"name": "add", "a": 2, "b": 2}',
            "malformed_structure",
            "the arguments under the key 'arguments', got the keys a, b",
        ),
        ('{"arguments": {"a": 2, "b": 2}}', "missing_name", "the call names no tool"),
        ("add(2, 2)", "invalid_json", "Expecting value, got 'add(2, 2)</tool_call"),
    ],
)
def test_a_call_that_cannot_be_read_gets_an_error_and_is_counted(
    written: str, status: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_warned", set())
    bad = f"<tool_call>{written}</tool_call>"
    arena = arena_of([f"Sum:{bad}{call('add', a=2, b=2)}", bad, "It is 4."], add)
    with pytest.warns(RuntimeWarning, match=f"tool_calls/{status}/solver") as warned:
        rollout = play(arena).rollout
    first, second, last = rollout.steps
    assert (first.facts.tool_calls, second.facts.tool_calls, last.completion) == (
        [status, "ok"],
        [status],
        "It is 4.",
    )
    error, four = last.prompt[3:5]
    assert error["content"].startswith(f"error: {status}: ") and told in error["content"] and four["content"] == "4"
    assert [message["role"] for message in last.prompt[2:]] == ["assistant", "tool", "tool", "assistant", "tool"]
    assert last.prompt[2]["content"] == "Sum:", "the call is no text beside its result"
    stream = second.prompt_token_ids + second.completion_token_ids
    assert last.prompt_token_ids[: len(stream)] == stream, "the model sees what it wrote"
    assert {name: value for name, value in rollout.metrics.items() if "tool_calls" in name} == {
        "tool_calls/ok/solver": 1.0,
        f"tool_calls/{status}/solver": 2.0,
    }
    assert sum("tool_calls/" in str(one.message) for one in warned) == 1


def test_a_call_that_the_limit_cut_says_so() -> None:
    client = ScriptedClient(["<tool_call>" + "x" * 200, "4"], tokenizer=chat_tokenizer("template"))
    arena = Arena(client, ATGRPOCredit())
    arena.add_actor(Actor("solver", tools=[add], max_tokens=100))
    arena.add_episode(Sum())
    _, last = play(arena).rollout.steps
    assert (
        last.prompt[-1]["content"] == "error: unclosed_block: the call has no end: the answer reached its token limit"
    )


def test_counts_of_tools_are_means_over_the_episodes_with_tools() -> None:
    counted = {"tool_calls/ok/a": 2.0, "tool_calls/invalid_json/a": 1.0}
    assert with_zero_counts([counted, {"tool_calls/ok/a": 0.0}, {}]) == [
        counted,
        {"tool_calls/invalid_json/a": 0.0, "tool_calls/ok/a": 0.0},
        {},
    ]


def test_after_the_last_round_the_actor_answers_without_tools() -> None:
    arena = arena_of(lambda request: call("add", a=1, b=1), add, max_tool_rounds=2)
    steps = play(arena).rollout.steps
    assert [step.info["round"] for step in steps] == [0, 1, 2]
    assert steps[-1].facts.tool_calls is None


async def test_a_tool_has_a_deadline() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    assert (
        await answer_of("hang", hang, Actor("solver", tool_timeout=0.05))
        == "error: TimeoutError: no answer within 0.05 s"
    )
    assert await answer_of("look", lambda: {"a": [1]}, Actor("solver")) == '{"a": [1]}'


def test_schemas() -> None:
    schema = tool_of(add)["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}
    given = {"type": "function", "function": {"name": "look"}}
    assert by_name([add, given]) == {"add": add, "look": None}
    with pytest.raises(ValueError, match="two are called 'add'"):
        by_name([add, add])
    with pytest.raises(ValueError, match="two are called 'look'"):
        by_name([given, given])
    with pytest.raises(TypeError, match="expected a function or a JSON schema"):
        tool_of(3)  # type: ignore[arg-type]


class Color(Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    title: str = ""


@dataclass
class Line:
    ends: list[Point]


def taking(hint: Any) -> Any:
    def show(value):  # type: ignore[no-untyped-def]
        """Show a value.

        Args:
            value: The value.
        """
        return repr(value)

    show.__annotations__ = {"value": hint, "return": str}
    return show


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "title": {"default": "", "type": "string"}}}
POINT |= {"required": ["x"]}


@pytest.mark.parametrize(
    ("hint", "schema", "given", "told"),
    [
        (int, {"type": "integer"}, "2", "2"),
        (int, {"type": "integer"}, 2.5, "error: TypeError: value: Input should be a valid integer, got a number with"),
        (bool, {"type": "boolean"}, "false", "False"),
        (str, {"type": "string"}, 3, "error: TypeError: value: Input should be a valid string, got 3"),
        (Annotated[int, "a count"], {"type": "integer"}, 3, "3"),
        (Annotated[int, Field(ge=1)], {"type": "integer", "minimum": 1}, 0, "error: TypeError: value: Input should be"),
        (int | str | None, {"type": ["integer", "string"], "nullable": True}, None, "None"),
        (Literal["a"], {"type": "string", "enum": ["a"]}, "b", "error: TypeError: value: Input should be 'a', got 'b'"),
        (Color, {"type": "string", "enum": ["red"]}, "red", "<Color.RED: 'red'>"),
        (Color, {"type": "string", "enum": ["red"]}, "blue", "error: TypeError: value: Input should be 'red', got 'bl"),
        (Point, POINT, {"x": "1"}, "Point(x=1, title='')"),
        (Point, POINT, {}, "error: TypeError: value.x: Field required, got {}"),
        (
            Line,
            {"type": "object", "properties": {"ends": {"type": "array", "items": POINT}}, "required": ["ends"]},
            {"ends": [{"x": 1}]},
            "Line(ends=[Point(x=1, title='')])",
        ),
        (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], "{1}"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore:tool 'show' failed")
def test_arguments_have_the_types_of_the_hints(hint: Any, schema: Any, given: Any, told: str, is_async: bool) -> None:
    """Models, dataclasses and Enums were an object of any kind, and the function got what the model wrote."""
    tool = taking(hint)
    if is_async:
        plain = tool

        @functools.wraps(plain)
        async def tool(value):  # type: ignore[no-untyped-def]
            return plain(value)

    assert tool_of(tool)["function"]["parameters"]["properties"]["value"] == {**schema, "description": "The value."}
    result = play(arena_of([call("show", value=given), "4"], tool))
    assert result.rollout.steps[1].prompt[-1]["content"].startswith(told)
    assert (result.rollout.facts.mishaps or {}) == ({"tool_errors/show": 1} if told.startswith("error") else {})


class Nested(BaseModel):
    inner: Nested | None = None


@pytest.mark.parametrize("hint", [Arena, Callable[[int], int], Nested], ids=repr)
def test_a_type_without_a_schema_is_refused_when_the_actor_is_added(hint: Any) -> None:
    with pytest.raises(ValueError, match="tools: show has no schema: "):
        arena_of([], taking(hint))


@dataclass
class Library:
    """Look words up.

    Args:
        word: The word.
    """

    words: dict[str, str]

    def __call__(self, word: str) -> str:
        return self.words[word]

    def find(self, word: str, case: bool = True) -> str:
        """Find a word.

        Args:
            word: The word.
            case: Whether its case counts.
        """
        return self.words[word if case else word.lower()]


def test_partials_methods_and_objects_are_tools_named_by_what_they_wrap() -> None:
    library = Library({"tea": "a drink"})
    tools = [
        partial(add, b=2),
        partial(add, 3),
        partial(partial(add), b=4),
        library.find,
        library,
        partial(library.find, case=False),
    ]
    functions = by_name(tools)
    assert list(functions) == ["add", "add_2", "add_3", "find", "Library", "find_2"]
    found = [schema["function"]["parameters"] for schema in schemas(tools)]
    assert [list(one["properties"]) for one in found] == [["a"], ["b"], ["a"], ["word", "case"], ["word"], ["word"]]
    assert [one.get("required", []) for one in found] == [["a"], ["b"], ["a"], ["word"], ["word"], ["word"]]
    assert schemas([library])[0]["function"]["description"] == "Look words up."
    assert functions["add"](a=5) == 7 and functions["add_2"](b=1) == 4 and functions["find_2"](word="TEA") == "a drink"


def test_a_partial_answers_its_calls() -> None:
    arena = arena_of([call("add_2", a=1), "4"], partial(add, b=2), partial(add, b=3))
    assert play(arena).rollout.rewards == {"solver": 1.0}
    assert "<|im_start|>tool\n4<|im_end|>" in prompts(arena)[1]


def test_a_model_can_not_replace_what_a_partial_binds() -> None:
    arena = arena_of([call("add", a=1, b=5), "4"], partial(add, b=3))
    play(arena)
    assert "error: TypeError: unexpected arguments: b" in prompts(arena)[1]


class Unprintable:
    def __str__(self) -> str:
        raise SystemExit("no text")


class Word(str):
    def isascii(self) -> bool:
        raise RuntimeError("no letters")


LOOP: list[Any] = [1]
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("\ud800 and \ud83d\ude00", "\ufffd and \U0001f600"),
        ({"a": ["\udfff", float("nan")]}, '{"a": ["\ufffd", NaN]}'),
        ("a\0b", "a\0b"),
        (b"caf\xc3\xa9 \xff", "caf\u00e9 \ufffd"),
        (memoryview(b"x"), "x"),
        ([b"x", np.float32(0.5), np.arange(2), {3}], '["x", 0.5, [0, 1], [3]]'),
        (np.str_("word"), "word"),
        (Word("word"), "word"),
        (LOOP, "[1, [...]]"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (Unprintable(), "error: SystemExit: no text"),
        ([Unprintable()], "error: SystemExit: no text"),
        (ValueError("\ud800"), "error: ValueError: \ufffd"),
        ("x" * 3000, "x" * 2000 + "\u2026"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore:tool 'look' failed")
def test_whatever_a_tool_gives_becomes_a_text(given: Any, text: str, is_async: bool) -> None:
    def look() -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    async def late() -> Any:
        return look()

    told = asyncio.run(answer_of("look", late if is_async else look, Actor("solver", max_tool_result=2000)))
    assert told == text and type(told) is str
    steps = play(arena_of([call("look"), "4"], {**LOOK}, episode=Gives(look))).rollout.steps
    assert steps[1].prompt[-1]["content"] == text


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Gives(Sum):
    def __init__(self, look: Any) -> None:
        self.look = look

    def run_tool(self, name: str, arguments: dict[str, Any], state: Any, arena: Any, artifact: Any) -> Any:
        return self.look()


def test_a_tool_without_hints_is_an_error_at_the_start() -> None:
    def bare(a):  # type: ignore[no-untyped-def]
        """Do it."""

    with pytest.raises(ValueError, match="tools: bare has no schema"):
        arena_of([], bare)


class Looks(Sum):
    episode_type = "looks"

    def run_tool(self, name: str, arguments: dict[str, Any], state: Any, arena: Any, artifact: Any) -> Any:
        return f"{name} at {arguments['at']} of {artifact}"


def test_a_schema_is_answered_by_the_episode() -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    steps = play(arena_of([call("look", at="x"), "done"], look, episode=Looks()), "looks").rollout.steps
    assert steps[1].prompt[-1]["content"] == "look at x of 2 + 2 = ?"
    with pytest.raises(BatchFailedError, match=r"override run_tool\(...\) in Sum"):
        play(arena_of([call("look", at="x"), "done"], look))


class Chat(MultiTurnEpisode):
    episode_type = "chat"
    actors = ("solver",)
    max_turns = 2
    rubric = Rubric([lambda state: float(len(state.trajectory))])

    def get_prompt(self, artifact: Any) -> str:
        return artifact

    def step_reward(self, state: Any, arena: Any, artifact: Any) -> float:
        return float(state.last_completion_text.strip("x") or 0)


def test_rounds_of_a_turn_share_its_reward_and_stay_out_of_the_chat() -> None:
    arena = arena_of([call("add", a=2, b=2), "4", "5"], add, episode=Chat())
    steps = play(arena, "chat").rollout.steps
    assert [(step.turn, step.reward) for step in steps] == [(0, 4.0), (0, 4.0), (1, 5.0)]
    assert [(message["role"], message["content"]) for message in steps[2].prompt] == [
        ("system", "Be brief."),
        ("user", "2 + 2 = ?"),
        ("assistant", "4"),
    ]


def test_branches_with_tools_are_siblings_with_all_their_rounds() -> None:
    def script(request: ModelRequest) -> str:
        asked = chat_tokenizer("template").decode(request.prompt_token_ids)
        if "tool\n" in asked:
            return "7"
        return call("add", a=3, b=4) if request.sampling.seed % 2 else "3"  # type: ignore[operator]

    arena = arena_of(script, add, episode=Chat(sampler=TreeSampler(branches=6), max_turns=1))
    result = play(arena, "chat")
    steps = result.rollout.steps
    assert len({step.tree_node for step in steps}) == 1 and steps[0].tree_node is not None
    by_branch: dict[int, list[float | None]] = {}
    for step in steps:
        by_branch.setdefault(step.branch, []).append(step.reward)
    assert len(by_branch) == 6 and {tuple(rewards) for rewards in by_branch.values()} == {(7.0, 7.0), (3.0,)}
    arena.assign_credit([result])
    assert all((step.advantage > 0) == (step.reward == 7.0) for step in steps)  # type: ignore[operator]
