"""``turnwise view``: write the report of a run."""

from __future__ import annotations

import argparse
import webbrowser

from turnwise.cli.options import EXIT_OK
from turnwise.report import write_report
from turnwise.utils.registry import announce_code_of_run


def run(options: argparse.Namespace) -> int:
    announce_code_of_run(options.run_dir, "is not imported")
    path = write_report(options.run_dir, options.out)
    print(path)
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK
