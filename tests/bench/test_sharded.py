"""What ``bench_sharded.py`` counts; ``test_run.py`` runs it with one and two ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

Load = Callable[[str], ModuleType]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """One process of four, whose collectives go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_a_rank_sends_three_quarters_of_what_four_gather_or_scatter(load: Load, four_ranks: None) -> None:
    whole, part = torch.zeros(400), torch.zeros(100)
    with load("bench_sharded").Traffic(4) as traffic:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part.bfloat16(), whole.bfloat16())
        dist.all_reduce(part)
    assert traffic.sent == {"gathered": 0.75 * 1600, "scattered": 0.75 * 800, "other": 2 * 0.75 * 400}


def test_the_formula_is_two_gathers_and_one_scatter_in_float32_for_each_pass(load: Load) -> None:
    bench = load("bench_sharded")
    options = argparse.Namespace(device="cpu", model="small", dtype="bfloat16")
    facts = {"parameters": 10**6, "size": 2, "tokens": 600, "passes": 5, "sent": {"gathered": 7e6}}
    runs = [{**facts, "seconds": [2.0, 9.0], "on lo": [3e6, 5e6]}, {**facts, "seconds": [3.0, 3.0], "on lo": [4e6]}]
    got = bench.row(4, runs, options)
    assert (got["gathered, formula"], got["scattered, formula"]) == (2 * 2 * 5 * 0.75, 4 * 5 * 0.75)
    assert (got["gathered MB"], got["scattered MB"], got["MB on lo"]) == (7.0, 0.0, 3.0)
    assert (got["s per step"], got["tokens/s"], got["tokens/s per rank"]) == (3.0, 200.0, 50.0)


def test_ranks_with_another_gradient_stop_the_bench(load: Load, tmp_path: Path) -> None:
    bench, options = load("bench_sharded"), argparse.Namespace(ranks=[1, 2], dtype="float32")
    gradient = torch.linspace(-1, 1, 100)
    torch.save(gradient, tmp_path / "gradient-1.pt")
    torch.save(gradient * (1 + 1e-6), tmp_path / "gradient-2.pt")
    bench.verify(tmp_path, options)
    torch.save(gradient * 2, tmp_path / "gradient-2.pt")
    with pytest.raises(AssertionError, match="2 ranks: the gradient is off by 1 of its norm"):
        bench.verify(tmp_path, options)
