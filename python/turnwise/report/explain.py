"""One recorded episode of a team, and the advantages that three credit rules give its calls, as text and as a page.

The numbers are computed from the recorded rewards when they are shown. ``assets/explained`` is a part of a run folder:
its config, and three attempts at one puzzle.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path

from turnwise.report.credit import compare_credit, recorded_steps
from turnwise.report.page import asset

EPISODE = "e4"
RULES = {
    "grpo": (
        "GRPO",
        "compares whole attempts. This one earned more than the two others, so all of its calls are reinforced alike, "
        "the proposer's wrong first grid as much as the two beside it that solve the puzzle.",
    ),
    "dr_mas": (
        "Dr. MAS",
        "compares each call with those of the same agent in all attempts. The wrong grid falls a little below the "
        "proposer's mean, and the reviser is reinforced for copying: its other attempts did worse.",
    ),
    "at_grpo": (
        "AT-GRPO",
        "compares each answer with its siblings, the same agent's other answers from the same state. The wrong grid is "
        "discouraged beside two right ones; where all siblings earn the same, there is nothing to learn: 0.",
    ),
}
"""The rules, each with its name and what it does to the episode."""

ABOUT = (
    "4x4 sudoku: a proposer fills in the grid, a reviser may repair it, for two rounds. From each state an agent "
    "writes three answers, and the team plays on from the one marked →. A solved grid earns 2, another one the share "
    "of its rows, columns and boxes that hold. This is one of three attempts that a model made soon after its start."
)


@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """A call of the episode: its answer, whether the team played on from it, its reward, and its advantage by rule."""

    actor: str
    round: int
    answer: str
    selected: bool
    reward: float
    advantages: dict[str, float]


def explained_calls(folder: Path | None = None, episode: str = EPISODE) -> tuple[str, list[ExplainedCall]]:
    """Return the question of the recorded ``episode`` and its calls, with the advantages by :data:`RULES`."""
    with resources.as_file(resources.files("turnwise.report") / "assets" / "explained") as shipped:
        folder = folder or shipped
        [(_, results)] = recorded_steps(folder / "rollouts.jsonl")
        compared = {rule: compare_credit(folder, rule).calls for rule in RULES}
    [rollout] = [result.rollout for result in results if result.rollout.id == episode]
    by_rule = {
        rule: {call.index: call.after for call in of if call.rollout == episode} for rule, of in compared.items()
    }
    calls = [
        ExplainedCall(
            str(step.actor_id),
            step.turn + 1,
            " ".join(step.completion.split()),
            step.selected,
            float(step.reward or 0.0),
            {rule: found[index] for rule, found in by_rule.items()},
        )
        for index, step in enumerate(rollout.steps)
    ]
    puzzle = rollout.artifact["puzzle"]
    return " ".join(puzzle[row : row + 4] for row in range(0, 16, 4)), calls


def _groups(calls: list[ExplainedCall]) -> Iterator[tuple[str, list[ExplainedCall]]]:
    for (round_, actor), siblings in groupby(calls, key=lambda call: (call.round, call.actor)):
        yield f"{actor}, round {round_}", list(siblings)


def explain_as_text(width: int = 100) -> str:
    """Show the episode as a table of text with lines of at most ``width`` characters, and a sentence on each rule."""
    puzzle, calls = explained_calls()
    names = [name for name, _ in RULES.values()]
    lines = [
        *textwrap.wrap(ABOUT, width),
        "",
        f"{f'puzzle  {puzzle}':<34}" + "".join(map("{:>10}".format, ["reward", *names])),
    ]
    for title, siblings in _groups(calls):
        lines.append(title)
        for call in siblings:
            values = f"{call.reward:>10.2f}" + "".join(f"{_signed(value):>10}" for value in call.advantages.values())
            lines.append(f"  {'→' if call.selected else ' '}     {call.answer:<26}{values}")
    lines.append("")
    for name, text in RULES.values():
        lines += textwrap.wrap(text, width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)
    return "\n".join(lines)


def explain_as_page() -> str:
    """Show the same as one HTML file, which needs no network."""
    puzzle, calls = explained_calls()
    rows = []
    for title, siblings in _groups(calls):
        rows.append(f"<tr><th colspan=6>{html.escape(title)}</th></tr>")
        for call in siblings:
            tint = "".join(f"<td class={_tint(value)}>{_signed(value)}</td>" for value in call.advantages.values())
            mark, answer = "→" if call.selected else "", html.escape(call.answer)
            rows.append(f"<tr><td>{mark}</td><td class=mono>{answer}</td><td>{call.reward:.2f}</td>{tint}</tr>")
    heads = "".join(f"<th>{html.escape(name)}</th>" for name, _ in RULES.values())
    told = "".join(f"<p><b>{html.escape(name)}</b> {html.escape(text)}</p>" for name, text in RULES.values())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Who is credited for what · turnwise</title><style>{asset('style.css')}\n{_STYLE}</style>"
        f"<main class=explained><h1>Who is credited for what</h1><p>{html.escape(ABOUT)}</p>"
        f"<p>The puzzle: <span class=mono>{html.escape(puzzle)}</span></p>"
        f"<table><thead><tr><th></th><th>answer</th><th>reward</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
        f"</table>{told}</main></html>\n"
    )


def _signed(value: float) -> str:
    return "0" if abs(value) < 0.005 else f"{value:+.2f}"


def _tint(value: float) -> str:
    return "dim" if abs(value) < 0.005 else "good" if value > 0 else "bad"


_STYLE = """
.explained { max-width: 760px; } .explained p, .explained table { margin: 12px 0; }
.explained table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
.explained td, .explained th { padding: 2px 10px; text-align: right; border-bottom: 1px solid var(--rule); }
.explained td:nth-child(-n+2), .explained th:nth-child(-n+2), .explained th[colspan] { text-align: left; }
.explained .good { color: var(--good); } .explained .bad { color: var(--bad); }
"""
