"""Draw the README's pictures from a run folder: the learning curve, and one recorded episode as a tree.

    make demo && .venv/bin/python scripts/readme_pictures.py runs/demo/sudoku/team docs/images

Each picture comes in a light and a dark version. The script needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

THEMES = {
    "light": ("#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#0969da", "#bc4c00"),
    "dark": ("#0d1117", "#e6edf3", "#9198a1", "#3d444d", "#4493f8", "#db6d28"),
}
ROLES = ("paper", "ink", "faint", "grid", "good", "bad")
HEIGHT = 470
HEAD = {"font_weight": "bold", "font_size": "15"}
Rows = Sequence[Mapping[str, Any]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON lines of ``path``, without an unfinished last line."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def svg(width: int, title: str, colors: Mapping[str, str], shapes: Sequence[str]) -> str:
    """Return a picture of ``width`` x ``HEIGHT`` with an opaque background, so that it is legible on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{colors["ink"]}">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{HEIGHT}" rx="8" fill="{colors["paper"]}"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, **attributes: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{extra}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{color}" stroke-width="{width:g}"/>'


# ---------------------------------------------------------------------------------------------------------------------
# The learning curve
# ---------------------------------------------------------------------------------------------------------------------
def draw_curve(metrics: Rows, task: str, colors: Mapping[str, str]) -> str:
    """Draw validation success over sampled tokens."""
    points = [(row["total_sampled_tokens"], row["validation"]) for row in metrics if "validation" in row]
    if len(points) < 2:
        raise SystemExit(
            f"metrics.jsonl has {len(points)} validations: expected 2 or more. Choose a run with eval.every > 0."
        )
    left, top, right, bottom = 52, 64, 400, HEIGHT - 52
    most = max(tokens for tokens, _ in points)
    x = [left + (right - left) * tokens / most for tokens, _ in points]
    y = [bottom - (bottom - top) * success for _, success in points]

    # Title, grid and labels of the axes.
    shapes = [text(20, 30, f"{task}: success on validation questions", **HEAD)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = bottom - (bottom - top) * share
        shapes += [line(left, at, right, at, colors["grid"])]
        shapes += [text(left - 8, at + 4, f"{share:.0%}", text_anchor="end", fill=colors["faint"])]
    for share in (0, 0.5, 1):
        tokens = f"{most * share / 1e6:.2f}M" if most >= 1e6 else f"{most * share / 1e3:.0f}k"
        anchor = {0: "start", 1: "end"}.get(share, "middle")
        shapes += [text(left + (right - left) * share, bottom + 20, tokens, text_anchor=anchor, fill=colors["faint"])]
    shapes += [text((left + right) / 2, bottom + 40, "sampled tokens", text_anchor="middle", fill=colors["faint"])]

    # The curve, with its first and last value.
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
    shapes += [f'<path d="M{path}" fill="none" stroke="{colors["good"]}" stroke-width="3" stroke-linejoin="round"/>']
    shapes += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colors["good"]}"/>' for a, b in zip(x, y, strict=True)]
    for index, anchor, dx in ((0, "start", 10), (-1, "end", 0)):
        below = y[index] + 24 if y[index] + 24 < bottom else y[index] - 12
        label = f"{points[index][1]:.1%}"
        shapes += [text(x[index] + dx, below, label, text_anchor=anchor, **HEAD)]
    return svg(420, f"{task}: validation success over sampled tokens", colors, shapes)


