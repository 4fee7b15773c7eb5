"""A feature of :data:`turnwise.train.config.features.FEATURES` is one file and one line: nothing else knows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise
from turnwise.settings.section import Section
from turnwise.train.config import features
from turnwise.train.config.features import FEATURES, with_features

PACKAGE = Path(turnwise.__file__).parent
KNOWN_BY = {
    "columns.observations": "observation_coef|observation_mask|observations/unmatched",
    "baseline": "optimal_token[\"']|group_index|loss\\.baseline",
    "columns.routing_replay": "routing_replay|routing/",
    "columns.sampling_mask": "sampling_mask/|no_sampling_mask|KeptTokens",
}
"""What a file would name that knew the feature."""


def file_of(module: str) -> str:
    return f"train/terms/{module.replace('.', '/')}.py"


def test_no_other_file_knows_a_feature() -> None:
    assert list(KNOWN_BY) == [entry.partition(":")[0] for entry in FEATURES], "KNOWN_BY needs each feature"
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    for module, words in KNOWN_BY.items():
        own = {file_of(module), "train/config/features.py"}
        named = {path for path, text in texts.items() if re.search(words, text)}
        assert named - own == set() and texts["train/config/features.py"].count(module) == 1


def test_two_owners_of_one_key_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Section):
        """A field that the term ``baseline`` has already."""

        baseline: float = 0.0
        """Not the baseline."""

    monkeypatch.setattr(features, "_open", set())
    with pytest.raises(ValueError, match=r"\['Mine', 'BaselineSettings'\] have the fields \['baseline'\]"):
        with_features("loss")(Mine)


REST = """
import os, sys
from pathlib import Path
import torch, transformers.models.qwen3.modeling_qwen3, pydantic  # once for all copies

def train(copy):
    sys.path.insert(0, str(copy))
    import importlib
    for path in sorted((copy / "turnwise" / "train").rglob("*.py")):
        importlib.import_module(".".join(path.relative_to(copy).with_suffix("").parts))
    from turnwise.run.build import train_from_config
    from turnwise.train.validate import config_from_dict
    loss = {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "masks": {"top_entropy": 0.9}}
    settings = {"task": "kuhn_poker", "run_dir": str(copy / "run"), "steps": 1, "task_options": {"max_tokens": 4}}
    settings |= {"rollout": {"prompts_per_step": 4}, "credit": {"rule": "constant"}, "threads": 1}
    run = train_from_config(config_from_dict({**settings, "health": {"start_questions": 0}, "loss": loss}))
    assert run.trainer.progress.step == 1 and run.trainer.policies["default"].updates == 1

for name in sys.argv[1:]:
    if not (child := os.fork()):
        train(Path(name).absolute())
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{name}: {code}")
"""


@pytest.mark.slow
@pytest.mark.representative
def test_a_feature_leaves_with_one_file_and_one_line(tmp_path: Path) -> None:
    """In a copy of the package without them, all of ``train`` imports and a run trains."""
    for module in KNOWN_BY:
        package = tmp_path / module / "turnwise"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so"))
        for library in PACKAGE.glob("*.so"):
            (package / library.name).symlink_to(library)
        lines = package / "train/config/features.py"
        text, count = re.subn(rf'    "{re.escape(module)}:\w+",\n', "", lines.read_text(encoding="utf-8"))
        assert count == 1
        lines.write_text(text, encoding="utf-8")
        (package / file_of(module)).unlink()
    done = subprocess.run(
        [sys.executable, "-c", REST, *KNOWN_BY],
        cwd=tmp_path,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
