"""``softcap`` and ``ignore_index`` of the log-probability ops, against float64 and against calls without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from turnwise.ops import GSPO, linear_logprob, linear_policy_loss, logprob, policy_loss
from turnwise.ops.common import dispatch as backends
from turnwise.ops.logprob import choice, linear_native
from turnwise.ops.logprob.choice import Tiles

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NATIVE = pytest.mark.skipif(backends.interpreted, reason="native backends, in their own process")
IGNORE = -100


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of tokens and tiles of 256 columns, also at small sizes."""
    for name, size in (("_CPU_ROWS", 24), ("_CPU_FORWARD", 1), ("_CPU_BACKWARD", 1)):
        monkeypatch.setattr(choice, name, size)
    tiles = {2: Tiles(24, 256, 48, 96), 4: Tiles(24, 256, 24, 96)}
    monkeypatch.setattr(linear_native, "choose", lambda sizes, *_: tiles[sizes.size])


@pytest.fixture(params=["dropped", "in the kernel"])
def ignored_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU drops ignored tokens before the products; a GPU leaves them to its kernels."""
    if request.param == "in the kernel":
        monkeypatch.setattr(linear_native.Head, "trained", lambda self, mask=None: (self, None))
    return request.param


def make(seed: int, shape: tuple[int, ...], dtype: torch.dtype, width: int = 24) -> dict[str, Tensor]:
    """Logits and the head that could have made them; a third of the targets is ignored, and its rows hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = shape[:-1], shape[-1]
    targets = torch.randint(vocabulary, rows, generator=generator)
    ignored = torch.rand(rows, generator=generator) < 0.3
    logits = (8 * torch.randn(*shape, generator=generator)).to(dtype)
    hidden = torch.randn(*rows, width, generator=generator).to(dtype)
    return {
        "logits": logits.masked_fill(ignored[..., None], torch.nan),
        "hidden": hidden.masked_fill(ignored[..., None], torch.nan),
        "weight": torch.randn(vocabulary, width, generator=generator).to(dtype),
        "bias": torch.randn(vocabulary, generator=generator),
        "targets": targets.masked_fill(ignored, IGNORE),
        "grad_logprob": torch.randn(rows, generator=generator),
        "grad_entropy": torch.randn(rows, generator=generator),
    }


