"""Does jobs inside limits. ``limited.py`` starts it as a script, and it imports nothing of turnwise.

It reads Python's path and a filter of system calls, then requests ``(job, text, content, limits)``, each ``marshal``
behind its length. It trusts its parent. An answer is its length, one byte (0 text, 1 error, 2 limit) and a text; before
the first there is one more (3) with the reason if the host has no such filters. The kernel ends
the process at the limit of CPU time, also inside of one long call, and at a call that no job makes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import marshal
import os
import resource
import signal
import struct
import sys
import time
from datetime import datetime
from typing import Any

LENGTH = struct.Struct("<Q")
TEXT, ERROR, LIMIT, OPEN = b"\0", b"\1", b"\2", b"\3"
ERROR_CHARS = 2000


def main() -> None:
    requests, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)
    sys.path[:], allowed = marshal.loads(received(requests))
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE"):
        resource.setrlimit(getattr(resource, name), (0, 0))
    base, most, begun = 0, resource.getrlimit(resource.RLIMIT_AS)[1], False
    while request := received(requests):
        job, given, content, (seconds, memory, output) = marshal.loads(request)
        if not begun:
            for package in PACKAGES[job]:
                with contextlib.suppress(ImportError):  # the job says so
                    importlib.import_module(package)
            base, begun = address_space(), True
            if allowed and (reason := locked_in(allowed)):
                send(answers, OPEN + reason.encode())
        if base:
            wanted = base + memory
            resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind, text = done(job, given, content)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > output:
            kind, text = LIMIT, f"writes {len(text)} bytes, of {output} at most".encode()
        send(answers, kind + text)


def done(job: str, given: str, content: bytes) -> tuple[bytes, bytes]:
    try:
        return TEXT, JOBS[job](given, marshal.loads(content)).encode("utf-8", "surrogatepass")
    except MemoryError:
        return LIMIT, b"takes more memory than its length justifies"
    except Exception as error:  # a template may raise anything
        try:
            told = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
        except Exception:  # what it holds may be too large to be shown
            told = type(error).__name__
        return ERROR, told.encode("utf-8", "backslashreplace")


def rendered(template: str, variables: Any) -> str:
    return compiled(template).render(**variables)


def checked(grammar: str, limits: Any) -> str:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**limits))


JOBS = {"template": rendered, "grammar": checked}
PACKAGES = {
    "template": (
        "jinja2", "jinja2.sandbox", "jinja2.ext", "jinja2.constants", "jinja2.debug", "pprint", "unicodedata",
        *(f"encodings.{name}" for name in ("ascii", "latin_1", "unicode_escape", "utf_16", "utf_32")),
    ),
    "grammar": ("llguidance",),
}  # fmt: skip
"""The modules of each job. Their import doesn't count, and files can't be opened later."""


def locked_in(allowed: bytes) -> str:
    """Give up files, processes and the network for good. Return the host's reason if it can't, else an empty text."""
    os.environ.setdefault("TZ", ":/etc/localtime")  # otherwise each look at the clock looks for that file again
    time.tzset()
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
    child: Any = type(sys)("child")
    with open(source, encoding="utf-8") as file:
        exec(compile(file.read(), source, "exec"), child.__dict__)
    try:
        child.filter_calls(child.ctypes.CDLL(None, use_errno=True), allowed)
    except OSError as error:
        return str(error)
    return ""


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> Any:
    return environment().from_string(template)


def environment() -> Any:
    """Return a Jinja environment like that of ``transformers``. Its templates can't change it."""
    from jinja2 import TemplateError, ext, nodes, sandbox

    class Generation(ext.Extension):
        """Renders what the block ``generation`` encloses. It marks the assistant's tokens, which nothing here asks."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's name)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("enclosed"), [], [], body).set_lineno(line)

        def enclosed(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: Any) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


def address_space() -> int:
    """Return the process's own bytes of address space; 0 where the system doesn't tell, and has no limit of it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def received(file: Any) -> bytes:
    """Return the next message; an empty one if the parent has ended."""
    length = file.read(LENGTH.size)
    return file.read(*LENGTH.unpack(length)) if len(length) == LENGTH.size else b""


def send(descriptor: int, content: bytes) -> None:
    left = memoryview(LENGTH.pack(len(content)) + content)
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    main()
