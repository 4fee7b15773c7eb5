"""Programs that know nothing of turnwise: the question in their arguments, and what they leave as the result."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.integrations.gateway.process.folder import read_regular, regular_files

PLACEHOLDER = re.compile(r"\{question((?:\[[^][{}]+\])*)\}")
"""``{question}``, or a part of it: ``{question[text]}``."""
CODE = re.compile(r"-\w*[ce]|--eval|--command")
"""Options behind which shells and interpreters expect code."""
SCRIPTS = (".js", ".mjs", ".cjs", ".ts", ".mts", ".cts", ".jsx", ".tsx")
PACKAGES = "node_modules"
FILES, FILE_BYTES = 100, 1 << 20
"""Files that are collected, and the bytes of each; the rest is left out."""
RESULT_BYTES = 16 << 20
"""Largest result that a program may write."""


def render(template: str, question: Any) -> str:
    """Put parts of the question into ``template``: texts as they are, other values as JSON.

    Placeholders in the question itself stay text. Raises ``ValueError`` for a part that the question lacks.
    """

    def part(match: re.Match[str]) -> str:
        value = question
        for key in re.findall(r"\[([^]]+)\]", match[1]):
            if not isinstance(value, dict) or key not in value:
                raise ValueError(f"{match[0]}: the question has no {key!r}")
            value = value[key]
        return value if isinstance(value, str) else json.dumps(value)

    return PLACEHOLDER.sub(part, template)


def check_arguments(command: Sequence[str]) -> None:
    """Raise ``ValueError`` where a question that begins with ``-`` would become an option, or name the program."""
    for index, argument in enumerate(command):
        if PLACEHOLDER.match(argument) and "--" not in command[1:index]:
            raise ValueError(
                f"command[{index}]={argument!r}: expected '--' before it or text such as '--task=' in front of it, "
                "as a question may begin with '-'. Or use gateway.stdin"
            )
        if PLACEHOLDER.search(argument) and (index == 0 or CODE.fullmatch(command[index - 1])):
            raise ValueError(f"command[{index}]={argument!r}: a question is no code. Use gateway.stdin")


def packages_beside(path: Path) -> Path | None:
    """Return the packages that a JavaScript file at ``path`` would find; ``None`` for other files, or without any."""
    if path.suffix not in SCRIPTS:
        return None
    return next((found.resolve() for folder in path.parents if (found := folder / PACKAGES).is_dir()), None)


def link_packages(root: Path, files: Mapping[str, Path]) -> None:
    """Link the packages of each script beside its copy in ``root``, unless there are some: Node looks nowhere else."""
    for name, source in files.items():
        link = (root / name).parent / PACKAGES
        if (packages := packages_beside(source)) is not None and not os.path.lexists(link):
            link.symlink_to(packages)


def variables_of(models: Mapping[str, Any]) -> dict[str, str]:
    """Return a URL and a key of each API for each actor, such as ``OPENAI_BASE_URL_SOLVER``.

    An actor's name is in upper case, with ``_`` for all but letters and digits. Names that become equal get none.
    """
    names = {actor: re.sub(r"[^A-Z0-9]", "_", actor.upper()) for actor in models}
    alone = {actor: name for actor, name in names.items() if [*names.values()].count(name) == 1}
    return {
        f"{api}_{kind}_{name}": getattr(models[actor], attribute)
        for actor, name in alone.items()
        for api, kind, attribute in (
            ("OPENAI", "BASE_URL", "base_url"), ("OPENAI", "API_KEY", "api_key"),
            ("ANTHROPIC", "BASE_URL", "anthropic_base_url"), ("ANTHROPIC", "API_KEY", "api_key"),
        )
    }  # fmt: skip


def read_result(path: Path) -> Any:
    """Return what a program wrote into its result file. Raises ``OSError``, ``ValueError`` or ``RecursionError``."""
    text = read_regular(path, RESULT_BYTES + 1)
    if len(text) > RESULT_BYTES:
        raise ValueError(f"it has more than {RESULT_BYTES} bytes")
    return json.loads(text.decode("utf-8"))


def collect(folder: Path, patterns: Sequence[str], output: str) -> dict[str, Any]:
    """Return the result of a program: its standard output, and the texts of files in its folder by name."""
    found = islice(regular_files(folder, patterns, FILE_BYTES), FILES)
    return {"output": output.strip(), "files": {name: text.decode(errors="replace") for name, text in found}}
