"""What ails a run, from its files alone, with the recorded episodes that show it best."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.report.rollouts import read_rollouts
from turnwise.report.status import first_line
from turnwise.train.health.diagnose import PATIENCE, Diagnosed, diagnose
from turnwise.utils.files import damage_named

SHOWN = 3
"""Episodes that are shown with each diagnosis."""

_LONGEST = 160
"""Characters of a prompt and of an answer that are shown."""


@dataclass(frozen=True, slots=True)
class ShownCall:
    """One call of a recorded episode: the end of its prompt, and the answer, each as one line."""

    step: int
    episode: str
    actor: str
    prompt: str
    answer: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class ShownDiagnosis:
    """A diagnosis, and the calls that show it best."""

    diagnosis: Diagnosed
    calls: list[ShownCall]


def _of_reward(best: Callable[[float], float]) -> Callable[[Mapping[str, Any], Mapping[str, Any]], float]:
    return lambda episode, step: best(float(episode["rewards"].get(step["actor_id"], 0.0)))


def _function(episode: Mapping[str, Any], step: Mapping[str, Any], sign: int) -> float:
    actor = step["actor_id"]
    return sign * sum(float(value) for name, value in episode["metrics"].items() if name.endswith(f"/{actor}"))


def _unread(episode: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    counts = [
        value
        for name, value in episode["metrics"].items()
        if name.startswith("tool_calls/") and not name.startswith("tool_calls/ok") and name.endswith(step["actor_id"])
    ]
    return float(sum(counts))


BEST: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], float]] = {
    "own-part-falls": lambda episode, step: _function(episode, step, -1),
    "no-payoff": _of_reward(lambda reward: -reward),
    "fell": _of_reward(lambda reward: -reward),
    "cut-answers": lambda episode, step: float(step["finish_reason"] == "length"),
    "unread-calls": _unread,
}
"""How well a call shows a diagnosis; others are shown by the commonest answers."""


def diagnose_run(folder: Path) -> list[ShownDiagnosis]:
    """Diagnose the run in ``folder``. It changes nothing.

    Raises ``ValueError`` for a folder without a run, and for a bad line of its files, which it names.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"run_dir={str(folder)!r}: no run folder, expected one with metrics.jsonl")
    with damage_named(folder):
        found = diagnose(folder).found
        return [ShownDiagnosis(each, _calls(folder, each)) for each in found]


def _calls(folder: Path, found: Diagnosed) -> list[ShownCall]:
    """Return the calls that show a diagnosis best, each of another episode and with another prompt where possible."""
    if not (folder / "rollouts.jsonl").is_file():
        return []
    calls: list[tuple[ShownCall, float]] = []
    answers: dict[str, int] = {}
    for episode in read_rollouts(folder):
        if not found.since <= episode["step"] <= found.step or episode.get("error") is not None:
            continue
        for step in episode["steps"]:
            if step["actor_id"] is None or found.actor not in (None, step["actor_id"]):
                continue
            prompt = step["prompt"][-1]["content"] if len(step["prompt"]) else ""
            shown = ShownCall(
                int(episode["step"]),
                str(episode["id"]),
                str(step["actor_id"]),
                _shown(prompt if isinstance(prompt, str) else json.dumps(prompt)),
                _shown(step["completion"]),
                step["reward"] if step["reward"] is not None else episode["rewards"].get(step["actor_id"]),
            )
            calls.append((shown, BEST[found.name](episode, step) if found.name in BEST else 0.0))
            answers[shown.answer] = answers.get(shown.answer, 0) + 1
    ranked = sorted(calls, key=lambda each: (-each[1], -answers[each[0].answer], each[0].step))
    chosen: dict[tuple[str, str], ShownCall] = {}
    for call, _ in ranked:
        chosen.setdefault((call.prompt, call.actor), call)
    return list(chosen.values())[:SHOWN]


def _shown(text: str) -> str:
    """Return the end of ``text`` as one line without control characters."""
    return first_line(" ".join(text.split())[-_LONGEST:])


def render(shown: list[ShownDiagnosis], folder: Path) -> str:
    """Show each diagnosis of the run in ``folder`` as a line, with its calls below it. Texts of models stand in quotes,
    escaped."""
    if not shown:
        history = diagnose(folder).history
        steps = 0 if history is None else history.steps
        if steps < PATIENCE:
            return f"no diagnosis yet: this run has {steps} of the {PATIENCE} steps that a diagnosis needs"
        return "no diagnosis: the metrics of this run have none of the patterns in docs/diagnosis.md"
    lines = []
    for each in shown:
        lines.append(f"step {each.diagnosis.step}: {each.diagnosis.line}")
        lines += [
            f"    {call.episode} (step {call.step}), {call.actor}: {call.prompt!r} -> {call.answer!r}"
            + ("" if call.reward is None else f", reward {call.reward:.3g}")
            for call in each.calls
        ]
    return "\n".join(lines)


def to_json(shown: list[ShownDiagnosis]) -> str:
    """Return the diagnoses as a JSON list."""
    return json.dumps([{**asdict(each), "line": each.diagnosis.line} for each in shown], indent=1)
