"""How the LM head cuts its work on a GPU: worked examples, the memory, and what an emulated run really holds."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from turnwise.ops import linear_logprob
from turnwise.ops.common import dispatch
from turnwise.ops.logprob import choice, linear_chunks
from turnwise.ops.logprob.choice import (
    MEMORY,
    Chunks,
    Device,
    Sizes,
    Tiles,
    choose,
    choose_chunks,
    choose_frozen,
    one_pass,
)

A100, H100, B200 = Device(108, 40 << 20, (8, 0)), Device(), Device(148, 126 << 20, (10, 0))
SIZES = [
    Sizes(*sizes)
    for sizes in itertools.product(
        (1, 130, 2048, 8192, 65_536), (896, 4096, 8192), (32_000, 151_936, 256_000), (2, 4), (False, True)
    )
]


def test_a_tile_of_an_h100_by_hand() -> None:
    """132 multiprocessors make 128 x 256 logits each. Two rounds are 8 x 33 of them, or 1,024 x 8,448 logits: 34.6 MB
    of an L2 of 52.4 MB."""
    assert choose(Sizes(8192, 4096, 151_936, 2), H100, backward=False) == Tiles(1024, 8448, 1024, 8192)


def test_the_weight_gradient_of_an_h100_by_hand() -> None:
    """8,192 tokens take one span if float32 sums (134 MB at H = 4,096), narrow gradients and a tile of logits fit."""
    tiles = choose(Sizes(8192, 4096, 151_936, 2), H100, backward=True)
    assert tiles.group == tiles.span
    sums, held, tile = 4 * 4096 * tiles.span, 2 * tiles.columns * tiles.group, 4 * tiles.rows * tiles.columns
    assert tiles.backward_memory(Sizes(8192, 4096, 151_936, 2)) == sums + held + tile <= MEMORY
    assert choose(Sizes(8192, 896, 151_936, 2), H100, backward=True).span == 8192


@pytest.mark.parametrize("device", [A100, H100, B200], ids=["A100", "H100", "B200"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_choice_fits_in_the_memory(device, sizes) -> None:
    for backward in (False, True):
        tiles = choose(sizes, device, backward)
        assert tiles.rows % choice.ROWS == tiles.columns % choice.COLUMNS == tiles.group % tiles.rows == 0
        assert tiles.span % tiles.group == 0 or tiles.span >= sizes.tokens
        assert 4 * tiles.rows * tiles.columns <= device.l2
        if backward:
            assert tiles.backward_memory(sizes) <= MEMORY
        else:
            assert tiles.forward_memory(sizes) <= MEMORY
    frozen = choose_frozen(sizes, device)
    assert frozen[:2] == choose(sizes, device, backward=False)[:2]  # so log-probabilities have the same bits
    assert frozen.slope_memory(sizes) <= MEMORY
    assert frozen.span % frozen.rows == 0 or frozen.span >= sizes.tokens
    chunks = choose_chunks(sizes, device)
    assert chunks.rows % choice.ROWS == chunks.columns % choice.COLUMNS == 0
    for weight, triton in itertools.product((False, True), repeat=2):
        if one_pass(sizes, chunks, device, weight, triton):
            assert chunks.memory(sizes, weight) <= MEMORY


@pytest.mark.parametrize(
    ("sizes", "weight", "expected"),
    [
        (Sizes(8192, 4096, 32_000, 2), True, True),
        (Sizes(8192, 4096, 151_936, 2), True, False),  # 384 tokens for each time through the weight's gradient
        (Sizes(8192, 4096, 151_936, 2), False, True),
        (Sizes(65_536, 4096, 32_000, 2), True, False),  # 43 chunks: a sum in float32, as large as two weights
        (Sizes(65_536, 4096, 32_000, 2), False, True),
        (Sizes(8192, 896, 32_000, 2), True, False),
        (Sizes(8192, 4096, 151_936, 4), True, True),
        (Sizes(8192, 4096, 1_000_000, 4), True, False),  # 128 tokens have more logits than fit
    ],
    ids=str,
)
def test_one_pass_or_two(sizes, weight, expected) -> None:
    assert one_pass(sizes, choose_chunks(sizes, H100), H100, weight, triton=sizes.size == 4) is expected


def test_chunks_by_hand() -> None:
    """256 MiB less a tile's narrow gradients, over 4 bytes of 151,936 logits and of 4,096 sums, are 402 tokens."""
    chunks = choose_chunks(Sizes(8192, 4096, 151_936, 2), H100)
    assert chunks == Chunks(384, 22_528)
    assert 3 * 22_528 // 256 == 2 * 132


