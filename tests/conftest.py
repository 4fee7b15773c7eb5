"""What all tests share: no network, and property tests that do not time out on a busy machine."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before transformers is imported anywhere: a test that asks the Hub for a model fails at once instead of downloading.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("turnwise", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("turnwise")
