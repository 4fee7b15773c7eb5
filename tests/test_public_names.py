"""What ``import turnwise`` gives, what it costs, and which rooms work without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import turnwise

PUBLIC = [
    "ATGRPOCredit",
    "Actor",
    "Arena",
    "ArtifactStore",
    "DrMASCredit",
    "Episode",
    "EpisodeRequest",
    "EpisodeState",
    "GRPOCredit",
    "MultiTurnEpisode",
    "RAECredit",
    "Rollout",
    "Rubric",
    "SingleTurnEpisode",
    "State",
    "Step",
    "Store",
    "TrainConfig",
    "Trainer",
    "TreeSampler",
    "train",
]

THIRD_PARTY = ["pydantic", "rich", "safetensors", "tokenizers", "transformers"]


def fresh(code: str) -> dict[str, object]:
    """Runs ``code`` in a new interpreter; ``report`` is a dict that it fills."""
    program = "import json, sys, time\nreport = {}\n" + textwrap.dedent(code) + "\nprint(json.dumps(report))"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_public_names_are_exactly_these() -> None:
    assert sorted(turnwise.__all__) == PUBLIC
    assert sorted(name for name in dir(turnwise) if not name.startswith("_")) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str) -> None:
    assert getattr(turnwise, name) is not None


def test_other_names_raise() -> None:
    with pytest.raises(AttributeError, match="Arenas"):
        turnwise.Arenas  # noqa: B018


def test_import_turnwise_is_light() -> None:
    report = fresh("import turnwise\nreport['heavy'] = sorted({'torch', 'transformers', 'triton'} & set(sys.modules))")
    assert report["heavy"] == []


def test_import_turnwise_is_quick() -> None:
    code = "start = time.perf_counter()\nimport turnwise\nreport['seconds'] = time.perf_counter() - start"
    seconds = [float(str(fresh(code)["seconds"])) for _ in range(5)]
    assert min(seconds) < 0.3, f"import turnwise took {seconds} s"


@pytest.mark.parametrize("module", ["turnwise.types", "turnwise.samples.collect", "turnwise.state", "turnwise.cli"])
def test_imports_without_torch(module: str) -> None:
    fresh(f"sys.modules['torch'] = None\nimport {module}")  # None makes `import torch` raise


def test_state_needs_nothing() -> None:
    fresh("for name in ('torch', 'numpy'): sys.modules[name] = None\nimport turnwise.state")


def test_ops_need_only_torch_and_numpy() -> None:
    report = fresh(f"for name in {THIRD_PARTY}: sys.modules[name] = None\nimport turnwise.ops")
    assert report == {}
