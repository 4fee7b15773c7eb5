"""Draws the learning results: tables into ``results/README.md``, and the curves of its pages.

python bench/learning/report.py            # rewrites both from bench/learning/results
python bench/learning/report.py --check    # fails if a table is not what the results say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from math import isinf
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from cells import RESULTS, read_results  # noqa: E402

from turnwise.train.eval.statistics import paired_difference, wilson  # noqa: E402

ROOT = HERE.parent.parent
PAGES = [ROOT / "docs" / "learning.md", ROOT / "docs" / "real_models.md"]
TABLES = RESULTS / "README.md"
IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(r"(<!-- results: (\S+) against (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A table: ``question``, or ``question/pattern of its settings``, and the contender to compare with."""

IMAGE = re.compile(r"images/learning-(\w+)-(light|dark)\.svg")
"""A picture on a page: the curves of a question."""

Row = dict[str, Any]
Groups = dict[tuple[str, str], list[Row]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    options = parser.parse_args()
    old = TABLES.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda found: found[1] + table(found[2], found[3]) + found[4], old)
    if options.check:
        raise SystemExit(f"{TABLES}: run python bench/learning/report.py" if new != old else 0)
    TABLES.write_text(new, encoding="utf-8")
    for question, theme in dict.fromkeys(IMAGE.findall("".join(page.read_text(encoding="utf-8") for page in PAGES))):
        draw(question, theme)


def groups_of(named: str) -> Groups:
    """Group the rows of a question, or of some of its settings, by setting and contender, in the order of seeds."""
    question, _, settings = named.partition("/")
    groups: Groups = {}
    for row in read_results(RESULTS / f"{question}.jsonl"):
        _, setting, contender, _ = row["cell"].split("/")
        if fnmatch(setting, settings or "*"):
            groups.setdefault((setting, contender), []).append(row)
    return groups


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------
def table(named: str, reference: str) -> str:
    """Return the markdown table of a question, or of some of its settings (``credit/drill-*``).

    Each contender is compared with ``reference`` in its setting.
    """
    groups, question = groups_of(named), named.partition("/")[0]
    if question == "sweep":
        return sweep_table(groups)
    head = ["setting", "contender", "success (95%)", "by seed", f"minus {reference} (95%)", "tokens", "rate", "seconds"]
    swapped = any("swapped" in row for rows in groups.values() for row in rows)
    head += ["roles swapped (95%)", "lost by it (95%)"] if swapped else []
    measured = [column for column in COLUMNS if question in column.questions]
    measured = [column for column in measured if any(column.of(rows, groups) for rows in groups.values())]
    head += [column.name for column in measured]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (setting, contender), rows in groups.items():
        against = groups.get((setting, reference))
        cells = [
            setting,
            contender,
            pooled(rows),
            ", ".join(f"{row['success']:.1%}" for row in rows),
            difference(rows, against) if against and contender != reference else "",
            f"{mean(row['sampled_tokens'] for row in rows):,.0f}",
            f"{rows[0]['learning_rate']:g}" if rows[0]["steps"] else "",
            f"{mean(row['seconds'] for row in rows):.0f}",
        ]
        if swapped:
            after = [{"cell": row["cell"], **row["swapped"]} for row in rows]
            cells += [pooled(after), difference(rows, after)]
        cells += [column.of(rows, groups) for column in measured]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sweep_table(groups: Groups) -> str:
    """Return the markdown table of a sweep: validation at the end by seed, and over the whole curve in the mean."""
    lines = ["| setting | contender | rate | last validation by seed | mean of the curves |", "|" + "---|" * 5]
    for (setting, contender), rows in groups.items():
        over = mean(value for row in rows for _, value in row["curve"][1:])
        last = ", ".join(f"{row['curve'][-1][1]:.1%}" for row in rows)
        who = contender.partition("@")[0]
        lines.append(f"| {setting} | {who} | {rows[0]['learning_rate']:g} | {last} | {over:.1%} |")
    return "\n".join(lines) + "\n"


EQUAL = "(all questions equal)"
"""Stands for an interval where a bootstrap has none."""


def pooled(rows: Sequence[Row]) -> str:
    """Return the mean success over seeds, a number from 0 to 1 in every cell. Its interval is Wilson's over questions,
    which are the same for all seeds. Numbers between 0 and 1 vary less than it allows for."""
    values = [value for row in rows for value in row["values"]]
    if not 0 <= min(values) <= max(values) <= 1:
        raise ValueError(f"{rows[0]['cell']}: success from {min(values)} to {max(values)}: expected 0 to 1")
    share = mean(values)
    low, high = wilson(share, max(len(row["values"]) for row in rows))
    return f"{share:.1%} ({low:.1%} to {high:.1%})"


