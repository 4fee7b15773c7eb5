"""MkDocs hook: the pages that are generated while the documentation is built, the config reference and the API."""

from __future__ import annotations

import importlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

import turnwise
from turnwise.cli.look.config import markdown

ROOMS = ("arena", "credit", "inference", "ops", "state", "tasks", "train", "types")
"""Rooms whose public names the API page lists, beside those of ``turnwise`` itself."""


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "config.md", content=markdown()))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def api() -> str:
    """List the public names of every room; a name of ``turnwise`` itself is listed in its room."""
    lines = ["# API", "", f"`import turnwise as tw` has {', '.join(f'`tw.{name}`' for name in turnwise.__all__)}."]
    for room in ROOMS:
        module = importlib.import_module(f"turnwise.{room}")
        lines += ["", f"## turnwise.{room}", "", (module.__doc__ or "").strip().partition("\n")[0], ""]
        for name in module.__all__:
            documented = callable(getattr(module, name))
            lines += [f"::: turnwise.{room}.{name}", ""] if documented else []
    return "\n".join(lines)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the reStructuredText roles of docstrings: ``:class:`` before a name, the second colon of ``Example::``."""
    html = re.sub(r":(?:class|func|meth|mod|attr|data):(?=<code>)", "", html)
    return re.sub(r"(<code>)~(?:\w+\.)+|(:):(?=</p>)", r"\1\2", html)
