"""``turnwise credit``: recompute the advantages of recorded episodes with another credit rule."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from turnwise.cli.options import EXIT_OK, parse_pairs
from turnwise.report.credit import compare_credit, differences, render
from turnwise.utils.registry import announce_code_of_run


def run(options: argparse.Namespace) -> int:
    announce_code_of_run(options.run_dir)
    rule_options = parse_pairs("--set", options.set, str)
    found = compare_credit(options.run_dir, options.rule, options=rule_options, step=options.step)
    if options.json:
        print(json.dumps({**asdict(found), "actors": [asdict(row) for row in differences(found)]}))
    else:
        print(render(found), end="")
    return EXIT_OK
