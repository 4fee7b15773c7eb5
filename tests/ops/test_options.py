from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from turnwise.ops import CISPO, GMPO, GSPO, KL, SAPO, Clip, ClipCov, ImportanceCorrection, KLCov, Rejection


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clip(low=-0.1), r"Clip\.low=-0\.1"),
        (lambda: Clip(high=math.nan), r"Clip\.high=nan"),
        (lambda: Clip(dual_clip=0.5), r"Clip\.dual_clip=0\.5"),
        (lambda: Clip(high=0.5, dual_clip=1.4), r"Clip\.dual_clip=1\.4.*1 \+ high"),
        (lambda: KL("k4"), r"KL\.estimator='k4'.*k1, abs"),
        (lambda: KL("k3", coef=-1), r"KL\.coef=-1"),
        (lambda: KL("k1+", 0.1, True), r"weighted=True: expected False with estimator='k1\+'.*estimator='k1'"),
        (lambda: KL("k3", importance_weighted=1), r"KL\.importance_weighted=1: expected True or False"),
        (lambda: ImportanceCorrection(level="row"), r"ImportanceCorrection\.level='row'"),
        (lambda: ImportanceCorrection(cap=0), r"ImportanceCorrection\.cap=0"),
        (lambda: ImportanceCorrection(bounds=(2, 1)), r"ImportanceCorrection\.bounds=\(2, 1\).*low < high"),
        (lambda: GSPO(low=-1), r"GSPO\.low=-1"),
        (lambda: CISPO(high=math.inf), r"CISPO\.high=inf"),
        (lambda: GMPO(high=math.nan), r"GMPO\.high=nan"),
        (lambda: SAPO(tau_positive=0), r"SAPO\.tau_positive=0"),
        (lambda: ClipCov(share=0), r"ClipCov\.share=0.*\(0, 1\]"),
        (lambda: ClipCov(lower=2, upper=1), r"ClipCov\.upper=1.*lower = 2"),
        (lambda: KLCov(share=1.5), r"KLCov\.share=1\.5"),
        (lambda: KLCov(coef=-1), r"KLCov\.coef=-1"),
        (lambda: Clip(low=True), r"Clip\.low=True: expected a finite number"),
        (lambda: KL(coef=None), r"KL\.coef=None"),
        (lambda: ClipCov(lower=None), r"ClipCov\.lower=None: expected a number"),
        (lambda: ImportanceCorrection(bounds=5), r"ImportanceCorrection\.bounds=5"),
        (lambda: ImportanceCorrection(bounds=(0.5, math.nan)), r"ImportanceCorrection\.bounds"),
        (lambda: ImportanceCorrection(cap=0.5, bounds=(0.5, 5)), r"cap=0\.5: expected more than bounds\[0\] = 0\.5"),
        (lambda: Rejection("row", "k1", 2.0), r"Rejection\.level='row': expected one of token, seq-sum"),
        (lambda: Rejection("token", "k4", 2.0), r"Rejection\.estimator='k4'"),
        (lambda: Rejection("token", "k2", 0), r"Rejection\.high=0: expected a finite number > 0"),
        (lambda: Rejection("token", "k2", 1.0, 0.5), r"Rejection\.low=0\.5: expected None, as k2 is never negative"),
        (lambda: Rejection("seq-max", "k1", 2.0), r"level='seq-max': expected estimator 'k2' or 'k3'"),
        (lambda: Rejection("token", "k1", 0.9), r"Rejection\.low=1\.1.*less than high = 0\.9"),
    ],
)
def test_nonsense_raises_when_built(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_defaults_are_the_usual_ones() -> None:
    assert Clip() == Clip(low=0.2, high=0.2, dual_clip=None)
    assert ImportanceCorrection() == ImportanceCorrection(level="token", cap=2.0)
    assert KL() == KL(estimator="k3", coef=1e-3, importance_weighted=False)


@pytest.mark.parametrize(
    "option", [Clip(dual_clip=3), GSPO(), CISPO(), SAPO(), GMPO(), ClipCov(), KLCov(), KL()], ids=str
)
def test_options_are_values(option) -> None:
    """Copied, sent to another process, used as keys: they stay equal, and nothing about them changes."""
    for same in (copy.deepcopy(option), pickle.loads(pickle.dumps(option)), dataclasses.replace(option)):
        assert same == option and hash(same) == hash(option) and same is not option
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(option, dataclasses.fields(option)[0].name, 0.1)
