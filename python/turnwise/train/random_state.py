"""Every generator that a run may draw from, as JSON: the trainer's own, Python's, numpy's (torch's is a tensor)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def random_state(rng: np.random.Generator) -> dict[str, Any]:
    """The states of ``rng`` and of the global Python and numpy generators, which a user's episodes may draw from."""
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    return {
        "trainer": rng.bit_generator.state,
        "python": random.getstate(),
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
    }


def set_random_state(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Undo :func:`random_state`, also after a round trip through JSON."""
    rng.bit_generator.state = state["trainer"]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
