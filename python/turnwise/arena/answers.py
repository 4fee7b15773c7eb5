"""Changes that an action makes to the team's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from turnwise.state import to_python


@dataclass(frozen=True, slots=True)
class Contribution:
    """Counts of an actor's changes to the answers that it received.

    An answer has one part, or several that are right or wrong each, such as the rows of a grid.

    Example: the reviser got two drafts with three wrong parts. It changed one draft and fixed two parts:
    ``Contribution(handed=2, changed=1, wrong=3, fixed=2, right=5, broken=0)``
    """

    handed: int = 0
    """Answers that the actor received."""
    changed: int = 0
    """Answers that it changed."""
    wrong: int = 0
    """Wrong parts that it received."""
    fixed: int = 0
    """Wrong parts that it fixed."""
    right: int = 0
    """Right parts that it received."""
    broken: int = 0
    """Right parts that it broke."""

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def rates(self) -> dict[str, float]:
        """Return the shares ``changed``, ``fixed`` and ``broken``; shares with a zero denominator are omitted."""
        shares = {"changed": self.handed, "fixed": self.wrong, "broken": self.right}
        return {name: getattr(self, name) / count for name, count in shares.items() if count}


def plain_answer(found: Any, where: str) -> tuple[Any, tuple[bool, ...]] | None:
    """Return a copy of the result of a ``team_answer`` hook, with its parts as a tuple.

    Raises ``TypeError`` for a result that is no answer; ``where`` names the hook in the error.
    """
    if found is None:
        return None
    plain = to_python(found)
    if not isinstance(plain, tuple) or len(plain) != 2:
        raise TypeError(f"{where} gave {plain!r}: expected (answer, right), or None")
    answer, right = plain
    return answer, tuple(map(bool, right)) if isinstance(right, Sequence) else (bool(right),)


def contribution_of(
    handed: tuple[Any, Sequence[bool]], left: tuple[Any, Sequence[bool]] | None, where: str = "team_answer"
) -> Contribution:
    """Compare the answer before an action with the answer after it. ``None`` after it means that the answer is lost.

    Raises ``ValueError`` if they have different numbers of parts; ``where`` names the hook in the error.

    Example: ``contribution_of(("1_", [True, False]), ("12", [True, True])) == Contribution(1, 1, 1, 1, 1, 0)``
    """
    answer, before = handed
    after = [False] * len(before) if left is None else left[1]
    if len(before) != len(after):
        raise ValueError(f"{where} gave {len(before)} parts before an action, then {len(after)}: expected as many")
    return Contribution(
        handed=1,
        changed=int(left is None or bool(left[0] != answer)),
        wrong=before.count(False),
        fixed=sum(now and not then for then, now in zip(before, after, strict=True)),
        right=before.count(True),
        broken=sum(then and not now for then, now in zip(before, after, strict=True)),
    )
