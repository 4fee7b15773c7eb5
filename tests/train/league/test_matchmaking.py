from __future__ import annotations

import numpy as np
import pytest

from turnwise.train.league.matchmaking import MATCHMAKERS, Latest, Prioritized, Uniform, chances

P_WIN = np.array([0.9, 0.5, 0.1])


def test_each_matchmakers_chances():
    assert chances(Uniform(), P_WIN) == pytest.approx([1 / 3] * 3)
    assert chances(Latest(k=2), P_WIN) == pytest.approx([0, 0.5, 0.5])
    assert chances(Latest(k=9), P_WIN) == pytest.approx([1 / 3] * 3)
    # Prioritized is AlphaStar's weighting.
    weights = np.array([0.1**2, 0.5**2, 0.9**2])
    assert chances(Prioritized(), P_WIN) == pytest.approx(weights / weights.sum())
    assert chances(Prioritized(power=1.0), P_WIN) == pytest.approx(np.array([0.1, 0.5, 0.9]) / 1.5)
    assert chances(Prioritized(), np.ones(4)) == pytest.approx([0.25] * 4), "all beaten: each as likely"
    assert set(MATCHMAKERS) == {"uniform", "latest", "prioritized"}


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="k=0"):
        Latest(k=0)
    with pytest.raises(ValueError, match="power=-1"):
        Prioritized(power=-1)

    class Odd:
        def weights(self, p_win):
            return p_win - 1

    with pytest.raises(ValueError, match=r"Odd\.weights"):
        chances(Odd(), P_WIN)
