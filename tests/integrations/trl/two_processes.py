"""Trains with both trainers in each of two processes, and compares their weights: ``test_processes.py`` starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from helpers import OF_TIME, train_once
from trl import GRPOTrainer

from turnwise.integrations.trl import TurnwiseGRPOTrainer

folder, out = map(Path, sys.argv[1:])
settings = {
    "folder": folder, "out": out, "beta": 0.04, "correction": "token_truncate", "per_device_train_batch_size": 2,
    "tools": True, "ddp_backend": "gloo",
}  # fmt: skip
theirs = train_once(GRPOTrainer, **settings)
ours = train_once(TurnwiseGRPOTrainer, **settings)
joined = [torch.cat([w.flatten() for w in run.weights.values()]) for run in (theirs, ours)]
off = float((joined[1] - joined[0]).norm() / joined[0].norm())
logs = [
    [{k: v for k, v in log.items() if "time" not in k and "per_second" not in k} for log in run.logs]
    for run in (theirs, ours)
]
wrong = [
    (name, value, own.get(name))
    for log, own in zip(theirs.logs, ours.logs, strict=True)
    for name, value in log.items()
    if name not in OF_TIME and (name not in own or abs(own[name] - value) > 1e-5 * max(1, abs(value)))
]
if torch.distributed.get_rank() == 0:
    found = {"off": off, "wrong": wrong, "processes": torch.distributed.get_world_size()}
    (out / "found.json").write_text(json.dumps(found))
