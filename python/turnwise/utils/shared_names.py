"""Names that the processes of one run share: files in the run's folder, and the variable with the run's secret."""

from __future__ import annotations

from pathlib import Path

MEMBERS = Path("cluster") / "members.json"
"""File of a run folder with the addresses of the run's processes. Its supervisor replaces it whole."""

EVENTS = Path("cluster") / "events.jsonl"
"""File of a run folder in which the supervisor notes what happened to each process."""

KEY_VARIABLE = "TURNWISE_CLUSTER_KEY"
"""Environment variable with the secret of a run, by which its processes know each other."""
