"""What the benches share: their options, and methods that can't serve."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from turnwise.ops import BackendUnavailable

Load = Callable[[str], ModuleType]


@pytest.fixture
def common(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With the threads of this process left as they are."""
    module = load("common")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
    return module


def test_what_cannot_serve_is_left_out_aloud(common: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(given: int) -> int:
        raise BackendUnavailable("no GPU here")

    methods = {"one": lambda given: given + 1, ("dense", "two"): absent, "three": lambda given: given + 3}
    assert list(common.served(methods, lambda method: method(1))) == [("one", 2), ("three", 4)]
    assert list(methods) == ["one", "three"]
    assert capsys.readouterr().out == "without dense, two: no GPU here\n"
    with pytest.raises(ZeroDivisionError):
        list(common.served({"one": lambda: 1 // 0}, lambda method: method()))


def chosen(common: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[int], list[str]]:
    monkeypatch.setattr("sys.argv", ["bench", *words])
    options = common.arguments("A bench.", vocabulary=(32, 64), dtype=("float32", "bfloat16"))
    return options.vocabulary, options.dtype


def test_cases_are_chosen_by_name(common: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    everything = ([32, 64], ["float32", "bfloat16"])
    assert chosen(common, monkeypatch) == everything
    assert chosen(common, monkeypatch, "--quick") == everything
    assert chosen(common, monkeypatch, "--vocabulary", "64", "--dtype", "bfloat16") == ([64], ["bfloat16"])
    assert chosen(common, monkeypatch, "--vocabulary", "64", "32") == ([64, 32], ["float32", "bfloat16"])
    wrong = {"invalid choice: 48": ["--vocabulary", "48"], "leave out --dtype": ["--quick", "--dtype", "float32"]}
    for reason, words in wrong.items():
        with pytest.raises(SystemExit):
            chosen(common, monkeypatch, *words)
        assert reason in capsys.readouterr().err


# ---- The gateway bench stops if a gateway recorded wrong tokens or missed a call, and names peers that are missing ---
def test_wrong_and_missing_records_stop_the_bench(load: Load) -> None:
    bench = load("bench_gateway")
    right = [[*prompt, *bench.ANSWER_IDS] for prompt in bench.prompts(2)]
    bench.verify("turnwise", bench.Played(0.0, [1.0] * 4, [right, right]), 2, 2)
    bench.verify("verifiers eval", bench.Played(0.0, [1.0] * 2, [[[], []]]), 1, 2)
    changed = [right[0], [*right[1][:-1], right[1][-1] + 1]]
    for streams, waits in (([changed], 2), ([right[:1]], 2), ([], 2), ([right], 1)):
        with pytest.raises(AssertionError, match="rllm memory"):
            bench.verify("rllm memory", bench.Played(0.0, [1.0] * waits, streams), 1, 2)
    with pytest.raises(AssertionError, match="verifiers train"):
        bench.verify("verifiers train", bench.Played(0.0, [1.0] * 2, [[[], []]]), 1, 2)


def test_missing_peer_is_named_with_its_installation(load: Load) -> None:
    peers = load("gateway_peers")
    absent = peers.Peer("no_such_gateway.server", "no-such-gateway", "pip install no-such-gateway", "", True)
    assert peers.missing(absent) == "pip install no-such-gateway"
    assert peers.version("no-such-gateway") is None
    assert peers.missing(absent._replace(needs="asyncio.events")) is None


# ---- What ``bench_sharded.py`` counts; ``test_run.py`` runs it with one and two ranks --------------------------------
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
