"""Sandbox for untrusted Python programs, such as a model's: each runs in a process that may only compute.

Read in this order: sandbox, child, seccomp, surface, limited, limited_child, templates.
May import: the standard library.
"""

from __future__ import annotations

from turnwise.sandbox.sandbox import Returned, Sandbox, SandboxError, SandboxLimits, SandboxRun

__all__ = ["Returned", "Sandbox", "SandboxError", "SandboxLimits", "SandboxRun"]
