"""Collects these tests only where verl 0.9 is with its dependencies: `make test-verl`. Others have functions of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path


def _is_here() -> bool:
    try:
        here = metadata.version("verl").startswith("0.9.")
    except metadata.PackageNotFoundError:
        return False
    return here and importlib.util.find_spec("transfer_queue") is not None


if _is_here():  # verl reads these when it is imported
    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the name under which verl registers its FSDP engine
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_on_cpu"
    sys.path.insert(0, str(Path(__file__).parent / "modules"))

collect_ignore_glob = [] if _is_here() else ["test_*.py"]
