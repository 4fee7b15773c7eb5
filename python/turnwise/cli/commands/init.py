"""``turnwise init``: write the files to start from, or copy a shipped example."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

import turnwise
from turnwise.cli.options import EXIT_OK
from turnwise.utils.registry import did_you_mean

START = "start"
"""The example that ``turnwise init`` writes without ``--example``."""


def run(options: argparse.Namespace) -> int:
    root = find_examples()
    examples = {path.stem: path for path in sorted(root.iterdir()) if path.is_dir() or path.suffix in (".py", ".toml")}
    examples.pop("__pycache__", None)
    if options.list:
        width = max(map(len, examples))
        print("\n".join(f"{name:<{width}}  {first_line(path)}" for name, path in examples.items()))
        return EXIT_OK

    name = options.example or START
    if name not in examples:
        raise ValueError(f"--example={name!r}: unknown; {did_you_mean(name, examples)}")
    written = copy_example(examples[name], options.folder, flat=name == START)
    print("\n".join(f"wrote {path}" for path in written))
    command = {".py": "python", ".toml": "turnwise train"}
    to_run = main_file(written)
    folder = f"cd {options.folder} && " if options.folder != Path() else ""
    print(f"next: {folder}{command[to_run.suffix]} {to_run.relative_to(options.folder)}")
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

    Returns the new files. Raises ``FileExistsError`` that names files that are already there, before it writes any.
    """
    found = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {target / path.relative_to(source if flat else source.parent): path for path in found or [source]}
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
