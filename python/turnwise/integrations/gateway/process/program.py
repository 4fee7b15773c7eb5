"""Programs that know nothing of turnwise: the question in their arguments, and what they leave as the result."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PLACEHOLDER = re.compile(r"\{question((?:\[[^][{}]+\])*)\}")
"""``{question}``, or a part of it: ``{question[text]}``."""
CODE = re.compile(r"-\w*[ce]|--eval|--command")
"""Options behind which shells and interpreters expect code."""
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


def read_result(path: Path) -> Any:
    """Return what a program wrote into its result file. Raises ``OSError``, ``ValueError`` or ``RecursionError``.

    A link may lead to answers, and a pipe would never end, so anything but a regular file is an error.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(RESULT_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > RESULT_BYTES:
        raise ValueError(f"it has more than {RESULT_BYTES} bytes")
    return json.loads(text.decode("utf-8"))


def collect(folder: Path, patterns: Sequence[str], output: str) -> dict[str, Any]:
    """Return the result of a program: its standard output, and the texts of files in its folder by name."""
    files = {}
    for path in _files(folder, patterns):
        with path.open("rb") as file:
            files[str(path.relative_to(folder))] = file.read(FILE_BYTES).decode(errors="replace")
        if len(files) == FILES:
            break
    return {"output": output.strip(), "files": files}


def _files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield the regular files. A link may lead out of the folder, to answers for example, so links are left out."""
    inside = folder.resolve()
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and path.resolve() == inside / path.relative_to(folder):
                yield path
