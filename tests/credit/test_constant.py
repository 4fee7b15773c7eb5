from __future__ import annotations

from typing import Any

import pytest

from turnwise.credit import ConstantCredit


def test_the_same_for_all(make: Any) -> None:
    assert ConstantCredit(value=0.5).compute_columns([make(reward=3.0), make(reward=-1.0)]).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="value=nan"):
        ConstantCredit(value=float("nan"))