def difference(rows: Sequence[Row], against: Sequence[Row]) -> str:
    """Return the mean difference between equal questions of equal seeds, with its interval over questions."""
    ours, theirs = ({row["cell"].rpartition("/")[2]: row["values"] for row in side} for side in (rows, against))
    seeds = [seed for seed in ours if seed in theirs]
    first = [value for seed in seeds for value in ours[seed]]
    second = [value for seed in seeds for value in theirs[seed]]
    found = paired_difference(first, second, [i for s in seeds for i in range(len(ours[s]))]).difference
    return f"{found.mean:+.1%} " + (EQUAL if isinf(found.high) else f"({found.low:+.1%} to {found.high:+.1%})")


def tokens_to(row: Row, success: float) -> float | None:
    """Return the sampled tokens at which the validation curve first reaches ``success``; ``None`` if it never does."""
    before: list[float] | None = None
    for point in row["curve"]:
        if point[1] >= success:
            if before is None or point[1] == before[1]:
                return float(point[0])
            return before[0] + (point[0] - before[0]) * (success - before[1]) / (point[1] - before[1])
        before = point
    return None


@dataclass(frozen=True)
class Column:
    """A further column of some questions' tables; ``of`` returns its text for the rows of a contender."""

    name: str
    questions: tuple[str, ...]
    of: Callable[[list[Row], Groups], str]


def to_target(rows: list[Row], groups: Groups) -> str:
    """Return the tokens to nine tenths of what every seed of team + GRPO reaches, and their ratio to its tokens.

    That is its lowest last validation in this setting, so the target is a number of its own per setting. A real model's
    reference is its team, that of ``drawn`` is ``task``, that of ``baselines`` is ``group-mean``, that of ``rules``
    is ``plain``.
    """
    question, setting, *_ = rows[0]["cell"].split("/")
    reference = {"drawn": "task", "real": "team", "baselines": "group-mean", "rules": "plain"}.get(
        question, "team-grpo"
    )
    theirs = groups.get((setting, reference), [])
    if not theirs or not rows[0]["steps"]:
        return ""
    target = 0.9 * min(row["curve"][-1][1] for row in theirs)
    ours = {row["cell"].rpartition("/")[2]: tokens_to(row, target) for row in rows}
    base = {row["cell"].rpartition("/")[2]: tokens_to(row, target) for row in theirs}
    reached = [tokens for tokens in ours.values() if tokens is not None]
    if not reached:
        return f"{target:.0%}: never"
    ratios = [ours[seed] / base[seed] for seed in ours if ours[seed] and base.get(seed)]  # type: ignore[operator]
    ratio = f", {mean(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    never = f", {len(ours) - len(reached)} of {len(ours)} never" if len(reached) < len(ours) else ""
    return f"{target:.0%}: {mean(reached):,.0f}{ratio}{never}"


def spikes(rows: list[Row], _: Groups) -> str:
    """Return the gradient norm's 99th percentile over its median, for each seed."""
    import numpy as np

    norms = [[value for _, value in row["series"]["grad_norm"]] for row in rows]
    return ", ".join(f"{np.percentile(each, 99) / np.median(each):.1f}" for each in norms if each)


def exploitability(rows: list[Row], _: Groups) -> str:
    """Return the first exploitability measured and the last, for each seed. Older rows lack that of the start."""
    found = [row["series"]["exploitability"] for row in rows]
    return ", ".join(f"{each[0][1]:.2f} → {each[-1][1]:.2f}" for each in found if each)


def contribution(rows: list[Row], _: Groups) -> str:
    """Return how much of what it is handed the team's last actor changes, fixes and breaks, in the mean of seeds."""
    found = []
    for row in rows:
        metrics = row.get("metrics", {})
        named = sorted(key.partition("/")[0] for key in metrics if key.endswith("/fixed"))
        if named:
            found.append([metrics[f"{named[-1]}/{name}"] for name in ("fixed", "broken")])
    return " / ".join(f"{mean(column):.1%}" for column in zip(*found, strict=True))


def rewards(rows: list[Row], _: Groups) -> str:
    """Return each reward function by actor at the first and the last step, in the mean of seeds."""
    trained = [row["rewards"] for row in rows if row.get("rewards")]
    ends = {name: [mean(row[name][step] for row in trained) for step in (0, -1)] for name in (trained or [{}])[0]}
    return ", ".join(f"{name} {first:.0%} → {last:.0%}" for name, (first, last) in ends.items())


def by_task(rows: list[Row], groups: Groups) -> str:
    """Return the success of each task, and its difference to a run of that task alone."""
    found = []
    tasks = list(rows[0].get("by_task", ()))
    for place, task in enumerate(tasks):
        each = len(rows[0]["values"]) // len(tasks)
        own = [{**row, "values": row["values"][place * each : (place + 1) * each]} for row in rows]
        sampled = mean(row["tokens_by_task"][task] for row in rows)
        alone = groups.get((task, "alone")) if len(tasks) > 1 else None
        minus = f", minus alone {difference(own, alone)}" if alone and rows[0]["steps"] else ""
        found.append(f"{task} {pooled(own)}, {sampled:,.0f} tokens{minus}")
    return "; ".join(found)


