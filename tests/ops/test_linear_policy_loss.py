"""LM head and loss in one against the two ops in float64: every option, any chunks, masks, what is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops
from turnwise.ops.common import dispatch as backends
from turnwise.ops.logprob import linear_chunks

from .conftest import TARGETS
from .heads import IGNORE, chunks_of, logits_made

__all__ = ["logits_made"]  # a fixture
LENGTHS = [7, 0, 1, 30, 12]
TOKENS, VOCABULARY = sum(LENGTHS), 300
CORRECTION = ops.ImportanceCorrection("token", 1.5)
FULL = {"clip": ops.Clip(0.2, 0.28, dual_clip=3.0), "kl": ops.KL("k3", 0.1), "correction": CORRECTION}
CPU = TARGETS["native"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 tokens, so that rows are cut; the memory holds the longest."""
    chunks_of(8, monkeypatch, most=30)


def make(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """The arguments of a call, in float32 but for hidden and weight."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    given: dict[str, Any] = {
        "hidden": noise(TOKENS, 24).to(dtype),
        "weight": (0.4 * noise(VOCABULARY, 24)).to(dtype),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
        "bias": noise(VOCABULARY),
        "advantages": noise(len(LENGTHS)),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        "mask": torch.rand(TOKENS, generator=generator) < 0.8,
        "temperature": 0.7,
        "actor_ids": torch.tensor([0, 1, 1, 2, 0]),
        "num_actors": 4,
        "max_length": 40,
        **options,
    }
    head = given["hidden"].double(), given["weight"].double(), given["targets"]
    exact = ops.linear_logprob(*head, bias=given["bias"], temperature=0.7).float()
    given["old_logprobs"] = exact + 0.4 * noise(TOKENS)
    given |= {"ref_logprobs": exact + 0.4 * noise(TOKENS)} if "kl" in options else {}
    given |= {"rollout_logprobs": exact + 0.3 * noise(TOKENS)} if "correction" in options else {}
    return given


HEAD = ("targets", "temperature", "positions", "softcap", "ignore_index")


def run(
    given: dict[str, Any], target: Any = None, *, two: bool = False, frozen: tuple[str, ...] = (), **changes: Any
) -> tuple[Any, dict[str, Tensor]]:
    """The result and the gradients of twice the loss, by ``two`` ops if asked; without a target by these in float64."""
    given = {**given, **changes}
    if target is None:
        given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    else:
        given = target.on(given)
    leaves = {k: given.pop(k) for k in ("hidden", "weight", "bias") if k in given}
    leaves = {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in leaves.items() if v is not None}
    backend = "torch" if target is None else target.backend
    if target is None or two:
        head = {k: given.pop(k) for k in HEAD if k in given}
        with_entropy, coef = given.pop("entropy", False), given.pop("entropy_coef", 0.0)
        out = ops.linear_logprob(**leaves, **head, entropy=with_entropy, backend=backend)
        logprob, entropy = out if with_entropy else (out, None)
        chosen = None if two else "torch"
        result = ops.policy_loss(
            logprob, **given, entropy=None if entropy is None else entropy.detach(), backend=chosen
        )
        if coef:
            layout = {k: given.get(k) for k in ("mask", "cu_seqlens", "actor_ids", "num_actors", "max_length")}
            bonus = ops.aggregate(entropy, **layout, aggregation=given.get("aggregation", "token-mean"))
            result = result._replace(loss=result.loss - coef * bonus)
    else:
        result = ops.linear_policy_loss(**leaves, **given, backend=backend)
    (result.loss * 2).backward()
    return result, {k: v.grad.cpu() for k, v in leaves.items() if k not in frozen}


def assert_same(got: tuple[Any, dict[str, Tensor]], want: tuple[Any, dict[str, Tensor]], tolerance: float) -> None:
    (result, grads), (expected, expected_grads) = got, want
    torch.testing.assert_close(result.loss.cpu().double(), expected.loss.cpu().double(), rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, value in expected_grads.items():
        close = {"rtol": tolerance, "atol": tolerance * value.abs().max().item()}
        torch.testing.assert_close(grads[name].double(), value.double(), **close, msg=lambda m, n=name: f"{n}: {m}")
    for mine, theirs in ((result.metrics, expected.metrics), (result.actor_metrics, expected.actor_metrics)):
        assert list(mine) == list(theirs)
        close = {"rtol": 4 * tolerance, "atol": 4 * tolerance}
        for name in theirs:
            torch.testing.assert_close(mine[name].cpu(), theirs[name].cpu().float(), **close, msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
VARIANTS = [ops.Clip(), ops.CISPO(), ops.GPG(), ops.Reinforce(), ops.SAPO(), ops.GSPO(0.2, 0.2), ops.GMPO()]


@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
@pytest.mark.parametrize(
    "frozen", [(), ("weight",), ("hidden", "bias"), ("hidden", "weight"), ("weight", "bias")], ids=str
)
def test_equals_the_two_ops(target, monkeypatch, aggregation, frozen) -> None:
    """What is frozen costs no product."""
    given = make(1, **FULL, aggregation=aggregation, entropy=True, entropy_coef=0.3)
    want = run(given, frozen=frozen)
    if target.backend == "native":
        for name, product in (("weight", "weight_gradient"), ("hidden", "hidden_gradient")):
            if name in frozen:
                monkeypatch.delattr(linear_chunks.Products, product)
    assert_same(run(given, target, frozen=frozen), want, 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_floats(target, dtype) -> None:
    # SAPO is smooth: where a loss clips, a rounded logit may take a token from one side to the other.
    given = make(1, dtype, variant=ops.SAPO(), kl=ops.KL("k2", 0.1), entropy=True)
    got = run(given, target)
    assert got[1]["weight"].dtype == dtype
    assert_same(got, run(given), 2e-2 if dtype is torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_variant(target, variant, level) -> None:
    options = {} if isinstance(variant, ops.GMPO) else {"correction": ops.ImportanceCorrection(level, 1.5)}
    options["kl"] = ops.KL("k3", 0.1, importance_weighted=level == "token")
    given = make(2, variant=variant, aggregation="seq-mean-token-mean", **options)
    assert_same(run(given, target), run(given), 5e-6)


@pytest.mark.parametrize("chunks", [(1, 1000), (8, 2), (1000, 16)], ids=str)
def test_any_chunks_give_the_same(kernel, monkeypatch, chunks) -> None:
    for seed in range(3):
        given = make(seed, **FULL)
        chunks_of(chunks[0], monkeypatch)
        monkeypatch.setattr(linear_chunks, "FEW", chunks[1])
        assert_same(run(given, kernel), run(given), 5e-6)


def test_other_forms_of_the_streams(target) -> None:
    """Positions of a shorter stream; no bias or mask, and advantages per token."""
    given = make(4, **FULL)
    positions = torch.randint(20, (TOKENS,), generator=torch.Generator().manual_seed(0))
    gathered = {**given, "hidden": given["hidden"][:20], "positions": positions}
    plain = make(5) | {"bias": None, "mask": None, "advantages": torch.randn(TOKENS)}
    for each in (gathered, plain):
        assert_same(run(each, target), run(each), 5e-6)


@pytest.mark.parametrize("variant", [None, ops.GSPO()], ids=["one pass", "two passes"])
@pytest.mark.parametrize("rows", ["dropped", "in the kernel"])
@pytest.mark.parametrize("masked", [False, True])
def test_ignored_tokens_are_left_out(target, monkeypatch, rows, variant, masked) -> None:
    """Their hidden states hold NaN. A CPU drops them before the products; a GPU leaves them to its kernels."""
    if rows == "in the kernel":
        monkeypatch.setattr(linear_chunks.Head, "trained", lambda self, mask=None: (self, None))
    given = make(7, variant=variant, softcap=5.0, bias=None)
    if not masked:
        given["mask"] = torch.ones(TOKENS, dtype=torch.bool)
    ignored = torch.rand(TOKENS, generator=torch.Generator().manual_seed(7)) < 0.3
    want = run(given, mask=given["mask"] & ~ignored)
    given["targets"] = given["targets"].masked_fill(ignored, IGNORE)
    given["hidden"] = given["hidden"].masked_fill(ignored[:, None], torch.nan)
    got = run(given, target, ignore_index=IGNORE)
    assert_same(got, want, 5e-6)
    assert got[0].metrics["tokens"] == (given["mask"] & ~ignored).sum()


@pytest.mark.parametrize("variant", [None, ops.GSPO()], ids=["one pass", "two passes"])
@pytest.mark.parametrize("shared", [0, 2, 20])
def test_temperatures_and_shared_log_probabilities(target, monkeypatch, variant, shared) -> None:
    """Three temperatures; and tokens that read every second target, or so few that no token reads some chunks."""
    if shared == 20:  # as on a GPU, which leaves out no row
        monkeypatch.setattr(linear_chunks.Head, "trained", lambda self, mask=None: (self, None))
    given = make(6, variant=variant, entropy=True, entropy_coef=-0.4)
    options = {k: given.pop(k) for k in ("hidden", "weight", "bias", "targets", "temperature")}
    heats = torch.tensor([0.5, 1.0, 0.7])[torch.arange(TOKENS) % 3]
    reads = torch.arange(TOKENS) // shared * shared if shared else torch.arange(TOKENS)

    def head(where: Any, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], Tensor]:
        leaves = {k: where(options[k]).to(dtype).clone().requires_grad_() for k in ("hidden", "weight", "bias")}
        return leaves, where(options["targets"])

    leaves, targets = head(target.on)
    how = {"reads": target.on(reads)} if shared else {}
    out = ops.linear_policy_loss(
        **leaves, targets=targets, temperature=target.on(heats), **how, **target.on(given), backend=target.backend
    )
    out.loss.backward()
    exact, targets = head(lambda x: x, torch.float64)
    logs = torch.log_softmax((exact["hidden"] @ exact["weight"].T + exact["bias"]) / heats[:, None].double(), -1)
    logprobs, entropy = logs.gather(1, targets[:, None])[reads, 0], -(logs.exp() * logs).sum(1)[reads]
    streams = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    coef = streams.pop("entropy_coef")
    want = ops.policy_loss(logprobs, **streams | {"entropy": entropy.detach()})
    mask = given["mask"].double()
    want = want._replace(loss=want.loss - coef * (entropy * mask).sum() / mask.sum())
    want.loss.backward()
    torch.testing.assert_close(out.loss.cpu().double(), want.loss, rtol=5e-6, atol=5e-6)
    mean, exact_mean = (metrics["entropy"].cpu().double() for metrics in (out.metrics, want.metrics))
    torch.testing.assert_close(mean, exact_mean, rtol=2e-5, atol=0)
    kept = given["mask"]
    torch.testing.assert_close(out.logprobs.cpu().double()[kept], logprobs.detach()[kept], rtol=2e-5, atol=2e-5)
    assert (out.logprobs.cpu()[~kept] == 0).all()
    for name, leaf in leaves.items():
        grad = exact[name].grad
        close = {"rtol": 5e-6, "atol": 5e-6 * grad.abs().max().item()}
        torch.testing.assert_close(leaf.grad.cpu().double(), grad, **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_handed_in(target, passes, dtype) -> None:
    """It is added to, by each backward; the weight has none then. Bfloat16 loses nothing in the sum of 50 of them."""
    variant = ops.Clip() if passes == "one" else ops.Custom(lambda new, old, a: -a * (new - old).exp())
    given = target.on(make(11, dtype, variant=variant))
    leaves = {k: given.pop(k).clone().requires_grad_() for k in ("hidden", "weight", "bias")}
    total = torch.zeros(VOCABULARY, 24, device=target.device)
    plain = ops.linear_policy_loss(**leaves, **given, backend=target.backend)
    (expected,) = torch.autograd.grad(plain.loss, leaves["weight"])
    for _ in range(50):
        ops.linear_policy_loss(**leaves, **given, backend=target.backend, grad_into=total).loss.backward()
    assert leaves["weight"].grad is None and leaves["hidden"].grad is not None
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert (total / 50 - expected.float()).norm() < tolerance * expected.float().norm()
    if passes == "one" and target.backend != "torch" and not target.on_gpu:
        out = ops.linear_policy_loss(**leaves, **given, backend=target.backend, grad_into=total)
        with pytest.raises(RuntimeError, match=r"grad_into holds the gradient of the loss, not of 2\.0 times it"):
            (2 * out.loss).backward()


# ---------------------------------------------------------------------------------------------------------------------
# What is computed
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["trained", "frozen"])
def test_the_logits_of_the_trained_tokens_are_made_once(logits_made, frozen) -> None:
    given = make(7)
    run(given, CPU, frozen=frozen)
    assert sum(logits_made) == int(given["mask"].sum()) * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_the_compiled_module_one_pass_runs_on_plain_pytorch(monkeypatch, logits_made, dtype) -> None:
    """By chunks too, while ``backend="torch"`` is the reference, which can be differentiated twice."""
    given = make(3, dtype, variant=ops.SAPO(), kl=ops.KL("k2", 0.1), entropy=True, entropy_coef=0.1)
    monkeypatch.setattr(backends, "extension", None)
    monkeypatch.setattr(backends, "extension_error", "left out")
    monkeypatch.setattr(backends, "_warned", {"cpu"})  # that plain PyTorch serves
    got = run(given, CPU._replace(backend=None))
    assert sum(logits_made) == int(given["mask"].sum()) * VOCABULARY and max(logits_made) == 8 * VOCABULARY
    assert_same(got, run(given), 5e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_wrong_id_of_a_masked_token_is_rejected(wrong) -> None:
    """Masked tokens are left out by an id that no token has; a wrong id must not pass for it."""
    given = make(15)
    given["targets"][3], given["mask"][3] = wrong, False
    with pytest.raises(ValueError, match=rf"targets\[3\]={wrong}"):
        run(given, CPU, frozen=("weight", "bias"))


# ---------------------------------------------------------------------------------------------------------------------
# Choices by token, and custom functions
# ---------------------------------------------------------------------------------------------------------------------
calls: list[Tensor] = []


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    calls.append(logprobs.detach().clone())
    return -advantages * (logprobs - old_logprobs).exp()


CHOOSING = [ops.ClipCov(0.1, 0.3, 0.1, 0.05, 3.0), ops.KLCov(0.2, 0.5)]


@pytest.mark.parametrize("variant", [*CHOOSING, ops.Custom(ppo)], ids=lambda v: type(v).__name__)
def test_chooses_the_tokens_that_the_two_ops_choose(target, variant) -> None:
    """One draw from torch's generator, and one call of a custom function, with log-probabilities only."""
    given, found = make(1, variant=variant, aggregation="seq-mean-token-mean"), []
    for two in (True, False):
        calls.clear()
        torch.manual_seed(3)
        found.append((run(given, target, two=two), torch.rand(1)))  # the generator is where it was
        assert len(calls) == isinstance(variant, ops.Custom) and all((call < 0).all() for call in calls)
    (want, drawn), (got, again) = found
    assert drawn == again
    assert_same(got, want, 5e-6)
    if variant in CHOOSING:  # what was chosen before is taken as it is
        logprob = ops.linear_logprob(
            *(given[k] for k in ("hidden", "weight", "targets")), bias=given["bias"], temperature=0.7
        )
        streams = {k: given[k] for k in ("old_logprobs", "advantages", "mask", "cu_seqlens")}
        torch.manual_seed(3)
        chosen = ops.select_tokens(logprob, variant=variant, **streams)
        assert 1 < int(chosen.sum()) < int(given["mask"].sum())
        assert_same(run(given, target, selected=chosen), want, 5e-6)


def test_gradients_of_long_sequences_in_float16(target) -> None:
    """A token of 20,000 has a gradient near 1e-8 in most logits, which float16 does not have. As
    `torch.amp.GradScaler` does, the loss is scaled and gradients are in range again, in chunks and their sums alike."""
    tokens = 300 if target.simulated else 20_000
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 24, generator=generator).half() for n in (tokens, VOCABULARY))
    weight *= 0.4
    old = -6 + torch.randn(tokens, generator=generator)
    rest = torch.arange(tokens) % VOCABULARY, old, torch.randn(tokens, generator=generator)
    grads = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float16, target.backend)):
        leaves = [target.on(x).to(dtype).requires_grad_() for x in (hidden, weight)]
        streams = target.on([rest[0], *(x.to(dtype if dtype is torch.float64 else None) for x in rest[1:])])
        cu = target.on(torch.tensor([0, tokens]))
        loss = ops.linear_policy_loss(*leaves, *streams, cu_seqlens=cu, variant=ops.SAPO(), backend=backend).loss
        grads.append(torch.autograd.grad(loss * 65536.0, leaves, retain_graph=True))
        assert all(map(torch.equal, grads[-1], torch.autograd.grad(loss * 65536.0, leaves)))
    for mine, theirs in zip(grads[1], grads[0], strict=True):
        assert mine.dtype == torch.float16
        assert (mine.double() - theirs).norm() < 1e-3 * theirs.norm()
