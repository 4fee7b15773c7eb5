"""The settings of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from turnwise.utils.registry import did_you_mean
from turnwise.utils.values import problem

MAX_TOKENS = 8192
"""Tokens of an answer by default, or what the context leaves if that is less: calls of tools may write whole files."""
DEEPEST = 64
"""Most levels of sub-agents, which are levels of nested results too."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of a :class:`~turnwise.integrations.gateway.Gateway`, and the table ``[gateway]`` of a config.

    Example: ``GatewaySettings(renderer="qwen3", chat_template_kwargs={"enable_thinking": False})``
    """

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback is open to other hosts, and keys travel unencrypted."""
    allowed_hosts: Sequence[str] = ()
    """Further names under which agents reach the gateway. Addresses, loopback and the machine's own names always do."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    renderer: str = "auto"
    """Chat format: a family such as ``"qwen3"``, ``"template"``, or ``"auto"``, which finds the family that renders as
    the tokenizer's template does."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template, such as ``enable_thinking``."""
    sampling: Literal["actor", "agent"] = "actor"
    """Whose temperature and top-p count in training. Agents commonly send 0, and then all attempts are equal. An
    evaluation takes the agent's."""
    choices: Literal["all", "continued"] = "all"
    """The choices of ``n`` that train: all, or only those that a later prompt continues."""
    repeats: Literal["continued", "all"] = "continued"
    """The equal requests that train, each made after the answer to the one before: ``"continued"`` leaves out
    answers that no prompt continues if one does continue a later answer, as their client lost them and asked again."""
    structured: Literal["shown", "constrained"] = "shown"
    """Structured output and forced calls: ``"shown"`` asks for them in the prompt; ``"constrained"`` samples only
    tokens that fit, which needs ``llguidance`` and a client that can."""
    on_context: Literal["end", "fail"] = "end"
    """Reaction if an agent fails because a prompt left no room in the context: ``"end"`` ends the attempt there, and
    its answers are scored and train; ``"fail"`` fails it."""
    max_calls: int = 200
    """Calls of one session."""
    max_parallel: int = 32
    """Calls of one session that run at once; more wait."""
    call_timeout: float = 600.0
    """Seconds that a call may wait for its turn."""
    max_body: int = 4 << 20
    """Bytes of a request."""
    max_total_body: int = 256 << 20
    """Bytes of all requests of one session."""
    max_total_tokens: int = 100_000_000
    """Tokens of all prompts of one session, of those too that are only counted."""
    max_connections: int = 4096
    """Connections that are open at once, one for each call under way; a container has at most 64."""
    max_children: int = 256
    """Sub-agents of one session."""
    max_depth: int = 8
    """Sub-agents in each other, at most 64."""

    def __post_init__(self) -> None:
        bounds = ("max_calls", "max_parallel", "call_timeout", "max_body", "max_total_body", "max_total_tokens")
        for name in (*bounds, "max_connections", "max_children", "max_depth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number > 0")
        if self.max_depth > DEEPEST:
            raise ValueError(f"max_depth={self.max_depth!r}: expected at most {DEEPEST}")
        if isinstance(self.allowed_hosts, str):
            raise ValueError(f"allowed_hosts={self.allowed_hosts!r}: expected a list of names")
        modes = {"sampling": ("actor", "agent"), "choices": ("all", "continued"), "repeats": ("continued", "all")}
        modes |= {"structured": ("shown", "constrained"), "on_context": ("end", "fail")}
        for name, values in modes.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {values}")


def read_settings(given: Mapping[str, Any], also: Sequence[str] = ()) -> GatewaySettings:
    """Return the settings of the config table ``[gateway]``.

    Raises ``ValueError`` for an unknown key, naming the nearest of the known ones and of those that the table may
    ``also`` have.
    """
    names = [field.name for field in fields(GatewaySettings)]
    for name in given:
        if name not in names:
            near = did_you_mean(name, [*names, *also])
            raise ValueError(problem(f"gateway.{name}", f"unknown; {near}", given[name]))
    return GatewaySettings(**given)
