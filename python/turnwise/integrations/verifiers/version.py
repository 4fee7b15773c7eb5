"""The version of verifiers that the adapter is written for."""

from __future__ import annotations

from importlib import metadata

NEEDED = "expected verifiers 0.4: pip install 'turnwise[verifiers]', in an environment without openai 3"


def check_version() -> None:
    """Raise ``ImportError`` unless verifiers 0.4 is installed. Its API v1 is new, and older ones are another API."""
    try:
        found = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ImportError(f"verifiers is not installed; {NEEDED}") from None
    if found.split(".")[:2] != ["0", "4"]:
        raise ImportError(f"verifiers {found} is installed; {NEEDED}")
