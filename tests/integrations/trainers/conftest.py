"""SkyRL for its tests: `make test-all` installs it."""

from __future__ import annotations

import typing

import pytest
import typing_extensions


@pytest.fixture(scope="package")
def skyrl():
    """SkyRL's own module of estimators and losses."""
    with pytest.MonkeyPatch.context() as patch:
        # Before Python 3.12, pydantic refuses the TypedDicts of the standard library, which SkyRL gives it.
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        from skyrl.backends.skyrl_train.utils import ppo_utils
    return ppo_utils


@pytest.fixture
def own_names(skyrl):
    """SkyRL's registries as they are; what a test registers is gone after it."""
    registries = [skyrl.AdvantageEstimatorRegistry, skyrl.PolicyLossRegistry]
    before = [dict(registry._functions) for registry in registries]
    yield
    for registry, functions in zip(registries, before, strict=True):
        registry._functions = functions
