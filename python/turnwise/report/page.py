"""Writes the report of a run: one HTML file with its style, scripts and data inside, which needs no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from turnwise.report.read import ReportLimits, read_run
from turnwise.utils.files import replace_text

SCRIPTS = ("dom.js", "chart.js", "curves.js", "tokens.js", "episodes.js", "lanes.js", "main.js")
"""Scripts in page order: each uses those before it."""


def write_report(run_dir: str | Path, out: str | Path | None = None, limits: ReportLimits | None = None) -> Path:
    """Write the report of ``run_dir`` to ``out`` (default: ``run_dir/report.html``) and return its path.

    It also works during the run, and shows the steps so far. Raises ``ValueError`` for a folder without a run. Missing
    parent folders of ``out`` are created; if writing fails, they are removed, and no partial file stays.
    """
    folder = Path(run_dir)
    path = Path(out) if out is not None else folder / "report.html"
    if path.is_dir():
        raise ValueError(f"out={str(path)!r}: expected the name of a file to write, got a folder")
    page = render(read_run(folder, limits))
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, page)
    except BaseException:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    return path


def render(data: Mapping[str, Any]) -> str:
    """Build the page for ``data``, a result of :func:`~turnwise.report.read.read_run`."""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = {
        "title": html.escape(f"{data['name']} · turnwise"),
        "style": asset("style.css"),
        "script": "\n".join(asset(name) for name in SCRIPTS),
        "data": embed({**data, "written": written, "version": metadata.version("turnwise")}),
    }
    # Replace all parts in one pass, because the run's own text may contain the name of a part.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def embed(data: Mapping[str, Any]) -> str:
    """Return JSON for a ``<script>`` element, without any ``<``, so it can't end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half of a surrogate pair has no UTF-8 encoding; a completion cut in the middle of a character may contain one.
    return text.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")


def asset(name: str) -> str:
    return (resources.files("turnwise.report") / "assets" / name).read_text(encoding="utf-8")
