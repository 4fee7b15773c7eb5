"""What all tests share: no network, and property tests that do not time out on a busy machine."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Before transformers is imported anywhere: a test that asks the Hub for a model fails at once instead of downloading.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and press it on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("turnwise", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("turnwise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` skip where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none here"))
