"""Writes a run's records: metrics (one line per step), ``rollouts.jsonl`` (a few episodes per step),
``warnings.jsonl``, ``warm_start.jsonl`` and ``held_out.json``. Also shows the progress bars."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from turnwise.arena.recording.rollouts_jsonl import json_line, plain_result
from turnwise.train.config.schema import TrainConfig
from turnwise.train.eval.evaluate import Evaluation, describe, plain_evaluation
from turnwise.train.log.lines import HELD_OUT, append_lines, keep_steps, newest_lines, read_rows
from turnwise.train.log.progress_bars import ProgressBars, curve_line, summary
from turnwise.train.log.writers import JsonLines, MetricWriter, open_writers
from turnwise.types import ByPolicy, GenerateResult, Tokenizer, Tokenizers
from turnwise.utils import output
from turnwise.utils.files import make_private, replace_text

_FAILED_PER_STEP = 8
"""Most failed episodes of a step that are written in full: enough to see the cause, too few to fill a disk."""


FRESH = ("staleness", 0.0)

_LONGEST = 8
"""Most tokens that one character may span; a longer broken sequence is shown as it is."""


class RunLog:
    """Passes metrics to ``writers``, writes episodes under ``folder``, and shows bars if ``console`` is a terminal.

    It writes ``rollouts_per_step`` episodes of each step in full, of different questions as far as there are, with the
    recording that ``turnwise replay`` plays, and flushes each line. Where no bars are shown, it prints a line per step.
    Without ``writers`` metrics go to ``metrics.jsonl`` only. With a ``tokenizer``, that of all policies or each
    policy's, it also writes each completion token as text.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        *,
        rollouts_per_step: int = 1,
        writers: Sequence[MetricWriter] | None = None,
        tokenizer: Tokenizers | None = None,
        console: Console | None = None,
        progress: bool = True,
    ) -> None:
        self.folder = folder
        self.rollouts_per_step = rollouts_per_step
        self.tokenizer = tokenizer
        self.writers: list[MetricWriter] = [JsonLines(folder / "metrics.jsonl")] if writers is None else list(writers)
        self.progress = progress
        self._printing = ExitStack()
        self.bars = ProgressBars(total_steps, console or output.console(), shown=progress)
        if self.writers:  # else nothing is written
            make_private(folder)

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        """Return the log that ``config.log`` describes, under ``config.run_dir``."""
        config = config.model_copy(update={"run_dir": config.run_dir.absolute()})  # user code may change the folder
        return cls(
            config.run_dir,
            config.steps,
            rollouts_per_step=config.log.rollouts_per_step,
            writers=open_writers(config),
            progress=config.log.progress,
        )

    def open(self) -> None:
        """Open what the writers write to, so that a missing key or a folder that can't be written shows at once."""
        try:
            for writer in self.writers:
                getattr(writer, "open", _nothing)()
        except BaseException as error:
            self.close(error)
            raise

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the writers for the block, and close them if an error leaves it."""
        self.open()
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Close all writers. If one fails, the error is raised, or becomes a note of an ``error`` before it."""
        _call_all([writer.close for writer in self.writers], error)

    def __enter__(self) -> Self:
        self.open()
        self._printing.enter_context(output.safe_output(of_run=True))
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()
        self._printing.close()
        self.close(error)

    def step(self, step: int, metrics: Mapping[str, float], results: Sequence[GenerateResult] = ()) -> None:
        """Record one finished training step. If one record fails, the others are still written, and then it raises."""
        _call_all(
            [
                *(partial(writer.log, step, metrics) for writer in self.writers),
                partial(self._record_episodes, step, results),
            ]
        )
        self.bars.step(step, metrics)
        if self.progress and not self.bars.console.is_terminal:
            # The validation has a line of its own below, and most runs are never stale.
            shown = {name: value for name, value in metrics.items() if name != "validation" and (name, value) != FRESH}
            if line := summary(shown, by_actor=True):
                self.note(f"step {step}: {line}")
        if self.progress and "validation" in metrics:
            self.note(curve_line(step, metrics))

    def _record_episodes(self, step: int, results: Sequence[GenerateResult]) -> None:
        chosen = _of_each_question([r for r in results if r.rollout.error is None])[: self.rollouts_per_step]
        failed = [result for result in results if result.rollout.error is not None][:_FAILED_PER_STEP]
        kept = {id(result) for result in chosen + failed}  # written in order, as sums in credit rules depend on it
        rows = [{"step": step, **plain_result(result)} for result in results if id(result) in kept]
        if self.tokenizer is not None:
            for row in rows:
                _write_tokens(row, ByPolicy.of(self.tokenizer, "tokenizer"))
        append_lines(self.folder / "rollouts.jsonl", rows)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add ``metrics`` to a step that was logged without them, or to step 0, the start."""
        _call_all([partial(getattr(writer, "add", writer.log), step, metrics) for writer in self.writers])
        if self.progress and "validation" in metrics:
            self.note(curve_line(step, metrics))

    def rollouts(self, done: int, total: int) -> None:
        """Show how many episodes of the running batch are finished."""
        self.bars.stage("rollouts", done, total)

    def updates(self, done: int, total: int) -> None:
        """Show how many optimizer updates of the present batch are done."""
        self.bars.stage("updates", done, total)

    def warn(self, step: int, text: str, **facts: Any) -> None:
        """Print a warning about ``step``, and append it to ``warnings.jsonl`` with ``facts``; the report shows it."""
        self.note(f"step {step}: {text}")
        append_lines(self.folder / "warnings.jsonl", [{"step": step, "warning": text, **facts}])

    def warm_start(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the measurements of a warm start so far to ``warm_start.jsonl``, unless no metrics are written."""
        if self.writers:
            replace_text(self.folder / "warm_start.jsonl", "".join(json_line(row) + "\n" for row in rows))

    def held_out(self, step: int, result: Evaluation) -> None:
        """Write the held-out success after ``step`` to ``held_out.json``, and print it."""
        plain = {"step": step, **plain_evaluation(result)}
        replace_text(self.folder / HELD_OUT, json.dumps(plain) + "\n")
        self.note(f"held-out {describe(result)}")
        for name, one in result.by_task.items():
            self.note(f"  {name}: {one.mean:.1%} (95% interval {one.low:.1%}–{one.high:.1%})")

    def note(self, text: str) -> None:
        """Print one line, above the bars if they are shown."""
        self.bars.note(text)

    def rewind(self, step: int, validation: float | None = None) -> int:
        """Drop the records after ``step``, and an incomplete last line, so that each step is written once.

        Returns the number of later steps. ``validation`` is the last one up to ``step``, which the bar shows.
        """
        dropped = takewhile(lambda line: line.row["step"] > step, newest_lines(self.folder / "metrics.jsonl"))
        later = len({line.row["step"] for line in dropped})
        for writer in self.writers:
            writer.rewind(step)
        for name in ("rollouts.jsonl", "warnings.jsonl"):
            keep_steps(self.folder / name, step)
        if any(row["step"] > step for row in read_rows(self.folder / HELD_OUT)):
            (self.folder / HELD_OUT).unlink()
        self.bars.rewind(step, validation)
        return later


