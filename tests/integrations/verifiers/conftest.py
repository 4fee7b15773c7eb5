"""Collects these tests only where verifiers 0.4 is: `make test-verifiers`. Others have none, or an older one."""

from __future__ import annotations

from importlib import metadata


def _is_here() -> bool:
    try:
        return metadata.version("verifiers").startswith("0.4.")
    except metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if _is_here() else ["test_*.py"]
