"""The examples of docs/trl.md, which tests/test_documents.py can't run where TRL is not installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")


@pytest.mark.needs("trl")
def test_examples_train(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace: a tiny model instead of the hub's, two steps, on a CPU."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    quick = 'max_steps=2, use_cpu=True, bf16=False, max_completion_length=4, report_to=[], save_strategy="no"'
    names: dict[str, object] = {}
    for block in blocks:
        text = block.replace("Qwen/Qwen3-0.6B", str(model_folder)).replace("max_steps=100", quick)
        exec(compile(text, "docs/trl.md", "exec"), names)
    assert names["trainer"].state.global_step == names["team"].state.global_step == 2
    assert names["team"]._logs["advantages"] and max(map(abs, names["team"]._logs["advantages"])) == 0
