"""The command line: ``turnwise demo | train | eval | tournament | view | credit | replay | serve | bench | doctor``.

Commands stand in one table at the end; what a command does is in the room that it calls, imported when it runs.
A user's mistake is one line on stderr and exit code 2, a run that fails (no memory, no backend, a dead server) one line
and exit code 1; ``--traceback`` shows where it was raised. Ctrl-C exits 130.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.command_words import literal, parse_pairs, split_overrides
from turnwise.naming import tell_code, tell_code_of

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

USER_ERRORS = (ValueError, TypeError, OSError, ImportError)
"""What a mistake of the user raises."""

RUN_ERRORS = (RuntimeError, FloatingPointError)
"""What a failed run raises, a loss that is no number among it; all else is a bug and keeps its traceback."""


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command. ``arguments`` are ``add_argument`` calls; with ``overrides`` it takes dotted config keys too."""

    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: tuple[tuple[str, dict[str, Any]], ...] = ()
    overrides: bool = False

    def option_names(self) -> set[str]:
        return {name for name, _ in (*self.arguments, *COMMON) if name.startswith("-")} | {"-h", "--help"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``turnwise`` with ``argv`` (default: the process's) and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(arguments)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("turnwise: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe left (`turnwise doctor | head`): nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (*USER_ERRORS, *RUN_ERRORS) as error:
        if "--traceback" in arguments:
            raise
        print(f"turnwise: {describe(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, USER_ERRORS) else EXIT_FAILED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one call. ``run`` holds the command's function, ``overrides`` its dotted keys, in order."""
    name = next((word for word in arguments if not word.startswith("-")), None)
    command = COMMANDS.get(name) if name else None
    overrides: dict[str, str] = {}
    if command is not None and command.overrides:
        arguments, overrides = split_overrides(arguments, known=command.option_names())
    options = build_parser().parse_args(arguments)
    options.overrides = overrides
    return options


def describe(error: BaseException) -> str:
    """An error as its class would say it in one line: ``No such file or directory: 'run.toml'``."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename!r}"
    return str(error).strip() or type(error).__name__


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnwise", description="Trains teams of LLM agents with reinforcement learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"turnwise {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        overrides = "Config keys are overridden with --section.key value." if command.overrides else None
        sub = commands.add_parser(
            name, help=command.help, description=command.help, epilog=overrides, allow_abbrev=False
        )
        for argument, settings in (*command.arguments, *COMMON):
            sub.add_argument(argument, **settings)
        sub.set_defaults(run=command.run)
    return parser


def _version() -> str:
    import turnwise

    return turnwise.__version__


# ---------------------------------------------------------------------------------------------------------------------
# The commands
# ---------------------------------------------------------------------------------------------------------------------
def run_demo(options: argparse.Namespace) -> int:
    from turnwise.demo import run_demo as run

    summary = run(out=options.out, seed=options.seed, compare=options.compare, client=options.client)
    if summary is None:
        print("turnwise: interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def run_train(options: argparse.Namespace) -> int:
    from turnwise.report import write_report
    from turnwise.run import dry_run, train_from_config
    from turnwise.tasks import task_type
    from turnwise.train.config_files import raw_settings, read_config

    imports = options.import_code or not options.dry_run
    if options.dry_run:
        tell_code(raw_settings(options.config, options.overrides), "is imported" if imports else "is not imported")
    config = read_config(options.config, options.overrides, task_type=task_type, import_code=imports)
    if options.dry_run:
        print(dry_run(config, import_code=options.import_code), end="")
        return EXIT_OK

    run = train_from_config(config)
    run.close()
    if config.steps:
        print(f"report: {write_report(config.run_dir)}")
    return EXIT_INTERRUPTED if run.trainer.interrupted else EXIT_OK


def run_eval(options: argparse.Namespace) -> int:
    from turnwise.evaluation import config_path, measure, render, to_json
    from turnwise.tasks import task_type
    from turnwise.train.config_files import raw_settings, read_config

    tell_code(raw_settings(config_path(options.config), options.overrides))
    config = read_config(config_path(options.config), options.overrides, task_type=task_type)
    if options.config.is_dir():
        config = config.model_copy(update={"run_dir": options.config})
    measured = measure(
        config, options.checkpoint, options.against, samples=options.samples, temperature=options.temperature
    )
    print(json.dumps(to_json(measured), indent=1) if options.json else render(measured))
    return EXIT_OK


def run_tournament(options: argparse.Namespace) -> int:
    from turnwise.tournament import play_tournament, render, to_json

    for run_dir in options.run_dirs:
        tell_code_of(run_dir)
    result = play_tournament(
        options.run_dirs,
        checkpoints=options.checkpoints,
        games=options.games,
        task=options.task,
        baselines=options.baselines,
    )
    print(json.dumps(to_json(result), indent=1) if options.json else render(result))
    return EXIT_OK


def run_view(options: argparse.Namespace) -> int:
    from turnwise.report import write_report

    tell_code_of(options.run_dir, "is not imported")
    path = write_report(options.run_dir, options.out)
    print(path)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK


def run_credit(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from turnwise.report.credit import compare_credit, differences, render

    tell_code_of(options.run_dir)
    found = compare_credit(
        options.run_dir, options.rule, options=parse_pairs("--set", options.set, str), step=options.step
    )
    if options.json:
        print(json.dumps({**asdict(found), "actors": [asdict(row) for row in differences(found)]}))
    else:
        print(render(found), end="")
    return EXIT_OK


def run_replay(options: argparse.Namespace) -> int:
    from turnwise.replay import replay

    tell_code_of(options.run_dir)
    played = replay(
        options.run_dir,
        options.episode,
        step=options.step,
        until=options.until,
        swap=options.swap,
        allow_pickle=options.allow_pickle,
    )
    print(played)
    return EXIT_OK if played.divergence is None else EXIT_FAILED


def run_serve(options: argparse.Namespace) -> int:
    from turnwise.serve import ServeSettings, serve_until_stopped

    serve_until_stopped(
        ServeSettings(
            options.model,
            options.host,
            options.port,
            api_key_env=options.api_key_env,
            allowed_hosts=tuple(options.allowed_host),
            adapters=parse_pairs("--adapters", options.adapters, str),
            adapter_slots=options.adapter_slots,
            adapter_rank=options.adapter_rank,
            kv_cache_gb=options.kv_cache_gb,
            max_num_seqs=options.max_num_seqs,
            engine_args=parse_pairs("--engine-arg", options.engine_arg, literal),
            restarts=options.restarts,
        )
    )
    return EXIT_OK


def run_bench(options: argparse.Namespace) -> int:
    import turnwise

    # The benches compare with other trainers and are no part of the wheel: they stand in the source tree alone.
    places = [Path(turnwise.__file__).resolve().parents[2], Path.cwd()]
    script = next((at / "bench" / "run.py" for at in places if (at / "bench" / "bench_policy_loss.py").is_file()), None)
    if script is None:
        raise ValueError(
            "bench: the benches are in turnwise's source tree, not in the installed package: run `turnwise bench` from "
            "the folder of a source checkout, or `make bench` there"
        )
    words = [*options.names, *(["--json"] if options.json else []), *(["--quick"] if options.quick else [])]
    return subprocess.run([sys.executable, str(script), *words], check=False).returncode


def run_doctor(options: argparse.Namespace) -> int:
    from turnwise.doctor import examine, render

    checks = examine()
    print(render(checks, as_json=options.json, colour=sys.stdout.isatty()))
    return EXIT_FAILED if any(check.status == "broken" for check in checks) else EXIT_OK


CONFIG = ("config", {"type": Path, "metavar": "CONFIG.toml", "help": "what to run, see docs/training.md"})

COMMON: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--traceback", {"action": "store_true", "help": "show where an error was raised"}),
)

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "Train a team of two agents to solve 4x4 sudoku on this machine.",
        run_demo,
        (
            (
                "--compare",
                {"action": "store_true", "help": "beside a single agent and an untrained team; takes longer"},
            ),
            ("--seed", {"type": int, "default": 0, "help": "of puzzles, weights and sampling (default 0)"}),
            ("--out", {"type": Path, "default": Path("runs/demo"), "help": "folder of the run (default runs/demo)"}),
            ("--client", {"default": "transformers", "help": "what samples, as rollout.client names it: vllm, ..."}),
        ),
    ),
    "train": Command(
        "Train the policies that a config file describes.",
        run_train,
        (
            CONFIG,
            ("--dry-run", {"action": "store_true", "help": "print the resolved config and stop"}),
            (
                "--import-code",
                {"action": "store_true", "help": "with --dry-run: run the code that the config names, to check it"},
            ),
        ),
        overrides=True,
    ),
    "eval": Command(
        "Measure held-out success of the policies that a config file describes.",
        run_eval,
        (
            ("config", {"type": Path, "metavar": "CONFIG.toml|RUN_DIR", "help": "what to measure, or its run folder"}),
            ("--checkpoint", {"help": "newest (the default), best, start, step_00000010, or a folder"}),
            ("--against", {"metavar": "CHECKPOINT", "help": "compare with this one, question by question"}),
            ("--samples", {"type": int, "default": 1, "help": "answers to each question, for pass@k (default 1)"}),
            ("--temperature", {"type": float, "help": "default: 0, and rollout.temperature for several samples"}),
            ("--json", {"action": "store_true", "help": "as JSON, for scripts"}),
        ),
        overrides=True,
    ),
    "tournament": Command(
        "Let checkpoints of one or several runs play against each other: payoffs and ratings, with intervals.",
        run_tournament,
        (
            ("run_dirs", {"type": Path, "nargs": "+", "metavar": "RUN_DIR", "help": "folders of runs"}),
            (
                "--checkpoints",
                {"nargs": "+", "default": ["all"], "metavar": "NAME", "help": "all (default), newest, best, ..."},
            ),
            ("--games", {"type": int, "default": 200, "help": "games of each pair, half from each seat (default 200)"}),
            ("--task", {"help": "what is played (default: what the runs trained on)"}),
            (
                "--baselines",
                {"nargs": "*", "metavar": "NAME", "help": "scripted players of the task (default: all that it has)"},
            ),
            ("--json", {"action": "store_true", "help": "as JSON, for scripts"}),
        ),
    ),
    "view": Command(
        "Write the report of a run, finished or not: its curves and its episodes, as one HTML file.",
        run_view,
        (
            ("run_dir", {"type": Path, "metavar": "RUN_DIR", "help": "folder of the run"}),
            ("--out", {"type": Path, "metavar": "FILE", "help": "to write (default: RUN_DIR/report.html)"}),
            ("--open", {"action": "store_true", "help": "and open it in the browser"}),
        ),
    ),
    "credit": Command(
        "Compute the advantages of a run's recorded episodes with another credit rule, and show what differs.",
        run_credit,
        (
            ("run_dir", {"type": Path, "metavar": "RUN_DIR", "help": "folder of the run"}),
            ("--rule", {"metavar": "NAME", "help": "a rule or module:Class (default: the run's own)"}),
            ("--step", {"type": int, "metavar": "N", "help": "show this training step alone"}),
            (
                "--set",
                {"action": "append", "default": [], "metavar": "OPTION=VALUE", "help": "an option of the rule's"},
            ),
            ("--json", {"action": "store_true", "help": "as JSON, with every call"}),
        ),
    ),
    "replay": Command(
        "Run a recorded episode again from its record, and tell where the two differ first; then the exit code is 1.",
        run_replay,
        (
            ("run_dir", {"type": Path, "metavar": "RUN_DIR", "help": "folder of the run"}),
            ("--episode", {"metavar": "ID", "help": "such as e5 or, nested, e5.0 (default: the newest recorded one)"}),
            ("--step", {"type": int, "metavar": "N", "help": "of this training step"}),
            ("--until", {"type": int, "metavar": "K", "help": "stop after K model calls and show what comes next"}),
            (
                "--swap",
                {
                    "action": "append",
                    "default": [],
                    "metavar": "ACTOR=POLICY[@CHECKPOINT]",
                    "help": "from there, or from the start, sample this actor anew; may be repeated",
                },
            ),
            ("--allow-pickle", {"action": "store_true", "help": "objects of any class; for records of your own"}),
        ),
    ),
    "serve": Command(
        "Serve a model with vLLM, for runs that sample from it over HTTP; needs vLLM.",
        run_serve,
        (
            ("model", {"metavar": "MODEL", "help": "folder or hub name"}),
            ("--host", {"default": "127.0.0.1", "help": "address to bind (default 127.0.0.1: this machine alone)"}),
            ("--port", {"type": int, "default": 8000, "help": "port to bind, 0 for a free one (default 8000)"}),
            (
                "--api-key-env",
                {
                    "metavar": "NAME",
                    "help": "environment variable with the key (default: a new one, in a file)",
                },
            ),
            (
                "--allowed-host",
                {"action": "append", "default": [], "metavar": "NAME", "help": "by which clients may ask, too"},
            ),
            (
                "--adapters",
                {"nargs": "+", "default": [], "metavar": "NAME=FOLDER", "help": "LoRA adapters to serve beside it"},
            ),
            ("--adapter-slots", {"type": int, "default": 0, "help": "how many adapters a run may bring (default 0)"}),
            ("--adapter-rank", {"type": int, "default": 16, "help": "the largest rank of those (default 16)"}),
            ("--kv-cache-gb", {"type": float, "default": 1.0, "help": "memory for keys and values (default 1)"}),
            ("--max-num-seqs", {"type": int, "default": 256, "help": "requests in one batch (default 256)"}),
            (
                "--engine-arg",
                {"action": "append", "default": [], "metavar": "NAME=VALUE", "help": "any other option of vLLM's"},
            ),
            ("--restarts", {"type": int, "default": 5, "help": "after crashes in a row (default 5)"}),
        ),
    ),
    "bench": Command(
        "Time the ops beside PyTorch and other trainers; for a source checkout.",
        run_bench,
        (
            ("names", {"nargs": "*", "metavar": "NAME", "help": "benches to run (default: all)"}),
            ("--json", {"action": "store_true", "help": "rows as JSON lines, and no tables"}),
            ("--quick", {"action": "store_true", "help": "the smallest size alone"}),
        ),
    ),
    "doctor": Command(
        "Tell which parts of turnwise work on this machine, and why the others do not.",
        run_doctor,
        (("--json", {"action": "store_true", "help": "as JSON, for scripts"}),),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
