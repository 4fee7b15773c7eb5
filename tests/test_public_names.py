"""What ``import turnwise`` gives, what it costs, and which rooms work without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import turnwise

PUBLIC = [
    "ATGRPOCredit", "Actor", "Arena", "ArtifactStore", "DrMASCredit", "Episode", "EpisodeRequest", "EpisodeState",
    "GRPOCredit", "MultiTurnEpisode", "RAECredit", "Rollout", "Rubric", "SingleTurnEpisode", "State", "Step", "Store",
    "TrainConfig", "Trainer", "TreeSampler", "train",
]  # fmt: skip


def fresh(code: str) -> dict[str, object]:
    """Runs ``code`` in a new interpreter; ``report`` is a dict that it fills."""
    program = "import json, sys, time\nreport = {}\n" + textwrap.dedent(code) + "\nprint(json.dumps(report))"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_public_names_are_exactly_these() -> None:
    assert sorted(turnwise.__all__) == PUBLIC
    assert sorted(name for name in dir(turnwise) if not name.startswith("_")) == PUBLIC
    assert all(getattr(turnwise, name) is not None for name in PUBLIC)
    with pytest.raises(AttributeError, match="Arenas"):
        turnwise.Arenas  # noqa: B018


def test_import_turnwise_is_light_and_quick() -> None:
    code = """
        start = time.perf_counter()
        import turnwise
        report["seconds"] = time.perf_counter() - start
        report["heavy"] = sorted({"torch", "transformers", "triton"} & set(sys.modules))
    """
    reports = [fresh(code) for _ in range(5)]
    assert reports[0]["heavy"] == []
    seconds = [float(str(report["seconds"])) for report in reports]
    assert min(seconds) < 0.3, f"import turnwise took {seconds} s"


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("turnwise.types, turnwise.samples.collect, turnwise.state, turnwise.cli", "torch"),
        ("turnwise.state", "torch numpy"),
        ("turnwise.ops", "pydantic rich safetensors tokenizers transformers"),
    ],
)
def test_rooms_import_without(modules: str, without: str) -> None:
    fresh(f"for name in {without.split()}: sys.modules[name] = None\nimport {modules}")  # None lets an import raise
