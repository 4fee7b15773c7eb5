"""The task with a tool: its table, its questions, both players, demonstrations as calls are rendered, and learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.chat.formats import ChatFormat
from turnwise.tasks import build_task
from turnwise.tasks.lookup import LOOK_UP, LookupQuestion, LookupTable
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.update.sft_data import fitting
from turnwise.train.update.sft_rows import SFTRow


def test_a_table() -> None:
    table = LookupTable(5813)
    assert table.rows[0][0] == "Ann" and len(table.rows) == 20
    value = table.look_up("Ben", "pears")
    assert 0 <= int(value) <= 99 and LookupTable(5813).look_up("Ben", "pears") == value
    question = LookupQuestion.parse("5813/Ben/pears/2")
    assert question.text == "How many pears has the friend of Ben?"
    assert table.answer(question) == table.look_up(table.look_up("Ben", "friend"), "pears")


@pytest.mark.parametrize(
    ("name", "column", "problem"),
    [
        ("Zoe", "pears", "no name 'Zoe'"),
        ("Ben", "pears; DROP TABLE people", "no column"),
        ("' OR 1=1 --", "pears", "no name"),
        (None, "pears", "no name"),
        (["Ben"], {"a": 1}, "no column"),
    ],
)
def test_what_is_not_there_is_an_error(name: Any, column: Any, problem: str) -> None:
    with pytest.raises(LookupError, match=problem):
        LookupTable(1).look_up(name, column)


@pytest.mark.parametrize("hops", [1, 2])
async def test_an_answer_needs_a_look_up_per_hop(table: Any, hops: int) -> None:
    task: Any = build_task("lookup", {"hops": hops})
    assert [actor.max_tool_rounds for actor in task.actors] == [hops + 1], "one call may fail"
    for result in await table(task, task.oracle()).play(task.eval_requests("eval", 3)):
        assert len(result.rollout.steps) == hops + 1 and result.rollout.metrics["looked_up/solver"] == hops


def test_demonstrations_are_rendered_as_calls_are() -> None:
    """The first answer's tokens and its result are the beginning of the second prompt."""
    task: Any = build_task("lookup", {"clean": 1.0})
    tokenizer = build_tokenizer(task.texts())
    [actor], shown = task.actors, task.demonstrations(2, 0)
    rows = [SFTRow(messages, text, name, "x") for name, messages, text in shown]
    first, second = fitting(tokenizer, rows, 512, actors=[actor])
    format = ChatFormat(tokenizer)
    assert list(first.prompt_token_ids) == format.prompt_ids(shown[0][1], [LOOK_UP])
    [call] = format.parse(first.completion_token_ids, [LOOK_UP]).good_calls
    assert call.name == "look_up" and len(first.completion_token_ids) <= actor.max_tokens
    asked = shown[1][1]
    stream = format.prompt_ids(asked[:2], [LOOK_UP])
    written = asked[2]["tool_calls"][0]["function"]
    text = f"<tool_call>{json.dumps({'name': written['name'], 'arguments': written['arguments']})}</tool_call>"
    completion = [*tokenizer.encode(text), tokenizer.eos_token_id]
    assert list(second.prompt_token_ids) == format.extend(stream, completion, asked[3:], [LOOK_UP], asked[2])


@pytest.mark.slow
def test_the_tiny_model_learns_what_to_look_up(tmp_path: Path) -> None:
    """In a third of the steps of the example: sampled answers go from about a third right to more than half."""
    from turnwise.run.build import build_run
    from turnwise.train.validate import load_config

    example = Path(__file__).parents[2] / "examples" / "lookup.toml"
    run = build_run(load_config(example, {"run_dir": str(tmp_path), "threads": 1, "steps": 10, "eval.num_prompts": 60}))
    run.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["reward/solver"] for line in lines if "reward/solver" in line]
    assert rates[0] < 0.5 and sum(rates[-3:]) / 3 > rates[0] + 0.15, rates
