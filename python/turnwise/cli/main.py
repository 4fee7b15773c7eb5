"""The table of commands and the parsing of their arguments.

``turnwise NAME ...`` imports the function that the command's ``call`` names, and calls it. A user's mistake prints
one line on stderr and exits with 2. A run that fails (out of memory, no backend, a dead server, any error while it
trains) prints one line and exits with 1. ``--traceback`` shows where the error was raised. Ctrl-C exits with 130;
``turnwise train`` also with 143 after SIGTERM and 129 after SIGHUP, and with 75 if it lost its cluster.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from turnwise.cli.make import find_benches
from turnwise.cli.options import EXIT_BY_SIGNAL, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, split_overrides
from turnwise.utils.files import expanded
from turnwise.utils.output import open_standard_descriptors, safe_output, say, tell
from turnwise.utils.registry import did_you_mean
from turnwise.utils.signals import SavedNote
from turnwise.utils.threads import end_process, end_program_loop, keep_openmp_awake

USER_ERRORS = (ValueError, TypeError, OSError, ImportError)
"""Errors that a user's mistake raises."""

RUN_ERRORS = (RuntimeError, FloatingPointError, MemoryError)
"""Errors that a failed run raises; every other error is a bug and keeps its traceback."""

Argument = tuple[str, dict[str, Any]]
"""One call of ``add_argument``: the name and the settings."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. With ``overrides`` it also takes dotted config keys. The help ends with the ``epilog``.

    Example: ``Command("look.doctor:run", "Check this machine.", (flag("--json", "print JSON, for scripts"),))``
    """

    call: str
    """Its function, as ``module:name`` below ``turnwise.cli``."""
    help: str
    arguments: tuple[Argument, ...] = ()
    overrides: bool = False
    epilog: str | None = None


def argument(name: str, help: str, **settings: Any) -> Argument:
    return name, {"help": help, **settings}


def path(text: str) -> Path:
    return Path(expanded(text))


def flag(name: str, help: str) -> Argument:
    return argument(name, help, action="store_true")


