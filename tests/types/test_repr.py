"""A record's ``repr`` has ids and counts, and no contents: asyncio formats the result of a program that it has run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from turnwise.types import (
    EpisodeRequest,
    EpisodeState,
    GenerateResult,
    ModelRequest,
    ModelResponse,
    Rollout,
    Sample,
    Sampling,
    Step,
    TrainingBatch,
)
from turnwise.types.prompts import Prefix
from turnwise.utils.threads import run_in_program, run_to_end

FORMATTED: list[Silent] = []


class Silent(list[Any]):
    """A list that must not be formatted. An error would not do: ``reprlib``, which asyncio uses, ignores it."""

    def __repr__(self) -> str:
        FORMATTED.append(self)
        return "contents"


CHAT, THREE, TWO, LOGPROBS, VERSIONS = Silent(), Silent([1, 17, 9]), Silent([20, 2]), Silent([-0.1, -0.01]), Silent()
STEP = Step("solver", 1, CHAT, "4" * 999, THREE, TWO, LOGPROBS, VERSIONS, "stop", reward=1.0, info={"a": Silent()})
ROLLOUT = Rollout("r-1", "sums", Silent(), [STEP], {"solver": 1.0}, {"a": Silent()}, meta={"a": Silent()})
RESULT = GenerateResult(ROLLOUT, [GenerateResult(ROLLOUT)], [EpisodeRequest("sums", Silent())])
SAMPLE = Sample("q", "sums", "solver", 1, 0, None, "r-1", 3, "default", THREE, TWO, LOGPROBS, VERSIONS, 1.0, 1.0)
ROWS, TOKENS = np.zeros(2), np.zeros(9)
PROMPTS = [Prefix.of_tokens(THREE)] * 2
BATCH = TrainingBatch(
    PROMPTS, THREE, np.array([0, 2, 3]), THREE, THREE, *[ROWS] * 6, ["solver"], ["default"], metrics={"a": Silent()}
)
SHOWN = {
    "<Step of 'solver', turn 1: 3 + 2 tokens, reward 1.0>": STEP,
    "<Rollout 'r-1' of 'sums': 1 steps, rewards {'solver': 1.0}>": ROLLOUT,
    "<Rollout 'r-2' of 'sums': 0 steps, failed>": Rollout("r-2", "sums", Silent(), error="Boom: line 3"),
    "<GenerateResult of <Rollout 'r-1' of 'sums': 1 steps, rewards {'solver': 1.0}>, 1 children>": RESULT,
    "<EpisodeRequest of 'sums': group 'q-5', seed 3>": EpisodeRequest("sums", Silent(), "q-5", 3),
    "<EpisodeState of 'solver', turn 2: 1 steps>": EpisodeState(Silent([STEP]), "solver", 2, Silent()),
    "<Sample 3 of 'r-1', 'solver': 3 + 2 tokens, reward 1.0>": SAMPLE,
    "<TrainingBatch of 2 samples, 9 tokens, actors ['solver']>": BATCH,
    "<ModelRequest to 'default': 3 + at most 8 tokens, seed 3>": ModelRequest(THREE, Sampling(max_tokens=8, seed=3)),
    "<ModelResponse: 3 + 2 tokens, 'stop'>": ModelResponse("4" * 999, TWO, LOGPROBS, "stop", VERSIONS, THREE),
}


@pytest.fixture(autouse=True)
def none_yet() -> None:
    FORMATTED.clear()


@pytest.mark.parametrize("text", SHOWN)
def test_a_record_shows_ids_and_counts(text: str) -> None:
    assert repr(SHOWN[text]) == text and not FORMATTED


def test_the_group_of_a_request_is_cut() -> None:
    assert len(repr(EpisodeRequest("sums", None, ("q" * 10_000, *range(10_000))))) < 120


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a process in the background starts without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("run", [asyncio.run, run_to_end, run_in_program])
def test_a_program_that_returns_results_formats_none(
    run: Callable[[Coroutine[Any, Any, Any]], Any], ctrl_c: None
) -> None:
    """Python's ``signal.getsignal``, by which asyncio puts the handler of Ctrl-C back, formats the handler, and with
    it the program's task and result."""

    async def program() -> list[GenerateResult]:
        return [RESULT]

    assert run(program()) == [RESULT] and not FORMATTED
