"""Runs one program inside the sandbox. ``sandbox.py`` starts it as a script, and it imports nothing of turnwise.

It reads a job from standard input (``marshal``, from a parent that it trusts), gives up its rights, and only then
compiles the program. Each line that it writes to standard output is JSON. The first line is ``{"locked": true}`` or
``{"refused": "why"}``; no program has run by then, so none can have written it. ``{"value": ...}`` or
``{"error": ...}`` follows for each input in order.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER, CAPABILITY_VERSION = 2, 0x20080522

# Opening files is forbidden later, so the modules among these that the program's text names are imported before.
MODULES = (
    "abc", "array", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "time",
    "typing", "unicodedata",
)  # fmt: skip

ERROR_CHARS = 200


def main() -> None:
    job = marshal.loads(sys.stdin.buffer.read())
    results = os.dup(1)
    os.dup2(2, 1)  # the program prints to standard error, never among the results
    try:
        for name in MODULES:
            if name in job["program"]:
                __import__(name)
        if "random" in sys.modules:
            sys.modules["random"].seed(0)  # equal runs of a program give equal results
        lock_in(job)
    except OSError as error:
        write(results, f'{{"refused": {quoted(str(error))}}}\n')
        os._exit(1)
    write(results, '{"locked": true}\n')
    run(job, results)
    sys.stdout.flush()
    os._exit(0)


def lock_in(job: dict) -> None:
    """Permanently give up files, processes, memory and time beyond the limits, and all but a few system calls."""
    for name, (soft, most) in job["limits"].items():
        number = getattr(resource, name, None)
        if number is not None:
            _, hard = resource.getrlimit(number)
            given = (soft, most) if hard == resource.RLIM_INFINITY else (min(soft, hard), min(most, hard))
            resource.setrlimit(number, given)
    if job["filter"] is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:
        os._exit(1)  # the parent ended before this process could ask to die with it
    filter_calls(libc, job["filter"])


def filter_calls(libc: ctypes.CDLL, allowed: bytes) -> None:
    """Permanently give up root's rights, and all system calls but those that the filter ``allowed`` passes."""
    prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    # Root's rights, with which some of the allowed calls could do more.
    if libc.capset(struct.pack("@Ii", CAPABILITY_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "capset: can't give up root's rights")
    lines = ctypes.create_string_buffer(allowed, len(allowed))
    program = struct.pack("@HP", len(allowed) // 8, ctypes.addressof(lines))  # struct sock_fprog
    header = ctypes.create_string_buffer(program, len(program))
    prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def prctl(libc: ctypes.CDLL, option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if libc.prctl(ctypes.c_int(option), *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def run(job: dict, results: int) -> None:
    """Define the program, call its function on each input, and write the results."""
    module = sys.modules["program"] = type(sys)("program")  # where dataclasses and the like look for it
    try:
        exec(compile(job["program"], "program", "exec"), module.__dict__)
        function = module.__dict__[job["function"]]
    except BaseException as error:
        line = f'{{"error": {quoted(describe(error))}}}\n'
        write(results, line * len(job["inputs"]))
        return
    for arguments in job["inputs"]:
        try:
            line = f'{{"value": {encoded(function(*arguments))}}}\n'
        except BaseException as error:
            line = f'{{"error": {quoted(describe(error))}}}\n'
        write(results, line)


def describe(error: BaseException) -> str:
    """Write ``"ValueError: its text"``. The program may define its own exceptions, so this trusts no method of them."""
    name = type.__getattribute__(type(error), "__name__")
    try:
        text = str(error)
    except BaseException:
        text = "(its text can't be had)"
    return f"{name}: {text}"[:ERROR_CHARS]


def encoded(value: object) -> str:
    """Write a plain value as JSON; ``TypeError`` for others. Importing ``json`` would double the start-up time."""
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]  # type: ignore[index]
    if kind is int or (kind is float and value - value == 0):  # type: ignore[operator]
        return repr(value)
    if kind is str:
        return quoted(value)  # type: ignore[arg-type]
    if kind is list or kind is tuple:
        return "[" + ", ".join([encoded(item) for item in value]) + "]"  # type: ignore[attr-defined]
    if kind is dict and all(type(key) is str for key in value):  # type: ignore[attr-defined]
        return "{" + ", ".join([f"{quoted(key)}: {encoded(item)}" for key, item in value.items()]) + "}"  # type: ignore[attr-defined]
    raise TypeError(f"returned a {kind.__name__}, expected plain numbers, strings, lists or dicts")


def quoted(text: str) -> str:
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join([char if " " <= char != "\x7f" else f"\\u{ord(char):04x}" for char in inner]) + '"'


def write(results: int, line: str) -> None:
    data = line.encode("utf-8", "replace")
    while data:
        data = data[os.write(results, data) :]


if __name__ == "__main__":
    main()