def explained(rows: list[Row], _: Groups) -> str:
    """Return the critic's explained variance in the mean of a run's steps, for each seed."""
    found = [[value for _, value in row["series"].get("explained_variance", ())] for row in rows]
    return ", ".join(f"{mean(each):.2f}" for each in found if each)


def predicted(rows: list[Row], _: Groups) -> str:
    """Return the cross entropy of observations at the first and the last step with any, for each seed."""
    found = [[value for _, value in row["series"].get("loss_observations", ()) if value] for row in rows]
    return ", ".join(f"{each[0]:.1f} → {each[-1]:.1f}" for each in found if each)


def entropies(rows: list[Row], _: Groups) -> str:
    """Return the entropy per token at the first and the last step, in the mean of seeds."""
    found = [[value for _, value in row["series"]["entropy"]] for row in rows if row["series"]["entropy"]]
    return f"{mean(each[0] for each in found):.3f} → {mean(each[-1] for each in found):.3f}" if found else ""


def dropped(rows: list[Row], _: Groups) -> str:
    """Return the share of tokens that a mask drops, in the mean of steps and seeds."""
    found = [row["series"].get(name) for row in rows for name in ("second_moment", "off_policy", "top_entropy")]
    shares = [mean(value for _, value in steps) for steps in found if steps]
    return f"{mean(shares):.2%}" if shares else ""


COLUMNS = (
    Column("tokens to a success, ratio to team-grpo (lowest to highest seed)", ("credit",), to_target),
    Column("tokens to a success, ratio to task (lowest to highest seed)", ("drawn",), to_target),
    Column("tokens to a success, ratio to group-mean (lowest to highest seed)", ("baselines",), to_target),
    Column("tokens to a success, ratio to plain (lowest to highest seed)", ("rules",), to_target),
    Column("entropy, first → last step", ("rules",), entropies),
    Column("tokens dropped", ("rules",), dropped),
    Column("explained variance", ("baselines",), explained),
    Column("cross entropy of observations", ("observations",), predicted),
    Column("tokens to a success, ratio to team (lowest to highest seed)", ("real",), to_target),
    Column("last actor fixes, breaks", ("credit", "real"), contribution),
    Column("by task", ("several",), by_task),
    Column("gradient norm, p99/p50", ("stability",), spikes),
    Column("exploitability", ("rae", "real"), exploitability),
    Column("rewards of the first and the last step", ("real",), rewards),
)


# ---------------------------------------------------------------------------------------------------------------------
# Curves
# ---------------------------------------------------------------------------------------------------------------------
THEMES = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#e6edf3", "#3d444d")}
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#57606a", "#0550ae", "#4d2d00", "#033d8b")


def draw(question: str, theme: str) -> None:
    """Draw validation success over sampled tokens: the mean over seeds, and a band from the lowest to the highest."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    paper, ink, grid = THEMES[theme]
    groups = {key: rows for key, rows in groups_of(question).items() if all(len(row["curve"]) > 1 for row in rows)}
    settings = list(dict.fromkeys(setting for setting, _ in groups))
    if not settings:
        return
    figure = Figure(figsize=(5 * min(3, len(settings)), 3.6 * -(-len(settings) // 3)), layout="constrained")
    figure.set_facecolor(paper)
    axes = figure.subplots(-(-len(settings) // 3), min(3, len(settings)), squeeze=False).flatten().tolist()
    for empty in axes[len(settings) :]:
        empty.set_visible(False)
    colors = dict(zip(dict.fromkeys(contender for _, contender in groups), COLORS, strict=False))
    for axis, setting in zip(axes, settings, strict=False):
        for contender, rows in ((who, rows) for (where, who), rows in groups.items() if where == setting):
            most = min(row["curve"][-1][0] for row in rows)
            tokens = np.linspace(0, most, 40)
            curves = np.array([np.interp(tokens, *zip(*row["curve"], strict=True)) for row in rows])
            axis.plot(tokens / 1000, curves.mean(0), label=contender, color=colors[contender])
            axis.fill_between(tokens / 1000, curves.min(0), curves.max(0), color=colors[contender], alpha=0.15, lw=0)
        axis.set(title=setting, xlabel="sampled tokens, thousands", ylim=(0, 1), facecolor=paper)
        axis.grid(color=grid, lw=0.5)
        axis.legend(frameon=False, labelcolor=ink, fontsize=8)
        for part in (axis.title, axis.xaxis.label, *axis.get_xticklabels(), *axis.get_yticklabels()):
            part.set_color(ink)
        for side in axis.spines.values():
            side.set_color(grid)
    with rc_context({"svg.hashsalt": question}):  # the same rows give the same file
        figure.savefig(IMAGES / f"learning-{question}-{theme}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
