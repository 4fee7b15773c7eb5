from __future__ import annotations

import json
import random

import numpy as np
import torch

from turnwise.train.checkpoint.run_state import random_state, seed_generators, set_random_state


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_equal_seeds_draw_equal_numbers():
    for seed in (0, -1, 2**40):
        seed_generators(seed)
        first = draw()
        seed_generators(seed)
        assert draw() == first
    seed_generators(1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    # Comes back through JSON.
    rng = np.random.default_rng(3)
    rng.random(5), random.random(), np.random.randn()
    saved = json.loads(json.dumps(random_state(rng)))
    expected = rng.random(), random.gauss(0, 1), np.random.randn(), np.random.rand()
    set_random_state(rng, saved)
    assert (rng.random(), random.gauss(0, 1), np.random.randn(), np.random.rand()) == expected
