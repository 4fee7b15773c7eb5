"""How the LM head cuts its work: worked examples, and the products, bytes and memory of calls that are really made."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turnwise import ops
from turnwise.ops import linear_policy_loss
from turnwise.ops.common import dispatch
from turnwise.ops.head import one_pass
from turnwise.ops.logprob import choice, linear_chunks, linear_frozen, tiles
from turnwise.ops.logprob.choice import ROWS, Chunks, Device, Sizes, choose, choose_on_cpu, default_memory

A100, H100, H200, B200, SMALL = (
    Device(108, 40 << 30, (8, 0)),
    Device(),
    Device(132, 141 << 30),
    Device(148, 180 << 30, (10, 0)),
    Device(34, 8 << 30, (8, 9)),
)
GIB = 1 << 30


# ---------------------------------------------------------------------------------------------------------------------
# Chunks
# ---------------------------------------------------------------------------------------------------------------------
def test_a_chunk_of_an_h100_by_hand() -> None:
    """1 GiB holds 1,766 tokens of 4 x 151,936 bytes. 132 multiprocessors make 128 x 256 of the hidden gradient each:
    13 x 16 of them are two waves, and so are the 12 x 16 of the last chunk. With chunks of 1,024 tokens eight waves
    would be enough, but the weight's gradient would be read and written eight times instead of five."""
    assert choose(Sizes(8192, 4096, 151_936, 2), H100, None) == Chunks(1664, 1766)
    assert choose(Sizes(2048, 4096, 151_936, 2), H100, None) == Chunks(1024, 1766)
    assert choose(Sizes(8192, 4096, 32_000, 2), H100, None) == Chunks(8192, 8388)  # one chunk


def test_a_chunk_of_a_cpu_by_hand() -> None:
    """256 MiB hold 2,048 tokens of 4 x 32,768 bytes; a sixteenth of 2,048 tokens is less than the least, 256."""
    assert choose_on_cpu(Sizes(2048, 512, 32_768, 4), None) == Chunks(256, 2048)
    assert choose_on_cpu(Sizes(16_384, 512, 32_768, 4), None) == Chunks(1024, 2048)
    assert choose_on_cpu(Sizes(16_384, 512, 32_768, 2), 1 << 20) == Chunks(16, 16)
    assert choose_on_cpu(Sizes(16_384, 512, 32_768, 2), 1) == Chunks(1, 1)


def test_the_logits_that_are_kept_by_hand() -> None:
    """All, if they fit; else whole chunks beside the one that is at work: 2,048 of 2,049 tokens leave 1,792."""
    chunks = Chunks(256, 2048)
    assert [chunks.keep(tokens) for tokens in (0, 1, 2048, 2049)] == [0, 1, 2048, 1792]
    assert Chunks(1664, 1766).keep(8192) == 0


def test_the_default_memory_by_hand() -> None:
    assert [default_memory(device) >> 20 for device in (None, SMALL, A100, H200)] == [256, 256, 640, 1024]


@pytest.mark.parametrize("device", [A100, H100, H200, B200, SMALL], ids=lambda d: str(d.memory >> 30))
@pytest.mark.parametrize("memory", [None, 1 << 24, GIB])
def test_every_chunk_fits_in_the_memory(device: Device, memory: int | None) -> None:
    vocabularies, copied = (32_000, 151_936, 256_000), (False, True)
    for sizes in itertools.product((1, 130, 2048, 8192, 65_536), (896, 4096, 8192), vocabularies, (2, 4), copied):
        call = Sizes(*sizes)
        rows, most = choose(call, device, memory)
        assert most * call.row_memory(4) <= (memory or default_memory(device))
        assert rows <= most and (rows % ROWS == 0 or rows == most)


# ---------------------------------------------------------------------------------------------------------------------
# Products and bytes
# ---------------------------------------------------------------------------------------------------------------------
class Made(NamedTuple):
    """One product: its kind, its operations, and the bytes that it reads and writes."""

    kind: str
    operations: int
    bytes: int


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Record each call of the three products."""
    made: list[Made] = []

    def size(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    def wrap(kind: str, measure: Callable[..., tuple[int, int]]) -> None:
        plain = getattr(linear_chunks.Products, kind)

        def counted(self: Any, *tensors: Any, **options: Any) -> Any:
            out = plain(self, *tensors, **options)
            made.append(Made(kind, *measure(out, *tensors, **options)))
            return out

        monkeypatch.setattr(linear_chunks.Products, kind, counted)

    def of_logits(out: Tensor, hidden: Tensor, weight: Tensor, _: Tensor | None) -> tuple[int, int]:
        return 2 * hidden.numel() * len(weight), size(hidden, weight, out)

    def of_hidden(_: None, out: Tensor, d: Tensor, weight: Tensor) -> tuple[int, int]:
        return 2 * d.numel() * weight.shape[1], size(out, d, weight)

    def of_weight(_: None, out: Tensor, d: Tensor, hidden: Tensor, add: bool = False) -> tuple[int, int]:
        return 2 * d.numel() * hidden.shape[1], size(out, d, hidden) + add * size(out)

    wrap("logits", of_logits)
    wrap("hidden_gradient", of_hidden)
    wrap("weight_gradient", of_weight)
    return made


MATMULS = {"aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise"}


class Matmuls(TorchDispatchMode):
    """Counts the operations of all matrix products inside, and the bytes of the tensors that are made and live."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.now = self.most = 0
        self.seen: set[int] = set()
        self.given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.given |= {id(x.untyped_storage()) for x in inputs} - self.seen
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in MATMULS:
            left = args[1] if "addmm" in name else args[0]
            self.operations += 2 * left.numel() * out.shape[1]
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.seen or any(storage._cdata == x.untyped_storage()._cdata for x in inputs):
                continue
            self.seen.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return out

    def _freed(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)


