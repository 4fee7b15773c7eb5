"""The commands that read a run: ``view``, ``diagnose``, ``credit``, ``rescore``, ``replay``. ``status`` has a file."""

from __future__ import annotations

import argparse
import json
import webbrowser
from dataclasses import asdict

from turnwise.cli.options import EXIT_FAILED, EXIT_OK, parse_pairs
from turnwise.utils.output import say
from turnwise.utils.registry import announce_code_of_run


def view(options: argparse.Namespace) -> int:
    """Write the report of a run."""
    from turnwise.report import write_report

    announce_code_of_run(options.run_dir, "is not imported")
    path = write_report(options.run_dir, options.out)
    say(path)
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK


def diagnose(options: argparse.Namespace) -> int:
    """Say what ails a run, with the episodes that show it."""
    from turnwise.report.diagnose import diagnose_run, render, to_json

    found = diagnose_run(options.run_dir)
    say(to_json(found) if options.json else render(found, options.run_dir))
    return EXIT_OK


def credit(options: argparse.Namespace) -> int:
    """Recompute the advantages of recorded episodes with another credit rule."""
    if options.trace is not None:
        from turnwise.report.trace import render_trace, trace_rewards

        trace = trace_rewards(options.run_dir, options.trace or None, step=options.step)
        say(json.dumps(asdict(trace)) if options.json else render_trace(trace))
        return EXIT_OK
    from turnwise.report.credit import compare_credit, differences, render

    announce_code_of_run(options.run_dir)
    rule_options = parse_pairs("--set", options.set, str)
    comparison = compare_credit(options.run_dir, options.rule, options=rule_options, step=options.step)
    if options.json:
        say(json.dumps({**asdict(comparison), "actors": [asdict(row) for row in differences(comparison)]}))
    else:
        say(render(comparison))
    return EXIT_OK


def rescore(options: argparse.Namespace) -> int:
    """Score recorded episodes with another rubric."""
    from turnwise.report.rescore import render, rescore, rubric_named

    announce_code_of_run(options.run_dir)
    rubric = rubric_named(options.rubric)
    out = options.out or options.run_dir / "rescored" / options.rubric.rpartition(":")[2]
    done = rescore(options.run_dir, rubric, out, episode_type=options.episode_type)
    say(json.dumps({**asdict(done), "folder": str(done.folder)}) if options.json else render(done))
    return EXIT_OK


def replay(options: argparse.Namespace) -> int:
    """Run a recorded episode again and show the first difference."""
    from turnwise.replay.replay import replay as replay_episode

    announce_code_of_run(options.run_dir)
    replayed = replay_episode(
        options.run_dir,
        options.episode,
        step=options.step,
        until=options.until,
        swap=options.swap,
        allow_pickle=options.allow_pickle,
    )
    say(replayed)
    return EXIT_OK if replayed.divergence is None else EXIT_FAILED
