"""Forkable Python state: a copy-on-write store for tree-structured rollouts. Imports neither torch nor numpy.

Read in this order: store, forks, versions, forkable, files.
May import: _C, utils.
"""

from turnwise._C import (
    CheckpointError,
    FrozenError,
    OpaqueError,
    PrunedError,
    State,
    StateDict,
    StateError,
    StateList,
    TokenArray,
)
from turnwise.state import containers as _containers  # noqa: F401 - completes the compiled types
from turnwise.state import tokens as _tokens  # noqa: F401
from turnwise.state.forkable import ForkableMixin
from turnwise.state.forks import fork_many, forkable, prune
from turnwise.state.plain import to_python
from turnwise.state.store import Policy, Store, load
from turnwise.state.versions import ABSENT, Change, Stats

__all__ = [
    "ABSENT",
    "Change",
    "CheckpointError",
    "ForkableMixin",
    "FrozenError",
    "OpaqueError",
    "Policy",
    "PrunedError",
    "State",
    "StateDict",
    "StateError",
    "StateList",
    "Stats",
    "Store",
    "TokenArray",
    "fork_many",
    "forkable",
    "load",
    "prune",
    "to_python",
]