# ---------------------------------------------------------------------------------------------------------------------
# The tree
# ---------------------------------------------------------------------------------------------------------------------
def levels_of(rollout: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return the branches of each action in play order, grouped by the state that they start from."""
    levels: dict[tuple[int, str, int], list[Mapping[str, Any]]] = {}
    for step in rollout["steps"]:
        levels.setdefault((step["turn"], step["actor_id"], step["tree_node"]), []).append(step)
    return list(levels.values())


def is_drawable(rollout: Mapping[str, Any]) -> bool:
    """Return True if several actions branched and each has one selected branch."""
    levels = levels_of(rollout)
    return len(levels) > 1 and all(len(level) > 1 and sum(step["selected"] for step in level) == 1 for level in levels)


def interest(rollout: Mapping[str, Any]) -> tuple[float, int]:
    """Return a sort key: the reward at the end, then the number of distinct rewards over all actions."""
    levels = levels_of(rollout)
    end = max(step["reward"] for step in levels[-1] if step["selected"])
    return end, sum(len({step["reward"] for step in level}) for level in levels)


def draw_tree(rollout: Mapping[str, Any], opening: str, colors: Mapping[str, str]) -> str:
    """Draw one column per action: each box is an answer, coloured by its advantage; a star marks the selected one."""
    levels = levels_of(rollout)[:4]
    widest = max(len(level) for level in levels)
    top, box, column = 84, min(44, (HEIGHT - 100) // widest - 4), 132
    row = (HEIGHT - top - 14) / widest
    middle = top + row * widest / 2

    # Title, legend and the question.
    shapes = [text(20, 26, f"One episode of step {rollout['step']}: each answer with its reward", **HEAD)]
    words = [
        ("★ was played on, ", "faint"),
        ("above", "good"),
        (" or ", "faint"),
        ("below", "bad"),
        (" its siblings' mean", "faint"),
    ]
    spans = "".join(f'<tspan fill="{colors[name]}">{word}</tspan>' for word, name in words)
    shapes += [f'<text x="20" y="46" xml:space="preserve">{spans}</text>']
    shapes += grid_box(20, middle - box / 2, box, opening, colors["faint"], 0)
    # One column per action, with a line to each answer from the selected answer before it.
    source = (20 + box, middle)
    for index, level in enumerate(levels):
        x = 20 + column * (index + 1) - 28
        head = f"{level[0]['actor_id']}, turn {level[0]['turn'] + 1}"
        shapes += [text(x + box / 2, 70, head, text_anchor="middle", fill=colors["faint"])]
        selected = source
        # Each answer has its box, its reward, and the colour of its advantage.
        for place, step in enumerate(level):
            y = middle + (place - (len(level) - 1) / 2) * row
            color = colors["good" if step["advantage"] > 0 else "bad"] if step["advantage"] else colors["faint"]
            shapes += [
                line(*source, x, y, color if step["selected"] else colors["grid"], 2.5 if step["selected"] else 1)
            ]
            shapes += grid_box(x, y - box / 2, box, step["completion"], color, min(abs(step["advantage"]), 2) / 4)
            shapes += [
                text(x + box + 4, y + 4, f"{step['reward']:.2f}" + " ★" * step["selected"], font_size="11", fill=color)
            ]
            if step["selected"]:
                selected = (x + box + 42, y)
        source = selected
    return svg(column * (len(levels) + 1) - 30, f"The branches of episode {rollout['id']}", colors, shapes)


def grid_box(x: float, y: float, size: float, words: str, color: str, opacity: float) -> list[str]:
    """Return a square with the beginning of ``words``, up to four lines, filled with ``color``."""
    lines = [line[at : at + 6] for line in words.splitlines() for at in range(0, len(line), 6)][:4]
    step = size / 4.4
    return [
        f'<rect x="{x:g}" y="{y:.1f}" width="{size}" height="{size}" rx="4" '
        f'fill="{color}" fill-opacity="{opacity:.2f}" stroke="{color}"/>',
        *(
            text(x + size / 2, round(y + step * (n + 0.95), 1), words.replace("_", "·"), text_anchor="middle",
                 font_family="ui-monospace, monospace", font_size=f"{step:.1f}")
            for n, words in enumerate(lines)
        ),
    ]  # fmt: skip


def opening_of(rollout: Mapping[str, Any]) -> str:
    """Return the last message of the first prompt: the question as the first actor saw it."""
    return rollout["steps"][0]["prompt"][-1]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="a run folder, with metrics.jsonl and rollouts.jsonl")
    parser.add_argument("out", type=Path, help="the folder of the pictures")
    parser.add_argument("--episode", help="id of the episode to draw; default: the tree with the best end")
    options = parser.parse_args()

    rollouts = read_lines(options.run_dir / "rollouts.jsonl")
    chosen = [r for r in rollouts if (r["id"] == options.episode if options.episode else is_drawable(r))]
    if not chosen:
        raise SystemExit(f"--episode {options.episode}: no such tree in {options.run_dir}. Name one of "
                         + ", ".join(r["id"] for r in rollouts))  # fmt: skip
    rollout = chosen[0] if options.episode else max(chosen, key=interest)
    metrics = read_lines(options.run_dir / "metrics.jsonl")
    options.out.mkdir(parents=True, exist_ok=True)
    for theme, values in THEMES.items():
        colors = dict(zip(ROLES, values, strict=True))
        curve = draw_curve(metrics, rollout["episode_type"], colors)
        tree = draw_tree(rollout, opening_of(rollout), colors)
        (options.out / f"curve-{theme}.svg").write_text(curve, encoding="utf-8")
        (options.out / f"tree-{theme}.svg").write_text(tree, encoding="utf-8")


if __name__ == "__main__":
    main()
