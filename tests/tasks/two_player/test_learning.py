"""Self-play learns: Kuhn's exploitability falls in the example's own settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnwise.run.build import build_run
from turnwise.train.validate import load_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "kuhn_poker.toml"


@pytest.mark.slow
@pytest.mark.long
def test_self_play_makes_kuhn_poker_less_exploitable(tmp_path):
    """The start plays 30% of an equilibrium's moves, and sees its card; so it is below uniform play (0.458)."""
    changes = {
        "run_dir": str(tmp_path),
        "steps": 20,
        "threads": 1,
        "eval.exploitability_every": 20,
        "eval.num_prompts": 2,
    }
    run = build_run(load_config(EXAMPLE, changes))
    notes = []
    run.trainer.log.note = notes.append
    run.train()
    start, end = (float(found) for note in notes for found in re.findall(r"exploitability (\d\.\d+)", note))
    assert 0.2 < start < 0.42, start
    assert end < start - 0.06, (start, end)
