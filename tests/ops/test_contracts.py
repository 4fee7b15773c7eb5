"""What holds for the values of every op: its reference in any layout and type, bits, masks, micro-batches, no tokens.

`table.py` has the ops. On a GPU the layouts run under compute-sanitizer (`bench/gpu_check.py`).
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops
from turnwise.ops import AGGREGATIONS, BackendUnavailable, ImportanceCorrection, loss_normalizer

from .table import (
    CASES,
    DEGENERATE,
    IDS,
    LARGE,
    LONG,
    LOSSES,
    MIDDLE,
    OPS,
    PLAIN,
    RTOL,
    WIDE,
    Case,
    Run,
    Size,
    draw,
    expected,
    laid_out,
    outcome,
    packed,
    results,
    runs,
)

EVERY = CASES | PLAIN
CPU = SimpleNamespace(on=lambda given: given)
TOKENS = ("BT", "N")  # axes of what a mask hides
MASKED = {name: case for name, case in CASES.items() if "mask" in case.axes}
TWINS = [name for name, case in EVERY.items() if "mask" in case.axes and f"{name}, packed" in EVERY]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Within ``tolerance`` of each value, and of the largest of its tensor."""
    for i, (have, wanted) in enumerate(zip(got, want, strict=True)):
        largest = wanted.double().abs().max().item() if wanted.numel() else 0.0
        bound = {"rtol": tolerance, "atol": tolerance * max(largest, 0.1)}
        torch.testing.assert_close(
            have.cpu().double(), wanted.double(), **bound, msg=lambda text, i=i: f"result {i}: {text}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and types
# ---------------------------------------------------------------------------------------------------------------------
def compare(case: Case, target: Any, size: Size, run: Run) -> None:
    laid = laid_out(case, size, run)
    wanted = expected(case, laid)
    buffers = {name: stream.buffer.to(target.device) for name, stream in laid.items()}
    leaves = [buffers[name].requires_grad_() for name in case.leaves]
    views = {name: stream._replace(buffer=buffers[name]).view() for name, stream in laid.items()}
    got = results(case, views, leaves, backend=target.backend)
    layouts = {name: (tuple(view.shape), view.stride(), view.dtype) for name, view in views.items()}
    for i, (have, (want, tolerance)) in enumerate(zip(got, wanted, strict=True)):
        bound = {"rtol": RTOL[have.dtype], "atol": tolerance}
        torch.testing.assert_close(
            have.cpu(), want, **bound, msg=lambda text, i=i: f"result {i}: {text}\n{layouts}"
        )  # fmt: skip


@pytest.mark.parametrize("layouts", ["one", "others"])  # CI runs one on what is slow
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_layout(target: Any, name: str, layouts: str) -> None:
    case = CASES[name]
    size = LONG if target.quick and case.size in (LARGE, MIDDLE) else case.size
    chosen = list(runs(steps=range(2) if target.quick else [1]))
    first = 3 + list(CASES).index(name) % 5
    if target.interpreted:  # a third of them, another one for the next op
        chosen = chosen[first % 3 :: 3]
    one = chosen.pop(first % len(chosen))
    for run in [one] if layouts == "one" else chosen:
        compare(case, target, size, run)


@pytest.mark.parametrize("name", CASES)
def test_nor_where_there_is_one_row_or_column_or_none(target: Any, name: str) -> None:
    for i, size in enumerate(DEGENERATE):
        for index in range(0, len(WIDE), 2) if target.quick else [2 * i]:
            compare(CASES[name], target, size, Run(index, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in OPS if not name.startswith("linear")])
def test_narrow_floats(target: Any, name: str, dtype: torch.dtype) -> None:
    """Against float64 of the same numbers; gradients have the type of what they are of. Heads round logits too: see
    their own tests."""
    given = draw(CASES[name], dtype=dtype)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    got = outcome(CASES[name], target.on(given), backend=target.backend)
    assert all(grad.dtype == dtype for grad in got[len(got) - len(CASES[name].leaves) :])
    assert_close(got, outcome(CASES[name], exact, backend="torch"), RTOL[dtype])


@pytest.mark.parametrize("name", [name for name in OPS if name != "group_advantage"])  # whose kernels read it
def test_float64_is_the_references(name: str) -> None:
    given = draw(CASES[name], dtype=torch.float64)
    got, reference = (outcome(CASES[name], given, **chosen) for chosen in ({}, {"backend": "torch"}))
    assert same(got, reference) and got[-1].dtype == torch.float64
    with pytest.raises(BackendUnavailable, match="is float64"):
        outcome(CASES[name], given, backend="native")


# ---------------------------------------------------------------------------------------------------------------------
# Bits
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_neither_threads_nor_another_run_change_a_bit(name: str) -> None:
    given = draw(CASES[name], CASES[name].many)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(outcome(CASES[name], given, backend="native"))
    finally:
        torch.set_num_threads(before)
    assert all(same(got, found[0]) for got in found[1:])


@pytest.mark.parametrize("name", OPS)
def test_every_run_gives_the_same_bits(target: Any, name: str) -> None:
    given = target.on(draw(CASES[name], seed=1))
    first, again = (outcome(CASES[name], given, backend=target.backend) for _ in range(2))
    assert same(first, again)


@pytest.mark.parametrize("name", ["factorize", *OPS])
def test_eight_threads_at_once(name: str) -> None:
    """Each with a batch of its own, so that memory they share would show."""
    case, start = CASES[name], threading.Barrier(8)
    size = Size(24, 200) if case.many == Size(24, 900) else case.many
    batches = [draw(case, size, seed) for seed in range(8)]
    want = [outcome(case, given, backend="native") for given in batches]
    assert not same(want[0], want[1])

    def work(i: int) -> bool:
        start.wait()
        return all(same(outcome(case, batches[i], backend="native"), want[i]) for _ in range(3))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("name", TWINS)
def test_neither_padding_nor_packing_changes_a_bit(name: str) -> None:
    """Of rows of 0 to all tokens, with holes. Losses do so in every aggregation. Plain PyTorch may round."""
    case, twin = EVERY[name], EVERY[f"{name}, packed"]
    backend = {"backend": "native"} if name in CASES else {}
    given = draw(case, Size(24, 900), dtype=torch.float32 if backend else torch.float64)
    lengths = torch.randint(0, 901, (24,), generator=torch.Generator().manual_seed(0))
    lengths[:2] = torch.tensor([0, 900])
    kept = torch.arange(900) < lengths[:, None]
    given["mask"] &= kept
    if case.leaves:
        given["actor_ids"] = torch.arange(24) % IDS
    tokens = [stream for stream, axes in case.axes.items() if axes == "BT"]
    wide, streams = dict(given), dict(given)
    for stream in tokens:
        filling = 0.0 if stream == "mask" else torch.nan
        wide[stream] = torch.nn.functional.pad(given[stream], (0, 1300), value=filling)
        streams[stream] = given[stream][kept]
    streams["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    norms = {"num_actors": IDS, "max_length": 900, "normalizer": None}
    for aggregation in AGGREGATIONS if case.leaves else [None]:
        options = backend | ({"aggregation": aggregation, **norms} if aggregation else {})
        want = outcome(case, given, **options)
        got = [v[:, :900] if v.dim() == 2 else v for v in outcome(case, wide, **options)]
        one = outcome(twin, streams, **options), [v[kept] if v.dim() == 2 else v for v in want]
        for mine, theirs in ((got, want), one):
            if backend:
                assert same(mine, theirs), aggregation
            else:
                assert_close(mine, theirs, 1e-9)


WRITERS = ("token_returns", "gae", "policy_loss")


@pytest.mark.parametrize("width", [2048, 2056], ids=["rows on lines", "half of them"])
@pytest.mark.parametrize("name", WRITERS)
def test_outputs_that_go_past_the_caches_are_the_same(name: str, width: int) -> None:
    """Large ones do; of a few rows at a time none is large."""
    case = CASES[name]
    given = draw(case, Size(272, width))
    shared = {"normalizer": 1.0} if case.leaves else {}

    def written(streams: dict[str, Tensor]) -> list[Tensor]:
        return [v for v in outcome(case, streams, backend="native", **shared) if v.dim() == 2]

    parts = [written({k: v[i : i + 34] for k, v in given.items()}) for i in range(0, 272, 34)]
    assert same(written(given), [torch.cat(part) for part in zip(*parts, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set(isa: str) -> None:
    """The kernels for lesser processors, in a process of their own: results, and what the CPU's kernels alone do."""
    here = Path(__file__)
    names = ("contracts", "policy_loss", "logprob", "linear_logprob", "token_rewards")
    chosen = (
        "native and (layout or one_row or float64 or definition or loop or banned or nan) or threads or ulp or past"
    )
    command = [sys.executable, "-P", "-m", "pytest", "-qx", "-pno:cacheprovider", "-m", "not slow", "-k", chosen]
    files = [str(here.with_name(f"test_{name}.py")) for name in names]
    environment = {**os.environ, "TURNWISE_ISA": isa}
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------------------------------
def hidden(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """NaN where no token trains, in every stream of floats by token."""
    out = dict(given)
    for name, axes in case.axes.items():
        if axes in TOKENS and given[name].is_floating_point():
            mask = given["mask"]
            out[name] = given[name].masked_fill(~mask, torch.nan)
    return out


def check_masked_tokens(target: Any, case: Case, **backend: str) -> None:
    """They may hold anything. Where all are masked, or there are none, or no rows, every result and metric is 0."""
    given = draw(case)
    want = outcome(case, target.on(given), **backend)
    assert same(outcome(case, target.on(hidden(case, given)), **backend), want)
    for size in (Size(2, 5), Size(3, 0), Size(0, 5)):
        given = draw(case, size)
        given["mask"] = torch.zeros_like(given["mask"])
        for value in outcome(case, target.on(hidden(case, given)), **backend):
            assert not value.any(), size


@pytest.mark.parametrize("name", MASKED)
def test_masked_tokens_count_for_nothing(target: Any, name: str) -> None:
    check_masked_tokens(target, CASES[name], backend=target.backend)


@pytest.mark.parametrize("name", PLAIN)
def test_masked_tokens_count_for_nothing_in_plain_pytorch(name: str) -> None:
    check_masked_tokens(CPU, PLAIN[name])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["policy_loss, all streams", "policy_loss, all streams, packed"])
def test_nan_of_any_stream_reaches_the_loss(target: Any, name: str, level: str) -> None:
    case = CASES[name]
    for stream in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages"):
        given = draw(case)
        place = tuple(given["mask"].nonzero()[0].tolist())
        given[stream][place] = torch.nan
        options = {"correction": ImportanceCorrection(level), "backend": target.backend}
        loss, *rest = outcome(case, target.on(given), **options)
        assert loss.isnan(), stream
        if stream == "logprobs" and target.backend == "native":  # torch's clamp has gradient 0 at NaN
            assert rest[-1][place].isnan()


@pytest.mark.parametrize("name", [name for name in MASKED if "packed" not in name])
def test_masks_of_any_type(target: Any, name: str) -> None:
    """Whatever number stands for True, if it is an integer."""
    case, given = CASES[name], draw(CASES[name])
    want = outcome(case, target.on(given), backend=target.backend)
    numbers = {torch.uint8: 3, torch.int8: -1, torch.int16: 256, torch.int32: -1, torch.int64: 2**40}
    numbers |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), 1)
    for dtype, number in numbers.items():
        mask = given["mask"].to(dtype) * number
        assert same(outcome(case, target.on({**given, "mask": mask}), backend=target.backend), want), dtype


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches
# ---------------------------------------------------------------------------------------------------------------------
def cut(case: Case, given: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """A few rows of a call's streams."""
    tokens = slice(0, 0)
    if "cu_seqlens" in given:
        ends = given["cu_seqlens"][rows.start : rows.stop + 1]
        tokens = slice(int(ends[0]), int(ends[-1]))
    of = {"B": rows, "N": tokens}
    out = {k: given[k][of[axes[0]]] if axes[0] in of else given[k] for k, axes in case.axes.items()}
    return out | ({"cu_seqlens": ends - ends[0]} if "cu_seqlens" in given else {})


SPLITS = {"one row each": [1] * 9, "two": [4, 5], "one of them empty": [2, 0, 6, 1]}


def check_micro_batches(target: Any, case: Case, aggregation: str, sizes: list[int], **backend: str) -> None:
    """Any split gives the same, under the normaliser of the whole."""
    several = len(case.leaves) > 1
    case = case._replace(axes={k: v for k, v in case.axes.items() if k != "normalizer"})
    given = draw(case, Size(9, 3) if several else Size(9, 37), 21)
    layout = {k: given[k] for k in ("mask", "cu_seqlens", "actor_ids") if k in given}
    options = {"aggregation": aggregation, "num_actors": IDS, "max_length": 40}
    call = {**options, **backend, "normalizer": target.on(loss_normalizer(**layout, **options))}
    whole = outcome(case, target.on(given), **call)
    loss, gradients = 0.0, {leaf: [] for leaf in case.leaves}
    for last, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        part = outcome(case, target.on(cut(case, given, slice(last - size, last))), **call)
        loss += part[0].item()
        for leaf, grad in zip(case.leaves, part[len(part) - len(case.leaves) :], strict=True):
            gradients[leaf].append(grad)
    assert loss == pytest.approx(whole[0].item(), rel=1e-5, abs=1e-7)
    close = {"rtol": 1e-5, "atol": 1e-6} if several else {"rtol": 1e-6, "atol": 0}
    for leaf, want in zip(case.leaves, whole[len(whole) - len(case.leaves) :], strict=True):
        by_row = case.axes[leaf][0] in "BN"
        total = torch.cat(gradients[leaf]) if by_row else torch.stack(gradients[leaf]).sum(0)
        torch.testing.assert_close(total, want, **close)


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["policy_loss, all streams", "policy_loss, all streams, packed", "linear_policy_loss"])
def test_micro_batches_add_up(target: Any, name: str, aggregation: str, sizes: str) -> None:
    check_micro_batches(target, CASES[name], aggregation, SPLITS[sizes], backend=target.backend)


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["value_loss", "value_loss, packed", "aggregate"])
def test_micro_batches_add_up_in_plain_pytorch(name: str, aggregation: str, sizes: str) -> None:
    check_micro_batches(CPU, PLAIN[name], aggregation, SPLITS[sizes])


def test_every_op_is_in_the_table() -> None:
    """But what waits for other processes, and what asks for no tensor."""
    functions = {n for n in ops.__all__ if callable(getattr(ops, n)) and not isinstance(getattr(ops, n), type)}
    others = {"available_backends", "backend"} | {name for name in ops.__all__ if "_parallel_" in name}
    assert {name.partition(",")[0] for name in EVERY} == functions - others
    assert {*LOSSES} <= functions and packed({"mask": "BT"}) == {"mask": "N", "cu_seqlens": "C"}
