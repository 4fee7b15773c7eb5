"""A turnwise task as an environment."""

from turnwise.integrations.verifiers import export_task

Taskset, Env, Harness = export_task("split_clues")
__all__ = ["Env", "Harness", "Taskset"]
