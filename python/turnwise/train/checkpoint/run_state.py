"""States of the random generators of a run: the trainer's, Python's and numpy's as JSON, torch's as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, so that equal runs draw equal numbers from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the states of ``rng`` and of the global Python and numpy generators, which a user's episodes may use."""
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    return {
        "trainer": rng.bit_generator.state,
        "python": random.getstate(),
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
    }


def set_random_state(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Restore the state of :func:`random_state`, also after a round trip through JSON."""
    rng.bit_generator.state = state["trainer"]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})


def generator_states() -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and those of all GPUs if this process has used CUDA."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore the states of :func:`generator_states`; skip GPUs that this machine doesn't have."""
    torch.set_rng_state(states["torch"])
    for name in set(states) - {"torch"}:
        if torch.cuda.is_available() and torch.device(name).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(states[name], name)
