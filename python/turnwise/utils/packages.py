"""Says in one sentence which package a room lacks, where turnwise was installed without its requirements."""

from __future__ import annotations

import importlib.util


def require(room: str, *modules: str) -> None:
    """Raise ``ImportError`` if ``room`` lacks one of ``modules``."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        names = " and ".join(missing)
        raise ImportError(f"{room} needs {names}: pip install {' '.join(missing)}", name=missing[0])