class Shape(NamedTuple):
    """A shape of the README: tokens, hidden size, vocabulary, dtype."""

    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def product(self) -> int:
        """Operations of one product."""
        return 2 * self.tokens * self.width * self.vocabulary


def leaves_of(shape: Shape, frozen: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, vocabulary, dtype = shape
    hidden = torch.zeros(tokens, width, dtype=dtype).requires_grad_()
    weight = torch.zeros(vocabulary, width, dtype=dtype).requires_grad_(not frozen)
    return hidden, weight, torch.zeros(tokens, dtype=torch.long)


def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    tokens = len(targets)
    streams = torch.zeros(tokens), torch.ones(8)
    cu_seqlens = torch.arange(0, tokens + 1, tokens // 8)
    linear_policy_loss(hidden, weight, targets, *streams, cu_seqlens=cu_seqlens).loss.backward()


def logprob_of(hidden: Tensor, weight: Tensor, targets: Tensor, keeps: bool = False) -> None:
    """The forward and the backward that torch's dispatcher hides in an op of its own."""
    tensors = hidden.detach(), weight.detach(), targets, None, None
    options = 1.0, None, None
    if not weight.requires_grad:
        _, lse, _, slope = linear_frozen.forward(*tensors, *options, False, None)
        linear_frozen.backward(torch.ones_like(lse), slope, hidden, None)
        return
    _, lse, _, kept = linear_chunks.forward(*tensors, *options, False, None, keeps, "native")
    upstream = torch.ones_like(lse), None, *tensors, lse, None
    linear_chunks.backward(*upstream, *options, None, True, True, False, "native", kept)


kept_of = functools.partial(logprob_of, keeps=True)
CPU_SHAPES = [Shape(2048, 512, v, d) for v in (32_768, 49_152) for d in (torch.float32, torch.bfloat16)]
PRODUCTS = [(loss_of, False, 3), (loss_of, True, 2), (logprob_of, False, 4), (logprob_of, True, 2), (kept_of, False, 3)]


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.parametrize(("call", "frozen", "products"), PRODUCTS)
@pytest.mark.parametrize("shape", CPU_SHAPES, ids=str)
def test_the_products_of_a_call_on_a_cpu(monkeypatch, shape: Shape, call: Any, frozen: bool, products: int) -> None:
    """Half of the tokens in half of the chunks. In addition to the gradients they hold less than a tenth of what eager
    holds of all tokens: logits, their float32 log-softmax, and the gradients of both."""
    part = shape._replace(tokens=1024)
    made, leaves = count_products(monkeypatch), leaves_of(part, frozen)
    with Matmuls() as counted:
        call(*leaves)
    assert counted.operations == sum(one.operations for one in made) == products * part.product
    assert {one.kind for one in made} == {"logits", "hidden_gradient", *(() if frozen else ("weight_gradient",))}
    size = shape.dtype.itemsize
    gradients = size * shape.width * (part.tokens + (not frozen) * shape.vocabulary)
    eager = 2 * (4 + size * (size < 4)) * shape.tokens * shape.vocabulary
    assert counted.most - gradients < (choice.CPU_MEMORY if call is kept_of else eager / 10)


GPU = Shape(8192, 4096, 151_936, torch.bfloat16)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plan of a GPU. On fake tensors products have shapes and no values; the kernels between them only have
    results."""

    def results(states: Tensor, entropy: bool) -> tuple[Tensor, ...]:
        return tuple(torch.empty(n) for n in (states.shape[2], states.shape[2], 0))

    monkeypatch.setattr(dispatch, "emulator", SimpleNamespace())
    monkeypatch.setattr(linear_chunks, "device_of", lambda _: H200)
    monkeypatch.setattr(tiles, "scan", lambda tile, entropy: torch.empty(1, 4, len(tile.logits), dtype=torch.float64))
    monkeypatch.setattr(tiles, "finish", results)
    monkeypatch.setattr(tiles, "grad", lambda *_: None)
    monkeypatch.setattr(one_pass, "_gradient", lambda plan, logprob, chunk: torch.empty_like(logprob))


def loss_on_a_gpu(head: linear_chunks.Head, gradients: linear_chunks.Gradients) -> None:
    chunks = one_pass.cut_anywhere(head.tokens, head.size().rows)
    streams: Any = None
    one_pass.fused(one_pass.Plan(head, streams, head.targets, streams, chunks, None, None), gradients, False)


def logprob_on_a_gpu(head: linear_chunks.Head, gradients: linear_chunks.Gradients) -> None:
    linear_chunks.scan_chunks(head, False)
    ones = torch.ones(head.tokens)
    linear_chunks.fill(head, gradients, tiles.Upstream(ones, ones, None, None))


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("call", "frozen", "products"), [(loss_on_a_gpu, False, 3), (loss_on_a_gpu, True, 2), (logprob_on_a_gpu, False, 4)]
)
def test_the_products_and_bytes_of_a_call_on_a_gpu(monkeypatch, dtype, call: Any, frozen: bool, products: int) -> None:
    """Five chunks at the README's shape. Each reads the weight once for its logits and once for the hidden gradient.
    Each adds to the weight's gradient, but the first only writes it. A logit is written in float32; each product behind
    it reads its gradient once, in the weight's dtype."""
    tokens, width, vocabulary, _ = shape = GPU._replace(dtype=dtype)
    size, chunks = dtype.itemsize, 5
    made = count_products(monkeypatch)
    with FakeTensorMode(), Matmuls() as counted:
        hidden, weight, targets = leaves_of(shape, frozen)
        head = linear_chunks.Head(hidden.detach(), weight.detach(), targets, None, None, tiles.Softmax())
        call(head, linear_chunks.Gradients(head, True, not frozen, False))
    assert counted.operations == sum(one.operations for one in made) == products * shape.product
    logits, states, weights = tokens * vocabulary, size * tokens * width, size * vocabulary * width
    passes = 2 if call is logprob_on_a_gpu else 1
    want = {
        "logits": passes * (4 * logits + states + chunks * weights),
        "hidden_gradient": size * logits + states + chunks * weights,
        "weight_gradient": size * logits + states + (2 * chunks - 1) * weights,
    }
    if frozen:
        del want["weight_gradient"]
    found = {kind: sum(one.bytes for one in made if one.kind == kind) for kind in want}
    assert found == want and {one.kind for one in made} == want.keys()
    assert len(made) == chunks * products
    largest = max(one.operations for one in made) // (2 * width)  # logits of a chunk
    assert 4 * largest <= GIB


@pytest.mark.parametrize("into", [False, True])
def test_few_chunks_are_summed_in_the_weights_dtype_and_many_in_float32(monkeypatch, into: bool) -> None:
    """Chunks of 16 tokens lose a little with each sum in bfloat16; beyond ``FEW`` nothing more is lost, nor is it in a
    gradient that is handed in."""
    monkeypatch.setattr(linear_chunks, "choose_on_cpu", lambda *_: Chunks(16, 1000))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(96, 24, generator=generator).bfloat16()
    weight = (0.4 * torch.randn(300, 24, generator=generator)).bfloat16()
    targets = torch.randint(300, (96,), generator=generator)
    streams = torch.zeros(96), torch.ones(1), torch.tensor([0, 96])

    def gradient(few: int, dtype: torch.dtype = torch.bfloat16, into: bool = False) -> Tensor:
        monkeypatch.setattr(linear_chunks, "FEW", few)
        leaf, total = weight.to(dtype, copy=True).requires_grad_(), torch.ones(weight.shape)
        out = linear_policy_loss(
            hidden.to(dtype), leaf, targets, streams[0].to(dtype), streams[1], cu_seqlens=streams[2],
            variant=ops.Reinforce(), grad_into=total if into else None,
        )  # fmt: skip
        out.loss.backward()
        assert (leaf.grad is None) == into
        return (total - 1 if into else leaf.grad).double()

    exact = gradient(6, torch.float64)
    narrow, wide = ((gradient(*each) - exact).norm() / exact.norm() for each in ((6,), (1, torch.bfloat16, into)))
    assert wide < narrow < 1e-2


@pytest.mark.parametrize("intel", [False, True])
def test_either_product_of_a_cpu_gives_the_gradients_of_float64(monkeypatch, intel: bool) -> None:
    """oneDNN's makes new logits for each chunk, MKL's overwrites those of the chunk before."""
    monkeypatch.setattr(linear_chunks, "_is_intel", lambda: intel)
    monkeypatch.setattr(linear_chunks, "choose_on_cpu", lambda *_: Chunks(16, 1000))
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(41, 24, generator=generator), torch.randn(300, 24, generator=generator)
    targets, cu = torch.randint(300, (41,), generator=generator), torch.tensor([0, 41])

    def gradients(dtype: torch.dtype, backend: str | None = None) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        mkl = intel or dtype is torch.float64 or not torch.backends.mkldnn.is_available()
        assert (linear_chunks.Products(leaves[0]).linear is None) == mkl
        out = linear_policy_loss(
            *leaves, targets, torch.zeros(41, dtype=dtype), torch.ones(1), cu_seqlens=cu, variant=ops.Reinforce(),
            entropy_coef=0.1, backend=backend,
        )  # fmt: skip
        out.loss.backward()
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    for got, exact in zip(gradients(torch.float32), gradients(torch.float64, "torch"), strict=True):
        assert (got - exact).norm() < 1e-5 * exact.norm()


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
