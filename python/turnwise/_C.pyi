"""The compiled core. Use :mod:`turnwise.ops`; these functions take their arguments as they come."""

from collections.abc import Hashable, Sequence

import numpy as np
from torch import Tensor

with_cuda: bool
emulates_cuda: bool

class InvalidInput(ValueError): ...

def isa() -> str: ...
def factorize(columns: list[np.ndarray | Sequence[Hashable]], ids: Tensor) -> int: ...
def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    advantages: Tensor,
    num_groups: int,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    by_trajectory: bool,
    center: int,
    scale: int,
    singleton: int,
    ddof: int,
    eps: float,
    min_std: float,
    threads: int,
) -> None: ...
def cuda_group_advantage_workspace(rows: int, groups: int, by_trajectory: bool, weighted: bool) -> int: ...
def cuda_group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    advantages: Tensor,
    num_groups: int,
    trajectory_ids: Tensor | None,
    lengths: Tensor | None,
    valid: Tensor | None,
    by_trajectory: bool,
    center: int,
    scale: int,
    singleton: int,
    ddof: int,
    eps: float,
    min_std: float,
    workspace: Tensor,
    stream: int,
) -> None: ...
def logprob_scan(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    first: int,
    scale: float,
    state: Tensor,
    weighted: bool,
    threads: int,
) -> None: ...
def logprob_finish(state: Tensor, logprob: Tensor, lse: Tensor, entropy: Tensor | None) -> None: ...
def logprob_grad(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    first: int,
    scale: float,
    lse: Tensor,
    grad_logprob: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    threads: int,
) -> None: ...
def cuda_logprob_scan(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    first: int,
    scale: float,
    state: Tensor,
    weighted: bool,
    stream: int,
) -> None: ...
def cuda_logprob_finish(state: Tensor, logprob: Tensor, lse: Tensor, entropy: Tensor | None, stream: int) -> None: ...
def cuda_logprob_grad(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    first: int,
    scale: float,
    lse: Tensor,
    grad_logprob: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    stream: int,
) -> None: ...
def add_narrow(total: Tensor, part: Tensor, threads: int) -> None: ...
def grouped_policy_loss(
    streams: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    modes: tuple[int, ...],
    token_rewards: Tensor,
    columns: tuple[Tensor | int | None, ...],
    rule: tuple[float, ...],
    loss: Tensor,
    grad: Tensor,
    metrics: Tensor,
    threads: int,
) -> None: ...
def policy_loss(
    streams: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    modes: tuple[int, ...],
    loss: Tensor,
    grad: Tensor,
    metrics: Tensor,
    threads: int,
) -> None: ...
def cuda_grouped_policy_loss(
    streams: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    modes: tuple[int, ...],
    token_rewards: Tensor,
    columns: tuple[Tensor | int | None, ...],
    rule: tuple[float, ...],
    loss: Tensor,
    grad: Tensor,
    metrics: Tensor,
    workspace: Tensor,
    stream: int,
) -> None: ...
def cuda_grouped_policy_loss_workspace(
    rows: int, tokens: int, num_actors: int, groups: int, weighted: bool, device: int
) -> int: ...
def cuda_policy_loss(
    streams: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    modes: tuple[int, ...],
    loss: Tensor,
    grad: Tensor,
    metrics: Tensor,
    workspace: Tensor,
    stream: int,
) -> None: ...
def cuda_policy_loss_workspace(rows: int, tokens: int, num_actors: int, device: int) -> int: ...
def exp(values: Tensor, out: Tensor) -> None: ...
def token_reward_sum(
    token_rewards: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    sums: Tensor,
    threads: int,
) -> None: ...
def token_returns(
    token_rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float, returns: Tensor, threads: int
) -> None: ...
def cuda_token_reward_sum_workspace(tokens: int) -> int: ...
def cuda_token_reward_sum(
    token_rewards: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    sums: Tensor,
    workspace: Tensor,
    stream: int,
) -> None: ...
def cuda_token_scan_workspace(tokens: int) -> int: ...
def cuda_token_returns(
    token_rewards: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    returns: Tensor,
    workspace: Tensor,
    stream: int,
) -> None: ...
def cuda_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
    workspace: Tensor,
    stream: int,
) -> None: ...
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
    threads: int,
) -> None: ...
def cuda_scale(values: Tensor, factor: Tensor, stream: int) -> None: ...
def cuda_architectures() -> str: ...
def cuda_runtime_version() -> tuple[int, int]: ...
def cuda_driver_version() -> tuple[int, int]: ...
def cuda_device_count() -> int: ...
def cuda_device(device: int) -> dict[str, str | int | tuple[int, int]]: ...
