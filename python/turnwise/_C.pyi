"""The compiled core. Use :mod:`turnwise.ops`: these functions convert no arguments."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, final, overload

import numpy as np
from torch import Tensor

Array = Tensor | np.ndarray

with_cuda: bool
emulates_cuda: bool

class InvalidInput(ValueError): ...

def isa() -> str: ...
def factorize(columns: list[np.ndarray | Sequence[Hashable]], ids: Array) -> int: ...

@final
class GroupAdvantageRule:
    def __init__(
        self,
        by_trajectory: bool,
        center: int,
        scale: int,
        singleton: int,
        ddof: int,
        eps: float,
        min_std: float,
    ) -> None: ...

def group_advantage(
    rewards: Array,
    group_ids: Array,
    advantages: Array,
    num_groups: int,
    trajectory_ids: Array | None,
    lengths: Array | None,
    valid: Array | None,
    rule: GroupAdvantageRule,
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
    rule: GroupAdvantageRule,
    workspace: Tensor,
    stream: int,
) -> None: ...
def logprob_scan(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    cap: float,
    ignore: int,
    state: Tensor,
    weighted: bool,
    threads: int,
) -> None: ...
def logprob_finish(state: Tensor, logprob: Tensor, lse: Tensor, entropy: Tensor | None) -> None: ...
def logprob_grad(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    cap: float,
    ignore: int,
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
    scale: float,
    cap: float,
    ignore: int,
    state: Tensor,
    weighted: bool,
    stream: int,
) -> None: ...
def cuda_logprob_finish(state: Tensor, logprob: Tensor, lse: Tensor, entropy: Tensor | None, stream: int) -> None: ...
def cuda_logprob_grad(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    cap: float,
    ignore: int,
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
) -> bool: ...
def token_returns(
    token_rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float, returns: Tensor, threads: int
) -> bool: ...
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
) -> bool: ...
def cuda_scale(values: Tensor, factor: Tensor, stream: int) -> None: ...
def cuda_architectures() -> str: ...
def cuda_runtime_version() -> tuple[int, int]: ...
def cuda_driver_version() -> tuple[int, int]: ...
def cuda_device_count() -> int: ...
def cuda_device(device: int) -> dict[str, str | int | tuple[int, int]]: ...
def cuda_unsupported_reason(device: int) -> str: ...

# ---- turnwise.state: the compiled part of its types; the rest is added in Python, in turnwise/state -----------------
class StateError(RuntimeError): ...
class PrunedError(StateError): ...
class FrozenError(StateError): ...
class OpaqueError(TypeError): ...
class CheckpointError(ValueError): ...

class StoreBase:
    _policies: dict[type, tuple[Any, ...] | None]
    _checks_shared: bool
    def state(self, data: Any, /) -> State: ...
    def states(self) -> list[State]: ...
    def _archive(self, states: list[State], /) -> tuple[bytes, list[Any], list[tuple[bool, int]]]: ...
    def _restore(self, structure: Any, leaves: list[Any], versions: list[tuple[bool, int]], /) -> list[State]: ...
    def _account(self) -> tuple[int, int, int, int]: ...

@final
class State:
    @property
    def data(self) -> Any: ...
    @property
    def frozen(self) -> bool: ...
    @property
    def pruned(self) -> bool: ...
    @property
    def store(self) -> Any: ...
    @overload
    def fork(self, n: None = None) -> State: ...
    @overload
    def fork(self, n: int) -> list[State]: ...
    def __deepcopy__(self, memo: Any, /) -> State: ...
    def commit(self) -> State: ...
    def rollback(self, to: State | None = None) -> None: ...
    def prune(self) -> None: ...
    def collect(self) -> int: ...
    def _settle(self) -> None: ...
    def _facade(self, facade: Any, /) -> Any: ...
    def _take_over(self, objects: list[Any], /) -> list[Any]: ...
    def _rooted_at(self, facade: Any, /) -> Any: ...
    def _values(self, shown: dict[int, Any], /) -> list[Any]: ...
    def _differing(self, other: State, /) -> bytes: ...
    def _changed_items(self, other: State, slot: int, other_slot: int, differs: bytes, /) -> list[Any] | None: ...
    def _put_live(self, container: Any, key: Any, object: Any, policy: tuple[Any, ...], /) -> None: ...
    def _path_of(self, object: Any, /) -> tuple[Any, ...] | None: ...
    # Added in turnwise/state/files.py.
    def save(self, path: Any) -> None: ...
    # Added in turnwise/state/versions.py.
    def diff(self, other: State) -> list[Any]: ...
    def writable(self, *path: Hashable) -> Any: ...
    def to_python(self) -> Any: ...

@final
class StateDict(dict[Any, Any]):
    @property
    def _state(self) -> State: ...
    @property
    def _slot(self) -> int: ...
    def _values(self, shown: dict[int, Any], /) -> list[Any]: ...

@final
class StateList(list[Any]):
    @property
    def _state(self) -> State: ...
    @property
    def _slot(self) -> int: ...
    def _values(self, shown: dict[int, Any], /) -> list[Any]: ...

class StateDictKeys:
    @property
    def mapping(self) -> StateDict: ...
    # Added in turnwise/state/containers.py, with the operators of a set.
    def isdisjoint(self, other: Iterable[Any]) -> bool: ...

class StateDictValues:
    @property
    def mapping(self) -> StateDict: ...

class StateDictItems:
    @property
    def mapping(self) -> StateDict: ...
    # Added in turnwise/state/containers.py, with the operators of a set.
    def isdisjoint(self, other: Iterable[Any]) -> bool: ...

class StateDictIterator: ...
class StateListIterator: ...

class TokenArray:
    def __init__(self, tokens: Iterable[int] = ()) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> TokenArray: ...
    def __setitem__(self, index: int, token: int, /) -> None: ...
    def append(self, token: int, /) -> None: ...
    def extend(self, tokens: Iterable[int], /) -> None: ...
    def pop(self) -> int: ...
    def clear(self) -> None: ...
    def _bytes(self) -> bytes: ...
    @property
    def _state(self) -> State | None: ...
    # Added in turnwise/state/tokens.py.
    def numpy(self) -> Any: ...
    def tolist(self) -> list[int]: ...

def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    allowed: Tensor | None,
    token: Tensor,
    logprob: Tensor,
    threads: int,
) -> None: ...

NORM_BLOCK: int

def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, inverse: Tensor | None, threads: int) -> None: ...
def rms_norm_grad(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    upstream: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor | None,
    threads: int,
) -> None: ...
def path_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begin: Tensor,
    end: Tensor,
    path: Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    out: Tensor,
    threads: int,
) -> None: ...
def tree_attention(
    begin: Tensor,
    subtree_end: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    threads: int,
) -> None: ...
def tree_attention_grad(
    begin: Tensor,
    subtree_end: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    threads: int,
) -> None: ...

class TokenTrie:
    def __init__(self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, least: int = 0) -> None: ...
    @property
    def source(self) -> np.ndarray: ...
    @property
    def depth(self) -> np.ndarray: ...
    @property
    def begin(self) -> np.ndarray: ...
    @property
    def parent(self) -> np.ndarray: ...
    @property
    def subtree_end(self) -> np.ndarray: ...
    @property
    def row_end(self) -> np.ndarray: ...
    def places(self, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray: ...
    def cut(self, max_tokens: int) -> tuple[np.ndarray, np.ndarray, int]: ...
