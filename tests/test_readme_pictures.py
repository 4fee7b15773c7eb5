"""``scripts/readme_pictures.py`` draws the numbers of a run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]


def step(actor: str, node: int, branch: int, reward: float, advantage: float, selected: bool) -> dict:
    return {
        "actor_id": actor, "turn": 0, "tree_node": node, "branch": branch, "completion": f"<{actor} {branch}>",
        "reward": reward, "advantage": advantage, "selected": selected,
        "prompt": [{"role": "user", "content": "1_\n_2"}],
    }  # fmt: skip


def write_run(folder: Path) -> None:
    """Two validations and one tree of two actors with two branches each; the last line is half written."""
    steps = [
        step("ann", 1, 0, 0.25, -1, False), step("ann", 1, 1, 0.75, 1, True),
        step("bob", 2, 0, 1.0, 1, True), step("bob", 2, 1, 0.5, -1, False),
    ]  # fmt: skip
    rollout = {"step": 3, "id": "e7", "episode_type": "game", "steps": steps}
    (folder / "rollouts.jsonl").write_text(json.dumps(rollout) + '\n{"step": 4,', encoding="utf-8")
    metrics = [
        {"step": 0, "validation": 0.125, "total_sampled_tokens": 0},
        {"step": 1, "loss": 0.5, "total_sampled_tokens": 1000},
        {"step": 2, "validation": 0.875, "total_sampled_tokens": 2000},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")


def draw(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "readme_pictures.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def texts(path: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_hold_the_numbers_of_the_run(tmp_path: Path, theme: str) -> None:
    write_run(tmp_path)
    done = draw(tmp_path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    curve, tree = texts(tmp_path / "out" / f"curve-{theme}.svg"), texts(tmp_path / "out" / f"tree-{theme}.svg")
    assert {"12.5%", "87.5%", "2k", "sampled tokens"} <= set(curve)
    assert {"0.25", "0.75 ★", "1.00 ★", "0.50"} <= set(tree)
    assert [name for name in tree if name.startswith("ann,")] == ["ann, turn 1"]
    assert "1·" in tree and "<ann 1" in tree and ">" in tree  # the question, and the text of an answer


def test_unknown_episode_names_those_there_are(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = draw(tmp_path, tmp_path / "out", "--episode", "e9")
    assert done.returncode != 0 and "e9" in done.stderr and "e7" in done.stderr
    assert not (tmp_path / "out").exists()
