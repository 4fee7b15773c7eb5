"""verifiers, both ways: its v1 environments as tasks, and turnwise's tasks as environments for other trainers.

Read in this order: client, episode, task, players, export.
May import: types, utils, state, chat, arena, inference, tasks, integrations.gateway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.integrations.verifiers.export import export_task

__all__ = ["export_task"]


def __getattr__(name: str) -> Any:
    if name != "export_task":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise.integrations.verifiers.export import export_task

    return export_task
