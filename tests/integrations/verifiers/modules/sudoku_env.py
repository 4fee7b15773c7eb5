"""turnwise's sudoku team as an environment."""

from turnwise.integrations.verifiers import export_task

Taskset, Env, Harness = export_task("sudoku")
__all__ = ["Env", "Harness", "Taskset"]
