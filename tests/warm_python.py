"""A Python whose imports are done: each start is a fork of one process that has imported what runs and benches share.

The imports of a run take ten seconds of a slow core, more than most tests train, and many tests start several
processes. ``started`` runs the process and writes a small program that stands for Python. It hands its words,
environment, folder and open files to that process, passes signals on, and ends as the fork does. What imports read of
the environment, such as ``OMP_NUM_THREADS``, is that of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import marshal
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

SHARED = (
    *("transformers.models.qwen3.modeling_qwen3", "turnwise.cli.main", "turnwise.run.build", "turnwise.run.clients"),
    *("turnwise.inference.server.server", "torch.distributed.run", "torch.distributed.fsdp", "aiohttp.web"),
    *("trl.trainer.grpo_trainer", "datasets", "verifiers.legacy.clients", "verifiers.v1.interception"),
)
MAX_FILES = 64
CLIENT = """#!{python} -IS
import array, marshal, os, signal, socket, sys

if "-S" in sys.argv[1:5]:  # a process with limits wants none of the imports
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

def is_open(file):
    try:
        os.fstat(file)
    except OSError:
        return False
    return True

files = [file for file in sorted(map(int, os.listdir("/proc/self/fd"))) if is_open(file)]
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
given = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ), files))
server.sendmsg([len(given).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(given)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
told = server.recv(2)
code = int.from_bytes(told, "big", signed=True) if told else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def started(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Yield the path of a program to start as Python. ``environment`` is that of the imports."""
    path, program = str(folder / "socket"), folder / "python"
    program.write_text(CLIENT.format(python=sys.executable, path=path))
    program.chmod(0o755)
    command = [sys.executable, "-P", __file__, path, str(program)]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield str(program)
    finally:
        server.communicate()


# ---------------------------------------------------------------------------------------------------------------------
# In the process that has the imports
# ---------------------------------------------------------------------------------------------------------------------
def serve(path: str, program: str) -> list[str]:
    """Fork for each start until standard input ends. Returns in the forks: what they are to run."""
    sys.executable = program  # for what a fork starts itself
    multiprocessing.set_executable(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SHARED:
            with contextlib.suppress(ImportError):  # a bench says what is missing
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # benches collect garbage often, which takes long with so many modules
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return attend(connection)
        connection.close()
    os._exit(0)


def attend(connection: socket.socket) -> list[str]:
    """Fork what was asked for and watch it: pass signals on, and kill it if the program that stands for it is gone."""
    size, files, _, _ = socket.recv_fds(connection, 8, MAX_FILES)
    given = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    words, folder, environment, numbers = marshal.loads(given)
    child = os.fork()
    if not child:
        connection.close()
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
        for number, file in zip(numbers, above, strict=True):
            os.dup2(file, number)
        for file in {*files, *above}.difference(numbers):
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.orig_argv = [sys.executable, *words]
        return words
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([connection, ended], [], [])[0]):
        number = connection.recv(1) if connection in ready else b""
        os.kill(child, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(code.to_bytes(2, "big", signed=True))
    os._exit(0)


def run(words: list[str]) -> None:
    """Do as Python does for these words: the options -B, -P and -u, then a script, -m or -c."""
    safe = False
    while words[0] in ("-B", "-P", "-u"):
        safe |= words.pop(0) == "-P"
    kind, *rest = words
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.path[:0] = [] if safe else [os.getcwd()]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind.startswith("-"):
        raise SystemExit(f"{kind}: this Python knows -B, -P, -u, -c and -m")
    else:
        sys.path[:0] = [] if safe else [str(Path(kind).resolve().parent)]
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    words, code = serve(*sys.argv[1:]), 0
    try:
        run(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As Python ends, but for the imported modules, whose end takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
