"""Sections of the learner: what holds and trains the weights, this process or a server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnwise.train.config.base import Section


class TinkerConfig(Section):
    """A server of the Tinker API that holds, trains and samples the adapters; see docs/tinker.md."""

    server: Literal["hosted", "skyrl", "skyrl-jax"] = "hosted"
    """Server: Tinker's own service, or SkyRL with its FSDP or Megatron backend, or with its JAX backend."""
    base_url: str | None = None
    """Address of the server; by default that of the hosted service."""
    base_model: str | None = None
    """The server's name of the base model; by default the ``path`` of the policies."""
    api_key_env: str = "TINKER_API_KEY"
    """Environment variable with the key. SkyRL checks none, but the SDK wants one that begins with ``tml-``."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that one answer may take."""
    patience: float = Field(default=60.0, gt=0)
    """Seconds that the server may be unreachable before the run ends."""


class LearnerConfig(Section):
    """The learner: what holds and trains the weights of the policies."""

    type: Literal["local", "tinker"] = "local"
    """``local`` trains here, or in shards over the processes of torchrun; ``tinker`` lets a server train."""
    tinker: TinkerConfig = TinkerConfig()
    """The server of the learner ``tinker``."""