def exact(given: dict[str, Tensor], linear: bool, softcap: float | None, temperature: float) -> dict[str, Tensor]:
    """The definition in float64, over the rows that are not ignored."""
    kept = given["targets"] != IGNORE
    names = ("hidden", "weight", "bias") if linear else ("logits",)
    leaves = {name: given[name].double().nan_to_num(0.0).requires_grad_() for name in names}
    logits = leaves["hidden"] @ leaves["weight"].T + leaves["bias"] if linear else leaves["logits"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logs = torch.log_softmax(logits / temperature, -1)
    values = logs.gather(-1, given["targets"].clamp(min=0)[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    values, entropy = torch.where(kept, values, 0.0), torch.where(kept, entropy, 0.0)
    ((values * given["grad_logprob"]).sum() + (entropy * given["grad_entropy"]).sum()).backward()
    return {"logprob": values, "entropy": entropy, **{name: leaf.grad for name, leaf in leaves.items()}}


def run(given: dict[str, Tensor], target: Any, linear: bool, **options: Any) -> dict[str, Tensor]:
    moved = {name: value.to(target.device) for name, value in given.items()}
    names = ("hidden", "weight", "bias") if linear else ("logits",)
    leaves = {name: moved[name].clone().requires_grad_() for name in names}
    options |= {"entropy": True, "ignore_index": IGNORE, "backend": target.backend}
    if linear:
        streams = leaves["hidden"], leaves["weight"], moved["targets"]
        values, entropy = linear_logprob(*streams, bias=leaves["bias"], **options)
    else:
        values, entropy = logprob(leaves["logits"] * 1.0, moved["targets"], **options)
    ((values * moved["grad_logprob"]).sum() + (entropy * moved["grad_entropy"]).sum()).backward()
    return {"logprob": values, "entropy": entropy, **{name: leaf.grad for name, leaf in leaves.items()}}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, expected in want.items():
        actual, largest = got[name].detach().cpu().double(), expected.abs().max().item() if expected.numel() else 0.0
        bound = tolerance * max(largest, 0.1)
        torch.testing.assert_close(
            actual, expected.double(), rtol=tolerance, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Worked examples
# ---------------------------------------------------------------------------------------------------------------------
def test_a_worked_example(target) -> None:
    """Logits 0 and 2 with cap 1: 0 and tanh(2) = 0.9640276; the temperature 0.5 doubles the difference afterwards."""
    logits = torch.tensor([[0.0, 2.0], [torch.nan, torch.nan]], device=target.device)
    targets = torch.tensor([1, IGNORE], device=target.device)
    options = {"softcap": 1.0, "temperature": 0.5, "ignore_index": IGNORE, "backend": target.backend}
    found = logprob(logits, targets, **options).tolist()
    assert found == pytest.approx([-0.13578, 0.0], abs=1e-5)  # -log(1 + exp(-2 * 0.9640276))


@NATIVE
def test_order_is_that_of_gemma() -> None:
    """Hugging Face's Gemma 2 caps the logits, and generation divides them by the temperature afterwards."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=1.5,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
        tokens = torch.randint(50, (1, 9))
        want = torch.log_softmax(model(tokens).logits / 0.7, -1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        hidden = model.model(tokens).last_hidden_state[0, :-1]
        options = {"softcap": config.final_logit_softcapping, "temperature": 0.7}
        got = linear_logprob(hidden, model.lm_head.weight, tokens[0, 1:], **options)
        plain = linear_logprob(hidden, model.lm_head.weight, tokens[0, 1:], temperature=0.7)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    assert (plain - want).abs().max() > 0.1  # the cap matters here


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
# 1, 31, 33: less than a vector, and a tail; 2049: a piece, and one more; 4100: a block's step on a GPU and a tail.
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (2, 7, 33), (6, 2049), (3, 4100)], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logprob_equals_float64(target, shape, dtype, softcap) -> None:
    given = make(sum(shape), shape, dtype)
    got = run(given, target, False, softcap=softcap, temperature=0.7)
    want = exact(given, False, softcap, 0.7)
    assert_close(got, want, TOLERANCE[dtype])
    ignored = given["targets"] == IGNORE
    for name in ("logprob", "entropy", "logits"):
        assert (got[name].cpu()[ignored] == 0).all(), name


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 31), (33, 33), (25, 257), (49, 1025)], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_linear_logprob_equals_float64(target, ignored_rows, tokens, vocabulary, dtype, softcap) -> None:
    given = make(tokens * vocabulary, (tokens, vocabulary), dtype)
    got = run(given, target, True, softcap=softcap, temperature=0.7)
    assert_close(got, exact(given, True, softcap, 0.7), TOLERANCE[dtype])
    ignored = given["targets"] == IGNORE
    for name in ("logprob", "entropy", "hidden"):
        assert (got[name].cpu()[ignored] == 0).all(), name


@pytest.mark.parametrize("cap", [1e-3, 1.0, 1e4])
def test_caps_of_any_size(target, cap) -> None:
    """Logits from far below the cap to far above it; a cap of 1e4 changes logits of 8 by 2e-6 of themselves."""
    given = make(3, (20, 90), torch.float32)
    assert_close(run(given, target, False, softcap=cap), exact(given, False, cap, 1.0), 3e-6)


def test_capped_logits_that_are_infinite_or_nan(target) -> None:
    given = make(4, (3, 40), torch.float32) | {"targets": torch.tensor([5, 6, 7])}
    given["logits"] = torch.zeros(3, 40)
    given["logits"][0, 1], given["logits"][1, 2], given["logits"][2, 3] = torch.inf, -torch.inf, torch.nan
    values = run(given, target, False, softcap=2.0)["logprob"].cpu()
    base = torch.tensor(39.0)
    assert values[0].item() == pytest.approx(-torch.log(base + torch.tensor(2.0).exp()).item(), abs=1e-5)
    assert values[1].item() == pytest.approx(-torch.log(base + torch.tensor(-2.0).exp()).item(), abs=1e-5)
    assert values[2].isnan()


@pytest.mark.parametrize("index", [0, 3, IGNORE])
def test_any_id_can_be_ignored(target, index) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), device="cpu").to(target.device)
    targets = torch.tensor([3, 0, 5, 1]).masked_fill(torch.tensor([False, False, True, False]), index).to(target.device)
    got = logprob(logits, targets, ignore_index=index, backend=target.backend)
    kept = targets != index
    plain = logprob(logits, targets.clamp(min=0), backend=target.backend)
    assert torch.equal(got, torch.where(kept, plain, 0.0))
    assert kept.sum() < 4


@pytest.mark.parametrize("positions", [False, True])
def test_all_ignored(target, ignored_rows, positions) -> None:
    given = make(5, (7, 40), torch.float32) | {"targets": torch.full((7,), IGNORE)}
    got = run(given, target, True, **({"positions": torch.arange(7, device=target.device)} if positions else {}))
    assert all((value == 0).all() for value in got.values())


@NATIVE
def test_inplace_backward(target) -> None:
    given = make(6, (9, 300), torch.float32)
    want = run(given, target, False, softcap=3.0)
    got = run(given, target, False, softcap=3.0, inplace_backward=True)
    assert torch.equal(got["logits"], want["logits"])


# ---------------------------------------------------------------------------------------------------------------------
# Policy loss
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", [None, GSPO()], ids=["one pass", "two passes"])
@pytest.mark.parametrize("masked", [False, True])
def test_linear_policy_loss_leaves_ignored_tokens_out(target, ignored_rows, variant, masked) -> None:
    given = make(7, (40, 300), torch.float32)
    generator = torch.Generator().manual_seed(7)
    old, advantages = -3 + torch.randn(40, generator=generator), torch.randn(3, generator=generator)
    mask = torch.rand(40, generator=generator) < 0.7 if masked else torch.ones(40, dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 11, 11, 40])
    kept = given["targets"] != IGNORE
    # In float64: the loss of the tokens that are neither masked nor ignored.
    leaves = [given[name].double().nan_to_num(0.0).requires_grad_() for name in ("hidden", "weight")]
    logits = 5.0 * torch.tanh(leaves[0] @ leaves[1].T / 5.0)
    values = torch.log_softmax(logits / 0.7, -1).gather(-1, given["targets"].clamp(min=0)[:, None])[:, 0]
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "variant": variant}
    want = policy_loss(values, old.double(), advantages.double(), mask=mask & kept, **options)
    want.loss.backward()
    # The op under test
    moved = {name: value.to(target.device) for name, value in options.items() if isinstance(value, Tensor)}
    mine = [given[name].to(target.device).clone().requires_grad_() for name in ("hidden", "weight")]
    streams = [x.to(target.device) for x in (given["targets"], old, advantages)]
    got = linear_policy_loss(
        *mine, *streams, mask=mask.to(target.device) if masked else None, **{**options, **moved},
        softcap=5.0, temperature=0.7, ignore_index=IGNORE, backend=target.backend,
    )  # fmt: skip
    got.loss.backward()
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5, abs=1e-6)
    assert got.metrics["tokens"].item() == (mask & kept).sum().item()
    pairs = {name: (a.grad, b.grad) for name, a, b in zip(("hidden", "weight"), mine, leaves, strict=True)}
    assert_close({k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()}, 5e-6)


# ---------------------------------------------------------------------------------------------------------------------
# torch and errors
# ---------------------------------------------------------------------------------------------------------------------
