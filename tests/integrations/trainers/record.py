"""What rLLM and prime-rl, which PyPI does not have, give for fixed inputs. The tests compare with the recorded files.

    git clone https://github.com/rllm-org/rllm && git -C rllm checkout <commit, see the adapter>
    PYTHONPATH=python:rllm python tests/integrations/trainers/record.py rllm
    PYTHONPATH=python:prime-rl/src:prime-rl/packages/prime-rl-configs/src python ...record.py prime_rl

writes ``fixtures/<name>.json``. Both run beside turnwise's test dependencies, with ``jaxtyping`` and ``beartype``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
RULES = {"dr_mas": {}, "grpo": {"singleton": "raw"}, "rloo": {}, "opo": {}, "reinforce_pp": {}, "rae": {"decay": 0.5}}
"""Credit rules with options, by name."""


def rllm_groups(seed):
    """Two tasks with two roles each, groups of different sizes, trajectories of one to three steps."""
    draw = random.Random(seed)
    sizes = {"0:solver": 4, "0:verifier": 3, "1:solver": 5, "1:verifier": 1}
    return {
        name: [
            {"reward": round(draw.random(), 3), "lengths": [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]}
            for _ in range(size)
        ]
        for name, size in sizes.items()
    }


def record_rllm():
    """Run rLLM's own function over two batches with each rule, and keep what it passes and what it writes."""
    from rllm.trainer.algorithms import advantage
    from rllm.trainer.algorithms.config import AlgorithmConfig
    from rllm.types import Step, Trajectory, TrajectoryGroup

    from turnwise.integrations.trainers.rllm import register_credit

    found = []
    for rule, options in RULES.items():
        name = register_credit(rule, **options)
        estimate, calls = advantage.get_rllm_adv_estimator(name), []

        @advantage.register_rllm_adv_estimator(name)
        def keep(rewards, algorithm_config, *, estimate=estimate, calls=calls, **given):
            calls.append([group.group_id for group in given["traj_groups"]])
            assert [group.group_role for group in given["traj_groups"]] == [each.split(":")[1] for each in calls[-1]]
            return estimate(rewards, algorithm_config, **given)

        config = AlgorithmConfig(estimator_map={"solver": name, "verifier": name})
        for seed in range(2):
            batch = rllm_groups(seed)
            groups = [
                TrajectoryGroup(
                    group_id=group_id,
                    trajectories=[
                        Trajectory(
                            name=group_id.split(":")[1],
                            reward=each["reward"],
                            steps=[Step(response_ids=list(range(length))) for length in each["lengths"]],
                        )
                        for each in trajectories
                    ],
                )
                for group_id, trajectories in batch.items()
            ]
            metrics = advantage.collect_reward_and_advantage_from_trajectory_groups(groups, config)
            found.append(
                {
                    "rule": rule,
                    "options": options,
                    "batch": batch,
                    "calls": calls[-2:],
                    "advantages": {
                        group.group_id: [[step.advantage for step in each.steps] for each in group.trajectories]
                        for group in groups
                    },
                    "mean": {role: float(metrics[f"advantage/{role}/mean"]) for role in ("solver", "verifier")},
                }
            )
    return found


def prime_rl_batch(seed):
    """Ragged sequences, some of whose tokens have moved too far, do not train or have no advantage."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in (7, 1, 12, 4):
        sampler = -draw.exponential(0.7, length)
        rows.append(
            {
                "trainer_logprobs": np.minimum(sampler + draw.normal(0, 0.6, length), -1e-3).round(4).tolist(),
                "inference_logprobs": sampler.round(4).tolist(),
                "advantages": draw.choice([-1.2, -0.3, 0.0, 0.5, 1.1], length).tolist(),
                "loss_mask": (draw.random(length) < 0.8).tolist(),
                "rl_weights": draw.choice([0.0, 1.0, 0.5], length).tolist(),
            }
        )
    return rows


def run_prime_rl(rows, config, weighted):
    """Return loss, gradients and metrics of prime-rl's ``compute_loss`` with the loss that ``config`` names."""
    import torch
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    columns = {key: [torch.tensor(row[key]) for row in rows] for key in rows[0]}
    logprobs = [each.requires_grad_() for each in columns["trainer_logprobs"]]
    loss, metrics = compute_loss(
        trainer_logprobs=logprobs,
        inference_logprobs=columns["inference_logprobs"],
        ref_logprobs=None,
        advantages=columns["advantages"],
        loss_mask=columns["loss_mask"],
        rl_weights=columns["rl_weights"] if weighted else None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=setup_rl_loss_fn(config),
        rl_scale=8,
        ce_scale=1,
        ref_kl_scale=1,
    )
    loss.backward()
    # A sequence whose weights are all 0 is not part of the graph.
    gradients = [[0.0] * len(each) if each.grad is None else each.grad.tolist() for each in logprobs]
    return loss.item(), gradients, {key: each.tolist() for key, each in metrics.items()}


def record_prime_rl():
    """Run prime-rl's default loss, at its defaults and with other bounds."""
    from prime_rl.configs.trainer import DefaultLossConfig

    found = []
    for seed in range(3):
        for options in ({}, {"dppo_mask_low": 0.1, "dppo_mask_high": 0.3, "kl_tau": 0.01}):
            for weighted in (False, True):
                rows = prime_rl_batch(seed)
                loss, gradients, metrics = run_prime_rl(rows, DefaultLossConfig(**options), weighted)
                found.append(
                    {"rows": rows, "options": options, "weighted": weighted, "loss": loss, "gradients": gradients}
                    | {"is_masked": metrics["is_masked"]}
                )
    return found


RECORDERS = {"rllm": record_rllm, "prime_rl": record_prime_rl}


def read(name):
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def assert_close(found, expected):
    """Nested lists and dicts are equal, and their floats to 1e-6: instruction sets differ in the last digit."""
    if isinstance(expected, float):
        assert abs(found - expected) <= 1e-6
    elif isinstance(expected, dict | list):
        assert type(found) is type(expected) and len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_close(found[key], expected[key])
    else:
        assert found == expected


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    for wanted in sys.argv[1:]:
        (FIXTURES / f"{wanted}.json").write_text(json.dumps(RECORDERS[wanted]()) + "\n", encoding="utf-8")
