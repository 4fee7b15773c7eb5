"""The page itself: one HTML file that asks nothing of the network, its style, script and data inside."""

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

from turnwise.report.read import Limits, read_run
from turnwise.utils.files import replace_text

SCRIPTS = ("dom.js", "chart.js", "curves.js", "tokens.js", "episodes.js", "main.js")
"""Scripts in page order: each uses those before it."""


def write_report(run_dir: str | Path, out: str | Path | None = None, limits: Limits | None = None) -> Path:
    """Write the report of ``run_dir`` to ``out`` (default: ``run_dir/report.html``) and return its path.

    Works while the run goes on, and shows it as far as it is. Raises ``ValueError`` for a folder without a run. Folders
    that are missing above ``out`` are made; where writing fails, neither they nor a part of the file stay.
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
    """The page of ``data``, as :func:`~turnwise.report.read.read_run` gives it."""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = {
        "title": html.escape(f"{data['name']} · turnwise"),
        "style": asset("style.css"),
        "script": "\n".join(asset(name) for name in SCRIPTS),
        "data": embed({**data, "written": written, "version": metadata.version("turnwise")}),
    }
    # One pass: what a run wrote may itself hold the name of a part.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def embed(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a ``<script>`` element: no ``<``, so nothing in it ends the element or opens a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone half of a surrogate pair has no UTF-8; a completion that was cut in the middle of a character may hold one.
    return text.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")


def asset(name: str) -> str:
    return (resources.files("turnwise.report") / "assets" / name).read_text(encoding="utf-8")
