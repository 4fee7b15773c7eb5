"""``turnwise demo --explain``: what the demo's credit is, before anything trains."""

from __future__ import annotations

import argparse
import importlib

from turnwise.cli.options import EXIT_OK
from turnwise.report.explain import explain_as_page, explain_as_text
from turnwise.utils.files import replace_text
from turnwise.utils.output import say


def demo(options: argparse.Namespace) -> int:
    """Explain, or run the demo, which imports torch."""
    if not options.explain:
        code: int = importlib.import_module("turnwise.cli.run.demo").run(options)
        return code
    say(explain_as_text())
    page = options.out / "explain.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_text(page, explain_as_page())
    say(f"\nThe same as a page: {page}")
    return EXIT_OK
