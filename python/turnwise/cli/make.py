"""The commands that write files or time ops: ``init``, ``export`` and ``bench``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import turnwise
from turnwise.cli.options import EXIT_OK
from turnwise.utils.files import check_no_links
from turnwise.utils.output import say
from turnwise.utils.registry import announce_code_of_run, did_you_mean

START = "start"
"""The example that ``turnwise init`` writes without ``--example``."""


def init(options: argparse.Namespace) -> int:
    """Write the files to start from, or copy a shipped example."""
    root = find_examples()
    examples = {path.stem: path for path in sorted(root.iterdir()) if path.is_dir() or path.suffix in (".py", ".toml")}
    examples.pop("__pycache__", None)
    if options.list:
        width = max(map(len, examples))
        say("\n".join(f"{name:<{width}}  {first_line(path)}" for name, path in examples.items()))
        return EXIT_OK

    name = options.example or START
    if name not in examples:
        raise ValueError(f"--example={name!r}: unknown; {did_you_mean(name, examples)}")
    written = copy_example(examples[name], options.folder, flat=name == START)
    say("\n".join(f"wrote {path}" for path in written))
    command = {".py": "python", ".toml": "turnwise train"}
    to_run = main_file(written)
    folder = f"cd {options.folder} && " if options.folder != Path() else ""
    say(f"next: {folder}{command[to_run.suffix]} {to_run.relative_to(options.folder)}")
    return EXIT_OK


def find_examples() -> Path:
    """Return the folder of examples: of the installed package, or of the checkout that this package belongs to."""
    package = Path(turnwise.__file__).resolve().parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / START).is_dir():
            return folder
    raise OSError(f"no examples beside {package}: reinstall turnwise")


def copy_example(source: Path, target: Path, *, flat: bool) -> list[Path]:
    """Copy a file, or the files of a folder, into ``target``; with ``flat`` without the folder itself.

    Returns the new files. Raises ``FileExistsError`` naming the files that exist already, before it writes any.
    """
    sources = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {target / path.relative_to(source if flat else source.parent): path for path in sources or [source]}
    if taken := [str(path) for path in files if path.exists()]:
        raise FileExistsError(f"{', '.join(taken)}: already there. Move them away, or name another folder")
    for path, origin in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(origin.read_bytes())
    return list(files)


def first_line(path: Path) -> str:
    """Return the first line of an example's docstring or comment."""
    file = main_file(sorted(path.glob("*"))) if path.is_dir() else path
    return file.read_text(encoding="utf-8").partition("\n")[0].strip('#" ')


def main_file(files: Sequence[Path]) -> Path:
    """Return the file that a user runs: the config that extends no other, else the only file."""
    configs = [file for file in files if file.suffix == ".toml"]
    return next((file for file in configs if "extends" not in tomllib.loads(file.read_text())), files[0])


def export(options: argparse.Namespace) -> int:
    """Write the policies of a checkpoint as Hugging Face folders, and push one to the Hub."""
    from turnwise.run.export import check_push, chosen_policies, export_checkpoint, find_exported, push, write_card
    from turnwise.train.config.toml import CONFIG_FILE
    from turnwise.train.model.loading import TINY
    from turnwise.train.validate import read_config

    config = read_config(options.run_dir / CONFIG_FILE, import_code=False)
    if TINY in [policy.path for policy in config.policies.values()]:  # the task makes such a model
        announce_code_of_run(options.run_dir)
    config = config.model_copy(update={"run_dir": options.run_dir})
    policies = chosen_policies(config, options.policy)
    # Reject a push that can't succeed before anything is written.
    if options.push is None and (options.private or options.revision is not None):
        raise ValueError("--private, --revision: expected --push with them")
    if options.push is not None:
        if len(policies) > 1:
            raise ValueError(f"--push {options.push}: expected one of {', '.join(policies)} with --policy, got all")
        check_push(config, policies[0], merge=options.merge)
    checkpoint = find_exported(config, options.checkpoint)
    out = options.out
    if out is None:
        out = options.run_dir / "export" / checkpoint.name
        check_no_links(options.run_dir, out)
    exported, manifest = export_checkpoint(config, out, checkpoint, only=policies, merge=options.merge)
    for one in exported:
        write_card(one, config, manifest, options.push)
        kind = f"an adapter over {one.base}" if one.base else "a whole model"
        say(f"policy {one.policy!r} of step {manifest['step']}: {one.folder}, {kind}")
    if options.push is not None:
        address = push(exported[0].folder, options.push, private=options.private, revision=options.revision)
        say(f"pushed to {address}")
    return EXIT_OK


def find_benches() -> Path | None:
    """Return ``bench/run.py`` of the checkout that this package belongs to, or of the working folder."""
    for root in (Path(turnwise.__file__).resolve().parents[2], Path.cwd()):
        if (root / "bench" / "bench_policy_loss.py").is_file():
            return root / "bench" / "run.py"
    return None


def bench(options: argparse.Namespace) -> int:
    """Time the ops, in a source checkout: the benches need other trainers and are not in the wheel."""
    words = [*options.names, *(["--json"] if options.json else []), *(["--quick"] if options.quick else [])]
    return subprocess.run([sys.executable, str(find_benches()), *words], check=False).returncode
