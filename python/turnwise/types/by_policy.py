"""A value for each policy of a run, such as its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from turnwise.types.model_calls import Tokenizer

T = TypeVar("T")
V = TypeVar("V")


class ByPolicy(Generic[T]):
    """A value for each policy. If all policies have the same one, it serves every name.

    A past version of a policy, such as ``"solver@past1"``, has the policy's value. ``what`` names the value in errors.

    Example::

        tokenizers = ByPolicy.of({"solver": qwen, "critic": llama}, "tokenizer")
        assert tokenizers["critic@past0"] is llama
        assert ByPolicy.of(qwen, "tokenizer")["any"] is qwen
    """

    __slots__ = ("_common", "_values", "_what")

    def __init__(self, values: Mapping[str, T], what: str) -> None:
        if not values:
            raise ValueError(f"{what}={values!r}: expected one for each policy")
        self._values, self._what = dict(values), what
        first, *others = self._values.values()
        self._common: tuple[T, ...] = (first,) if all(each is first or each == first for each in others) else ()

    @classmethod
    def of(cls, given: T | Mapping[str, T] | ByPolicy[T], what: str) -> ByPolicy[T]:
        """Return ``given`` as it is, by policy, or one value of all policies."""
        if isinstance(given, ByPolicy):
            return given
        return cls(given if isinstance(given, Mapping) else {"default": given}, what)

    def __getitem__(self, policy: str) -> T:
        """Return the value of ``policy``. Raises ``ValueError`` for one without."""
        if self._common:
            return self._common[0]
        name = policy if policy in self._values else policy.partition("@")[0]
        if name not in self._values:
            raise ValueError(f"policy {policy!r}: it has no {self._what}, expected one of {sorted(self._values)}")
        return self._values[name]

    @property
    def plain(self) -> T | dict[str, T]:
        """The one value, or those by policy: what :meth:`of` takes."""
        return self._common[0] if self._common else dict(self._values)

    def alike(self, one: str, other: str) -> bool:
        """Return True if two policies have the same value."""
        return bool(self._common) or self[one] is self[other]

    def common(self, policies: Iterable[str] | None = None, hint: str = "") -> T:
        """Return the one value of ``policies``, by default of all. Raises ``ValueError`` with ``hint`` for several."""
        if self._common:
            return self._common[0]
        names = list(self._values if policies is None else policies)
        first = self[names[0]]
        if other := next((name for name in names if not self.alike(name, names[0])), ""):
            raise ValueError(f"policies {names[0]!r} and {other!r} differ in their {self._what}{hint and f': {hint}'}")
        return first

    def mapped(self, change: Callable[[T], V]) -> ByPolicy[V]:
        """Return ``change`` of each value, once for values that policies share."""
        changed: dict[int, Any] = {}
        for value in self._values.values():
            if id(value) not in changed:
                changed[id(value)] = change(value)
        return ByPolicy({name: changed[id(value)] for name, value in self._values.items()}, self._what)


Tokenizers = Tokenizer | Mapping[str, Tokenizer] | ByPolicy[Tokenizer]
"""One tokenizer of all policies, or each policy's."""