def repeated(name: str, help: str, metavar: str) -> Argument:
    return argument(name, f"{help}; may be repeated", action="append", default=[], metavar=metavar)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``turnwise`` with ``argv`` (default: the process's arguments) and return the exit code."""
    with safe_output():
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        except Exception:  # with --traceback, or a bug: its text may be that of a run's files
            say(traceback.format_exc(), to="stderr")
            return EXIT_FAILED


def _main(arguments: list[str]) -> int:
    try:
        options = parse(arguments)
        module, _, name = COMMANDS[options.command].call.partition(":")
        run = getattr(importlib.import_module(f"turnwise.cli.{module}"), name)
        try:
            code: int = run(options)
            return code
        except SystemExit as error:  # of code that a config names: it must not look like success
            if error.code in EXIT_BY_SIGNAL:
                raise
            raise RuntimeError(f"code of the user ended the command by exit({error.code!r})") from error
        finally:
            end_program_loop()
    except KeyboardInterrupt:
        tell("interrupted")
        return EXIT_INTERRUPTED
    except (*USER_ERRORS, *RUN_ERRORS) as error:
        if "--traceback" in arguments:
            raise
        message = str(error).strip() or type(error).__name__
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            message = f"{error.strerror}: {error.filename!r}"
        notes = getattr(error, "__notes__", [])
        tell("\n".join([message, *notes]))
        in_training = any(isinstance(note, SavedNote) for note in notes)
        return EXIT_USAGE if isinstance(error, USER_ERRORS) and not in_training else EXIT_FAILED


def entry() -> NoReturn:
    """Run ``turnwise``, and end the process also if user code left threads behind."""
    open_standard_descriptors()
    keep_openmp_awake()
    try:
        code = main()
    except SystemExit as error:  # of argparse, or a signal
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
    end_process(code)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse one call. ``command`` is the command's name, ``overrides`` holds its dotted keys in order."""
    commands = {name: command for name, command in COMMANDS.items() if name != "bench" or find_benches()}
    parser, parsers = build_parsers(commands)
    name = next((word for word in arguments if not word.startswith("-")), None)
    if name == "bench" and name not in commands:
        raise ValueError(
            "bench: the benches are not part of the installed package. Run `turnwise bench` in the folder of a source "
            "checkout"
        )
    if name is not None and name not in commands:
        parser.error(f"unknown command {name!r}; {did_you_mean(name, commands)}")

    # Take the config overrides out, as argparse doesn't know them; any other unknown word is an error.
    overrides: dict[str, str] = {}
    if name is not None and commands[name].overrides:
        arguments, overrides = split_overrides(arguments, known=options_of(commands[name]))
    options, rest = parser.parse_known_args(arguments)
    if rest:
        word = rest[0].partition("=")[0]
        if not word.startswith("--"):
            parsers[options.command].error(f"unexpected argument {rest[0]!r}")
        near = did_you_mean(word, options_of(commands[options.command]))
        parsers[options.command].error(f"unknown option {word}; {near}")
    options.overrides = overrides
    return options


def options_of(command: Command) -> set[str]:
    return {name for name, _ in (*command.arguments, *COMMON) if name.startswith("-")} | {"-h", "--help"}


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends with the sections of the config, if the command takes overrides."""

    lists_sections = False

    def format_help(self) -> str:
        if not self.lists_sections:
            return super().format_help()
        from turnwise.cli.look.config import section_table

        return (
            f"{super().format_help()}\n"
            "config keys:\n"
            "  Override any key with --section.key value, such as --update.lr 1e-4. The sections are\n"
            f"{section_table(indent=4)}\n"
            "  `turnwise config SECTION` lists the keys of a section, `turnwise config KEY` explains one.\n"
        )

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"turnwise: {message}\n")


def build_parsers(table: dict[str, Command]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Build the parser of ``turnwise`` and those of its commands, by name."""
    from turnwise import __version__

    parser = CommandParser(
        prog="turnwise", description="Train teams of LLM agents with reinforcement learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    parsers = {}
    for name, command in table.items():
        texts: dict[str, Any] = {"help": command.help, "description": command.help, "epilog": command.epilog}
        parsers[name] = commands.add_parser(name, **texts, allow_abbrev=False)
        parsers[name].lists_sections = command.overrides
        for option, settings in (*command.arguments, *COMMON):
            parsers[name].add_argument(option, **settings)
    return parser, parsers


# ---------------------------------------------------------------------------------------------------------------------
# The commands
# ---------------------------------------------------------------------------------------------------------------------
COMMON: tuple[Argument, ...] = (flag("--traceback", "show where an error was raised"),)

CONFIG = argument("config", "config file: see docs/training.md", type=path, metavar="CONFIG.toml")
RUN_DIR = argument("run_dir", "folder of the run", type=path, metavar="RUN_DIR")
JSON = flag("--json", "print JSON, for scripts")

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "look.explained:demo",
        "Train a team of two agents to solve 4x4 sudoku on this machine.",
        (
            flag("--explain", "show one recorded episode and its credit by three rules, in seconds; nothing trains"),
            flag("--compare", "also train a single agent on as many tokens; takes longer"),
            argument("--seed", "seed of puzzles, weights and sampling (default: 0)", type=int, default=0),
            argument("--out", "folder of the run (default: runs/demo)", type=path, default=Path("runs/demo")),
            argument("--client", "engine that samples, as in rollout.client: vllm, ...", default="transformers"),
        ),
    ),
    "init": Command(
        "make:init",
        "Write a config and an episode to start from, or copy a shipped example.",
        (
            argument("folder", "where to write (default: here)", type=path, nargs="?", default=Path(), metavar="DIR"),
            argument("--example", "copy this example instead, such as sudoku", metavar="NAME"),
            flag("--list", "list the examples and stop"),
        ),
    ),
    "train": Command(
        "run.train:run",
        "Train the policies that a config file describes.",
        (
            CONFIG,
            flag("--dry-run", "print the resolved config and stop"),
            flag("--import-code", "with --dry-run: import the code that the config names, to check it"),
            argument("--cluster", "train on this Ray cluster: local, auto, or HOST:PORT", metavar="ADDRESS"),
        ),
        overrides=True,
        epilog="Exit codes: 0 done, 1 an error, 2 wrong settings, 75 the cluster was lost; 130, 143, 129 after SIGINT, "
        "SIGTERM, SIGHUP. After an error or a signal the same command goes on from the last step.",
    ),
    "config": Command(
        "look.config:run",
        "Explain the config: all sections, one section, or one key.",
        (argument("key", "a section such as update, or a key such as update.lr", nargs="?", metavar="KEY"),),
    ),
    "eval": Command(
        "run.eval:run",
        "Measure the held-out success of a run, of the policies that a config file describes, or of another server.",
        (
            argument("config", "config file or run folder", type=path, nargs="?", metavar="CONFIG.toml|RUN_DIR"),
            argument("--checkpoint", "newest (default), best, start, step_00000010, or a folder"),
            argument("--against", "checkpoint to compare with, question by question", metavar="CHECKPOINT"),
            repeated("--ablate", "also play without this actor, and with it alone; all for every actor", "ACTOR"),
            argument("--samples", "answers to each question, for pass@k (default: 1)", type=int, default=1),
            argument("--show", "episodes to print as text (default: 0)", type=int, default=0, metavar="K"),
            argument("--temperature", "default: 0, or rollout.temperature for several samples", type=float),
            argument("--base-url", "play an agent (--task gateway:...) by this OpenAI server", metavar="URL"),
            argument("--model", "with --base-url: the model's name there", metavar="NAME"),
            argument("--api-key-env", "with --base-url: environment variable with the key", metavar="NAME"),
            JSON,
        ),
        overrides=True,
    ),
    "tournament": Command(
        "run.tournament:run",
        "Play checkpoints of one or more runs against each other: payoffs and ratings, with intervals.",
        (
            argument("run_dirs", "folders of runs", type=path, nargs="+", metavar="RUN_DIR"),
            argument("--checkpoints", "all (default), newest, best, ...", nargs="+", default=["all"], metavar="NAME"),
            argument("--games", "games of each pair, half from each seat (default: 200)", type=int, default=200),
            argument("--task", "task to play (default: the task that the runs trained on)"),
            argument("--baselines", "scripted players of the task (default: all)", nargs="*", metavar="NAME"),
            JSON,
        ),
    ),
    "export": Command(
        "make:export",
        "Write the policies of a checkpoint as Hugging Face folders (safetensors), and push one of them to the Hub.",
        (
            RUN_DIR,
            argument("--checkpoint", "newest (default), best, step_00000010, or a folder", default="newest"),
            argument("--out", "folder to write (default: RUN_DIR/export/CHECKPOINT)", type=path, metavar="DIR"),
            repeated("--policy", "export this policy (default: all)", "NAME"),
            flag("--merge", "also write each adapter merged into its base; --push then takes that model"),
            argument("--push", "upload to this repository of the Hub, or of HF_ENDPOINT, with the token HF_TOKEN; "
                     "it must be new, except with --revision", metavar="OWNER/NAME"),
            flag("--private", "with --push: the repository is private"),
            argument("--revision", "with --push: branch of a new or existing repository", metavar="BRANCH"),
        ),
    ),
    "view": Command(
        "look.recorded:view",
        "Write the report of a run, finished or not, as one HTML file: curves, episodes, warnings.",
        (
            RUN_DIR,
            argument("--out", "file to write (default: RUN_DIR/report.html)", type=path, metavar="FILE"),
            flag("--open", "open the report in the browser"),
        ),
    ),
    "status": Command(
        "look.status:run",
        "Show how a run is doing, from the files in its folder alone.",
        (RUN_DIR, JSON),
    ),
    "diagnose": Command(
        "look.recorded:diagnose",
        "Say what ails a run, finished or not, with a remedy and the recorded episodes that show it.",
        (RUN_DIR, JSON),
    ),
    "credit": Command(
        "look.recorded:credit",
        "Recompute the advantages of a run's recorded episodes with another credit rule, and show the differences.",
        (
            RUN_DIR,
            argument("--rule", "name of a rule, or module:Class (default: the run's rule)", metavar="NAME"),
            argument("--step", "training step to show (default: all)", type=int, metavar="N"),
            repeated("--set", "option of the rule", "OPTION=VALUE"),
            argument("--trace", "show instead what changed the rewards of an episode, such as e5 (default: the newest)",
                     metavar="ID", nargs="?", const=""),
            flag("--json", "print JSON with every model call, for scripts"),
        ),
    ),
    "rescore": Command(
        "look.recorded:rescore",
        "Score a run's recorded episodes with another rubric: rewards, metrics and advantages beside the old ones.",
        (
            RUN_DIR,
            argument("--rubric", "module:name of a Rubric, a reward function or a list of them", required=True,
                     metavar="NAME"),
            argument("--out", "new folder (default: RUN_DIR/rescored/NAME)", type=path, metavar="DIR"),
            argument("--episode-type", "episodes to score (default: all but nested ones)", metavar="TYPE"),
            JSON,
        ),
    ),
    "replay": Command(
        "look.recorded:replay",
        "Run a recorded episode again and show the first difference; the exit code is 1 if there is one.",
        (
            RUN_DIR,
            argument("--episode", "such as e5, or e5.0 for a nested one (default: the newest recorded)", metavar="ID"),
            argument("--step", "training step of the episode", type=int, metavar="N"),
            argument("--until", "stop after K model calls and show what comes next", type=int, metavar="K"),
            repeated("--swap", "from there on, sample this actor with another policy", "ACTOR=POLICY[@CHECKPOINT]"),
            flag("--allow-pickle", "build objects of any class; only for your own records"),
        ),
    ),
    "serve": Command(
        "serve.serve:run",
        "Serve a model to runs that sample over HTTP, or a run's actors to clients of OpenAI and Anthropic.",
        (
            argument("model", "folder or Hugging Face Hub name of a model, or a run folder", type=expanded,
                     metavar="MODEL|RUN_DIR"),
            argument("--checkpoint", "of a run: newest (default), best, start, step_00000010, or a folder"),
            argument("--host", "address to bind (default: 127.0.0.1, this machine only)", default="127.0.0.1"),
            argument("--port", "port to bind, 0 for a free one (default: 8000)", type=int, default=8000),
            argument("--api-key-env", "environment variable with the key (default: a new key file)", metavar="NAME"),
            repeated("--allowed-host", "further host name that clients use", "NAME"),
            argument("--adapters", "LoRA adapters to serve as well", nargs="+", default=[], metavar="NAME=FOLDER"),
            argument("--adapter-slots", "adapters that clients may add (default: 0)", type=int, default=0),
            argument("--adapter-rank", "largest rank of those (default: 16)", type=int, default=16),
            argument("--engine", "what computes: vllm (default) or transformers", default="vllm"),
            flag("--dummy-weights", "random weights, for clients that send theirs; MODEL needs none"),
            argument("--kv-cache-gb", "vLLM: memory for keys and values, in GiB (default: 1)", type=float, default=1.0),
            argument("--max-batch-size", "requests in one batch (default: 256, or 512 of transformers)", type=int),
            repeated("--engine-arg", "further option of vLLM; of transformers: dtype, device", "NAME=VALUE"),
            argument("--restarts", "restarts after crashes in a row (default: 5)", type=int, default=5),
        ),
    ),
    "gateway": Command(
        "serve.gateway:run",
        "Serve a model or a run to your agent for a try by hand, and show each call and what would train.",
        (
            argument("model", "folder or Hugging Face Hub name of a model, or a run folder", type=expanded,
                     metavar="MODEL|RUN_DIR"),
            argument("--checkpoint", "of a run: newest (default), best, start, step_00000010, or a folder"),
            repeated("--actor", "name of a model that the agent calls (default: agent, or those of the run)", "NAME"),
            argument("--port", "port to bind (default: 0, a free one)", type=int, default=0),
            argument("--renderer", "chat format, as gateway.renderer"),
        ),
    ),
    "worker": Command(
        "serve.worker:run",
        "Play episodes of a run for the process of its loop, which has the same TURNWISE_CLUSTER_KEY.",
        (
            CONFIG,
            argument("--host", "address to bind (default: 127.0.0.1, this machine only)", default="127.0.0.1"),
            argument("--port", "port to bind (default: 0, a free one)", type=int, default=0),
            repeated("--keep-env", "environment variable that user code needs although it looks like a secret", "NAME"),
            argument("--key-fd", argparse.SUPPRESS, type=int),
        ),
        overrides=True,
    ),
    "bench": Command(
        "make:bench",
        "Time the ops against PyTorch and other trainers.",
        (
            argument("names", "benches to run (default: all)", nargs="*", metavar="NAME"),
            flag("--json", "print rows as JSON lines, without tables"),
            flag("--quick", "run the smallest size only"),
        ),
    ),
    "doctor": Command(
        "look.doctor:run",
        "Check which parts of turnwise work on this machine, and how to repair the others.",
        (JSON, argument("--seconds", "time limit of all checks (default: 120)", type=float, default=120.0)),
    ),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