# ---------------------------------------------------------------------------------------------------------------------
# What a run holds
# ---------------------------------------------------------------------------------------------------------------------
class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()
        self.given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        self.given |= {x.untyped_storage().data_ptr() for x in inputs} - self.seen
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.seen | self.given:
                storage = tensor.untyped_storage()
                self.seen.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        return out

    def _freed(self, address: int, size: int) -> None:
        self.now -= size
        self.seen.discard(address)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products make nothing but their results, as cuBLAS's do; emulated ones widen narrow inputs first."""
    products = linear_chunks.Products

    def logits(_: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(hidden.shape[0], weight.shape[0])
        with _disable_current_modes():
            return torch.mm(hidden.float(), weight.t().float(), out=out)

    def add(_: Any, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        with _disable_current_modes():
            total.addmm_(left.float(), right.float())

    monkeypatch.setattr(products, "logits", logits)
    monkeypatch.setattr(products, "add_hidden", add)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_an_emulated_run_holds_what_the_choice_counts(emulator, monkeypatch, dtype, gathered) -> None:
    monkeypatch.setattr(dispatch, "emulator", emulator)
    as_on_a_gpu(monkeypatch)
    tiles = Tiles(16, 256, 32, 64) if dtype is torch.bfloat16 else Tiles(16, 256, 16, 64)
    monkeypatch.setattr(linear_chunks, "choose", lambda *_: tiles)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(150, 512, generator=generator).to(dtype)
    weight = (0.1 * torch.randn(600, 512, generator=generator)).to(dtype)
    targets = torch.randint(600, (150,), generator=generator)
    positions = torch.arange(150) if gathered else None
    sizes = Sizes(150, 512, 600, dtype.itemsize, gathered)
    head = linear_chunks.Head(hidden, weight, targets, None, positions, linear_chunks.Softmax())
    assert head.sizes == sizes
    with Held() as held:
        linear_chunks.scan_blocks(head, False)
    # A few states and views beside what is counted.
    assert 0.8 * tiles.forward_memory(sizes) < held.most < 1.1 * tiles.forward_memory(sizes) + 10_000

    upstream = linear_chunks.Upstream(torch.full((150,), 6.4), torch.ones(150), None, None)
    gradients = linear_chunks.Gradients(head, True, True, True)
    with Held() as held:
        linear_chunks.fill(head, gradients, upstream)
    counted = tiles.backward_memory(sizes)
    assert 0.8 * counted < held.most < 1.1 * counted + 10_000


@pytest.mark.slow
@pytest.mark.parametrize("span", [16, 48])
def test_few_spans_are_summed_in_the_weights_dtype_and_many_in_float32(monkeypatch, emulator, span) -> None:
    """Spans of 16 or 48 of 96 tokens lose a little with each sum in bfloat16; beyond ``FEW`` nothing more is lost. A
    span of one group adds its product to the gradient; one of three sums them in float32 first."""
    monkeypatch.setattr(dispatch, "emulator", emulator)
    monkeypatch.setattr(linear_chunks, "choose", lambda *_: Tiles(16, 256, 16, span))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(96, 24, generator=generator).bfloat16()
    weight = (0.4 * torch.randn(300, 24, generator=generator)).bfloat16()
    targets = torch.randint(300, (96,), generator=generator)

    def gradient(few: int) -> torch.Tensor:
        monkeypatch.setattr(linear_chunks, "FEW", few)
        leaf = weight.clone().requires_grad_()
        linear_logprob(hidden, leaf, targets, backend="native").sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    leaf = weight.double().requires_grad_()
    linear_logprob(hidden.double(), leaf, targets, backend="torch").sum().backward()
    assert leaf.grad is not None
    narrow, wide = ((gradient(few) - leaf.grad).norm() / leaf.grad.norm() for few in (6, 1))
    assert wide < narrow < 1e-2


# ---------------------------------------------------------------------------------------------------------------------
# Backends
# ---------------------------------------------------------------------------------------------------------------------
class OnGPU:
    """Stands for a CUDA tensor."""

    is_cuda, is_cpu, dtype, device = True, False, torch.float32, torch.device("cuda", 0)


def test_float32_goes_to_triton_unless_told_otherwise(monkeypatch) -> None:
    serving = {"native": "", "triton": ""}
    monkeypatch.setattr(dispatch, "_unsupported_reason", lambda name, *_: serving.get(name, ""))
    tensor: Any = OnGPU()

    def chosen(name: str | None = None) -> str:
        return dispatch.select_backend(choice.head_op(tensor), name, tensor)

    assert chosen() == "triton"
    assert chosen("native") == "native"
    with dispatch.backend("native"):
        assert chosen() == "native"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert chosen() == "native"
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "_unsupported_reason", lambda name, *_: serving.get(name, ""))
    serving["triton"] = "no driver"
    assert chosen() == "native"
    serving["triton"] = ""
    assert choice.head_op(torch.zeros(2, 2)) == "linear_logprob"
    tensor.dtype = torch.bfloat16
    assert chosen() == "native"


@pytest.mark.parametrize("op", dispatch.ON_GPU)
def test_the_table_decides_which_backend_comes_first(op: str, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_unsupported_reason", lambda *_: "")
    tensor: Any = OnGPU()
    for first in ("native", "triton"):
        monkeypatch.setitem(dispatch.ON_GPU, op, first)
        assert dispatch.select_backend(op, None, tensor) == first
        other = "native" if first == "triton" else "triton"
        assert dispatch.select_backend(op, None, tensor, **{first: "float64"}) == other
        assert dispatch.select_backend(op, other, tensor) == other


def test_the_setting_of_tf32_compiles() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x if choice.tf32_allowed() else 2 * x

    assert torch.compile(doubled, fullgraph=True, backend="eager")(torch.ones(1)).item() == 2


@pytest.mark.parametrize("message", ["self and mat2 must have the same dtype, but got Float and BFloat16", "no memory"])
def test_a_torch_that_adds_no_narrow_products_is_remembered(monkeypatch, message) -> None:
    """Then the product is made and added; other errors pass."""
    calls = []

    def addmm(*_: Any, **__: Any) -> None:
        calls.append("addmm")
        raise RuntimeError(message)

    monkeypatch.setattr(linear_chunks, "_adds_wide", True)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", lambda left, right, out_dtype: left.to(out_dtype) @ right.to(out_dtype))
    total, left, right = torch.ones(2, 2), torch.eye(2).bfloat16(), torch.eye(2).bfloat16()
    if message == "no memory":
        with pytest.raises(RuntimeError, match="no memory"):
            linear_chunks._add_product(total, left, right)
        return
    for _ in range(2):
        linear_chunks._add_product(total, left, right)
    assert calls == ["addmm"] and total.tolist() == [[3, 1], [1, 3]]
