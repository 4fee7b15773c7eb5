"""What holds in a run of any row: numbers that add up, frozen weights, the same bits after a kill, with and without
evaluations, and on two ranks the numbers of one process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from turnwise.run.checks import tiny_model
from turnwise.train.config.schema import TrainConfig

from .processes import LAST

OF_TIME = re.compile(r"seconds|per_second|memory|/wait|busy|hit_rate|decoded_share|user_code")


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sums(folder: Path) -> Iterator[str]:
    calls: dict[int, int] = {}
    for record in lines_of(folder, "rollouts.jsonl"):
        calls[record["step"]] = calls.get(record["step"], 0) + calls_of(record)
    sampled, trained = 0, [row for row in lines_of(folder, "metrics.jsonl") if "samples" in row]
    if [row["step"] for row in trained] != [1, 2]:
        yield f"metrics of steps {[row['step'] for row in trained]}"
    for row in trained:
        wrong = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if wrong:
            yield f"{wrong[0]} = {row[wrong[0]]}"
        of_actors = sum(value for key, value in row.items() if re.fullmatch(r"samples/[^/]+", key))
        dropped = sum(value for key, value in row.items() if re.fullmatch(r"dropped/[^/]+", key))
        if row["samples"] != of_actors:
            yield f"samples = {row['samples']}, and {of_actors} of actors"
        if row["samples"] + dropped != calls.get(row["step"], 0):
            yield f"{row['samples']} samples and {dropped} dropped, of {calls.get(row['step'], 0)} calls"
        sampled += row["sampled_tokens"]
        if row["total_sampled_tokens"] != sampled:
            yield f"total_sampled_tokens = {row['total_sampled_tokens']}, expected {sampled}"
    said = [(each["step"], each["warning"]) for each in lines_of(folder, "warnings.jsonl")]
    if twice := [one for one in said if said.count(one) > 1]:
        yield f"warned of twice: {twice[0]}"


def calls_of(record: dict[str, Any]) -> int:
    own = sum(step["actor_id"] is not None for step in record["steps"])
    return own + sum(map(calls_of, record["children"]))


def frozen(run: Any, config: TrainConfig) -> Iterator[str]:
    """A policy that does not train has the weights of the start."""
    start = [each.detach() for each in tiny_model(config, run.task)[1].parameters()]
    for name in ("ice", "big"):
        if (policy := run.trainer.policies.get(name)) is not None:
            for weight in policy.model.parameters():
                if not any(weight.shape == each.shape and torch.equal(weight.float().cpu(), each) for each in start):
                    yield f"weights of the frozen policy {name!r} changed"
                    return


def written(folder: Path) -> dict[str, Any]:
    """What a run wrote that no clock changes: weights, optimizers, metrics by step, episodes."""
    found: dict[str, Any] = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in [*folder.glob("policies/*/*.safetensors"), *folder.glob(f"checkpoints/{LAST}/*.safetensors")]
    }
    for row in lines_of(folder, "metrics.jsonl"):
        found |= {f"{row['step']}: {key}": value for key, value in row.items() if not OF_TIME.search(key)}
    return found | {"rollouts": (folder / "rollouts.jsonl").read_bytes()}


def differences(one: dict[str, Any], other: dict[str, Any], name: str) -> Iterator[str]:
    """Say what of :func:`written` is not equal, bit for bit."""
    if different := sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
        yield f"{name} differs in {different[:5]}"


def quiet(config: dict[str, Any]) -> dict[str, Any]:
    """The same training without evaluations, records, signals and checkpoints in between."""
    off: dict[str, Any] = {
        "eval": {"num_prompts": 1},
        "health": {"start_questions": 0},
        "log": {"progress": False, "rollouts_per_step": 0, "record_for_replay": False},
        "checkpoint": {"minutes": 0},
    }
    return config | off


def of_training(watched: Path, unwatched: Path) -> Iterator[str]:
    """What the watched run wrote of its training is what the :func:`quiet` one wrote."""
    one, other = written(watched), written(unwatched)
    other.pop("rollouts")
    yield from differences({key: one.get(key) for key in other}, other, "a run without evaluations and records")


EXACT = re.compile(r"samples|dropped|episodes|tokens|rows|updates$")
OF_A_RANK = "unique_token_share"
"""A metric of the rows that one rank has: fewer of them share a beginning."""


def as_one_process(one: Path, two: Path) -> Iterator[str]:
    """The first step on two ranks has the numbers of the first step of one process."""
    (first, *_), (second, *_) = (lines_of(folder, "metrics.jsonl") for folder in (one, two))
    for key in sorted(first.keys() | second.keys()):
        want, got = first.get(key), second.get(key)
        if OF_TIME.search(key) or key.endswith(OF_A_RANK) or want == got:
            continue
        if not isinstance(want, float) or not isinstance(got, float) or EXACT.search(key):
            yield f"{key} = {got} on two ranks, {want} in one process"
        elif not math.isclose(want, got, rel_tol=1e-2, abs_tol=1e-3):
            yield f"{key} = {got:.6g} on two ranks, {want:.6g} in one process"
