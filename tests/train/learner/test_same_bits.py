"""A short run in one process ends with the same bits as it always did, and as a loop that is written out here.

Float sums depend on the instructions that a library picks at run time. So the runs of the first test are in a process
that pins them: turnwise's kernels and torch's to their baselines, MKL's to its compatible ones. Processors still differ
in the last bits, so known digests are keyed by the processor and torch's release; the test is skipped, naming the key
and the digests, where they are not known.
After a change that is *meant* to change the numbers, run this file as a script, with PINNED in the environment, and
replace the digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.run.build import train_from_config
from turnwise.train import Policy
from turnwise.train.loss_terms import keep_their_rows
from turnwise.train.update.update import update_policy
from turnwise.train.validate import config_from_dict

PINNED = {
    "OMP_NUM_THREADS": "1",
    "TURNWISE_ISA": "baseline",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "HF_HUB_OFFLINE": "1",
}
COMMON: dict[str, Any] = {
    "steps": 3,
    "threads": 1,
    "device": "cpu",
    "health": {"start_questions": 0},
    "warm_start": {"steps": 3, "batch_size": 8},
    "rollout": {"prompts_per_step": 2, "branches": 2},
    "credit": {"rule": "rae"},
    "eval": {"num_prompts": 2},
    "checkpoint": {"every": 2, "keep_last": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"update": {"lr": 1e-3, "num_minibatches": 2, "ppo_epochs": 2}, "loss": {"kl": {"coef": 0.1}}},
    "lora": {
        "policy_sharing": "lora_per_actor",
        "update": {"lr": 1e-3, "old_logprobs": "recompute"},
        "loss": {"kl": {"coef": 0.1, "apply_to": "reward", "target": 0.01}},
    },
}
KNOWN: dict[str, dict[str, str]] = {
    "Intel(R) Xeon(R) Processor, family 6 model 167, torch 2.13.0": {
        "full": "0a7af6db1388782e", "lora": "50204eeac13bb8ee",
    },
}  # fmt: skip
"""Digests of the final weights of each case. What changed them last, by a bisection of all commits since 2026-11-28:
updates that compute the head and the loss in one, MKL's products with one buffer for all logits, fused norms."""


def key() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    cpu = f"{facts.get('model name', platform.machine())}, family {facts.get('cpu family')} model {facts.get('model')}"
    return f"{cpu}, torch {torch.__version__.partition('+')[0]}"


def digest(policies: Mapping[str, Policy]) -> str:
    """Return the first 16 digits of the SHA-256 over names and bytes of all weights."""
    found = hashlib.sha256()
    for policy in policies.values():
        for name, tensor in policy.weights():
            found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.mark.slow
def test_a_run_ends_with_the_bits_of_the_commits_before() -> None:
    done = subprocess.run(
        [sys.executable, "-P", __file__], env={**os.environ, **PINNED}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if key() not in KNOWN:
        pytest.skip(f"no digests are known for {key()!r}; here they are {found}")
    assert found == KNOWN[key()]


def test_a_run_equals_the_loop_written_out(make_trainer) -> None:
    """Runs everywhere: the loop of a trainer adds nothing to sampling, credit and updates."""
    changes = {"loss": {"kl": {"coef": 0.1}}, "with_reference": True}
    run, other = make_trainer("run", 3, **changes), make_trainer("other", 3, **changes)
    asyncio.run(run.run())

    async def train() -> None:
        arena, config = other.arena, other.config
        keep_their_rows(other)
        for _ in range(config.steps):
            batch = arena.assign_credit_and_pack(await arena.sample())
            for policy in other.policies.values():
                if update_policy(policy, batch, config.update, config.loss, other.rng).get("updates"):
                    policy.version += 1
                arena.client.load_weights(policy.name, policy.weights(), policy.version)

    before = digest(other.policies)
    asyncio.run(train())
    assert digest(run.policies) == digest(other.policies) != before


def main() -> None:
    found = {}
    for name, changes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = train_from_config(config_from_dict({**COMMON, **changes, "run_dir": folder}))
            found[name] = digest(run.trainer.policies)
            updates = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            trained = [row for row in updates if any(k.endswith("updates") and v for k, v in row.items())]
            assert len(trained) == COMMON["steps"], "a run that trains nothing shows nothing"
            run.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