def _nothing() -> None: ...


def _of_each_question(results: Sequence[GenerateResult]) -> list[GenerateResult]:
    """Sort ``results``: first one of each question, then a second of each, and so on."""
    seen = Counter[Hashable]()
    rounds = []
    for result in results:
        rounds.append(seen[result.group_id])
        seen[result.group_id] += 1
    return [result for _, result in sorted(zip(rounds, results, strict=True), key=itemgetter(0))]


def _call_all(calls: Sequence[Callable[[], None]], first: BaseException | None = None) -> None:
    """Make all ``calls``, also if one fails. Then the first error is raised, unless there was a ``first`` before."""
    raised = None
    for call in calls:
        try:
            call()
        except Exception as error:
            if first is None:
                first = raised = error
            else:
                first.add_note(f"then the log failed: {type(error).__name__}: {error}")
    if raised is not None:
        raise raised


def _write_tokens(row: dict[str, Any], tokenizers: ByPolicy[Tokenizer]) -> None:
    """Add each completion's tokens as text to ``row`` and to its children."""
    for step in row["steps"]:
        step["completion_tokens"] = token_texts(tokenizers[step["policy"]], step["completion_token_ids"])
    for child in row["children"]:
        _write_tokens(child, tokenizers)


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return one string per token; joined they are the text of all tokens, including special ones.

    A character that spans several tokens (an emoji in a byte-level vocabulary) belongs to the last of them; the others
    are empty. Each token is decoded together with the one before it, as some tokenizers drop a space at the start of a
    text.
    """
    texts: list[str] = []
    before = start = 0
    for end in range(1, len(token_ids) + 1):
        prefix = tokenizer.decode(token_ids[before:start], skip_special_tokens=False)
        text = tokenizer.decode(token_ids[before:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end - start < _LONGEST and end < len(token_ids):
            texts.append("")
            continue
        texts.append(text.removeprefix(prefix))
        before, start = start, end
    return texts
