"""How the compiled module reads tensors: by DLPack's exchange where torch has it, else through their attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from turnwise.ops.common.dispatch import extension

pytestmark = pytest.mark.skipif(extension is None, reason="the compiled module did not load")

IDS = torch.tensor([0, 0, 1, 1])
EXPECTED = torch.tensor([1.0, -1.0, -1.0, 1.0]) * 2**-0.5


class ByAttributes:
    """A tensor of which only the attributes are known, as one of a torch before 2.10."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class Subclass(Tensor):
    pass


def rule() -> Any:
    modes = {"by_trajectory": False, "center": 0, "scale": 0, "singleton": 0}
    return extension.GroupAdvantageRule(**modes, ddof=1, eps=0.0, min_std=0.0)


def advantages(rewards: Any, ids: Any = IDS, valid: Any = None) -> Tensor:
    out = torch.full((4,), 7.0, dtype=rewards.dtype)
    extension.group_advantage(rewards, ids, out, 2, None, None, valid, rule(), 1)
    return out


KINDS = {
    "plain": lambda tensor: tensor,
    "parameter": nn.Parameter,
    "subclass": lambda tensor: tensor.as_subclass(Subclass),
    "needs a gradient": lambda tensor: tensor.clone().requires_grad_(),
    "not a leaf": lambda tensor: tensor.clone().requires_grad_() * 1,
    "with an offset": lambda tensor: torch.cat([torch.full((3,), 9.0, dtype=tensor.dtype), tensor])[3:],
    "by attributes": ByAttributes,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_tensor_is_read(kind: str, dtype: torch.dtype) -> None:
    rewards = KINDS[kind](torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=dtype))
    torch.testing.assert_close(advantages(rewards).float(), EXPECTED, atol=4e-3, rtol=0)


@pytest.mark.parametrize("kind", [lambda tensor: tensor, ByAttributes])
def test_what_is_no_plain_tensor_of_the_cpu_is_rejected_by_its_argument(kind: Any) -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    for bad, expected in (
        (rewards.to("meta"), "rewards: expected a CPU tensor"),
        (rewards.to(torch.complex64), "rewards: a dtype that is not read here"),
        (rewards.expand(2, 2, 4), "rewards: expected at most two dimensions"),
    ):
        with pytest.raises(TypeError, match=expected):
            advantages(kind(bad))
    for bad in (rewards[::2], rewards.expand(3, 4)):
        with pytest.raises(ValueError, match="rewards"):
            advantages(kind(bad))
    with pytest.raises(TypeError, match="group_ids"):
        advantages(rewards, kind(IDS.to("meta")))
    with pytest.raises((TypeError, ValueError), match="group_ids"):
        advantages(rewards, kind(IDS.to(torch.int32)))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        advantages(kind(rewards.to_sparse()))
    with pytest.raises(AttributeError):
        advantages(rewards, object())


def test_flags_are_read_as_booleans_and_nothing_as_not_given() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    valid = torch.tensor([True, True, False, True])
    for kind in (lambda tensor: tensor, ByAttributes):
        assert advantages(rewards, valid=kind(valid)).tolist() == pytest.approx([*EXPECTED[:2].tolist(), 0.0, 0.0])


@pytest.mark.parametrize("kind", [lambda tensor: tensor, ByAttributes])
def test_a_tensor_without_rows_is_no_missing_argument(kind: Any) -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    with pytest.raises(ValueError, match="shape of rewards"):
        advantages(rewards, valid=kind(torch.empty(0, dtype=torch.bool)))
    empty = torch.empty(0)
    columns = (kind(empty), kind(empty.long()), empty, 0, None, None, kind(empty.bool()))
    extension.group_advantage(*columns, rule(), 1)  # no rows, no error


def test_a_strided_mask_is_read_in_both_ways() -> None:
    """What `group_advantage` takes is contiguous; here steps of two dimensions count."""
    rewards = torch.arange(12.0).reshape(3, 4).t()
    mask = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]]).bool()[:, ::2]
    found = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
    for kind, sums in zip((lambda tensor: tensor, ByAttributes), found, strict=True):
        extension.token_reward_sum(kind(rewards), kind(mask), None, None, kind(sums), 1)
    expected = (rewards * mask).sum(1).double()
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
