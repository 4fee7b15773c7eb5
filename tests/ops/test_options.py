from __future__ import annotations

import math

import pytest

from turnwise.ops import KL, Clip, ImportanceCorrection


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clip(low=-0.1), r"Clip\.low=-0\.1"),
        (lambda: Clip(high=math.nan), r"Clip\.high=nan"),
        (lambda: Clip(dual=0.5), r"Clip\.dual=0\.5"),
        (lambda: Clip(high=0.5, dual=1.4), r"Clip\.dual=1\.4.*1 \+ high"),
        (lambda: KL("k4"), r"KL\.kind='k4'.*k1, abs"),
        (lambda: KL("k3", coef=-1), r"KL\.coef=-1"),
        (lambda: ImportanceCorrection(level="row"), r"ImportanceCorrection\.level='row'"),
        (lambda: ImportanceCorrection(cap=0), r"ImportanceCorrection\.cap=0"),
    ],
)
def test_nonsense_raises_when_built(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_defaults_are_the_usual_ones() -> None:
    assert Clip() == Clip(low=0.2, high=0.2, dual=None)
    assert ImportanceCorrection() == ImportanceCorrection(level="token", cap=2.0)
    assert KL().kind == "k3"
