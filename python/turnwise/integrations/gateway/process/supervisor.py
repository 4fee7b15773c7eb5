"""Runs one command, and ends with it everything that it started. It is a separate program that imports no turnwise.

    python supervisor.py [--forward PORT SOCKET] GRACE COMMAND ARGUMENT...

It is the subreaper of the command's descendants, so that those that detach become its children. When the command ends,
or when the supervisor gets SIGTERM, it sends SIGTERM to the command's process group, and SIGKILL to every descendant
after GRACE seconds. It exits with the command's code, or 128 plus the number of the signal that killed it.

With ``--forward`` it runs inside a container without a network, and connects clients of PORT to a Unix socket.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    forward, arguments = sys.argv[1] == "--forward", sys.argv[1:]
    if forward:
        # It listens before the command runs, but no thread may run when the command is forked.
        listener = socket.create_server(("127.0.0.1", int(arguments[1])), backlog=128)
        path, arguments = arguments[2], arguments[3:]
    grace, command = float(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    child = os.fork()
    if child == 0:
        start(command)
    if forward:
        threading.Thread(target=connect, args=(listener, path), daemon=True).start()
    status, deadline = None, None
    while status is None:
        process, ended = os.waitpid(-1, os.WNOHANG)
        if process == child:
            status = ended
        elif process == 0:
            if asked and deadline is None:
                deadline = time.monotonic() + grace
                kill_group(child, signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                kill_group(child, signal.SIGKILL)
            time.sleep(0.005)
    kill_group(child, signal.SIGTERM if deadline is None else signal.SIGKILL)
    end_descendants(time.monotonic() + (grace if deadline is None else 0.0))
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def start(command: list[str]) -> None:
    """Become the command, in its own session. Exits with 127 if it can't be started."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def connect(listener: socket.socket, path: str) -> None:
    """Connect each client of ``listener`` to the Unix socket at ``path``."""
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:
            client.close()
            continue
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=copy, args=(source, sink), daemon=True).start()


def copy(source: socket.socket, sink: socket.socket) -> None:
    """Send on what ``source`` sends, until it ends or breaks."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def kill_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_descendants(deadline: float) -> None:
    """Wait until no descendant is left; kill those that live past ``deadline``."""
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process:
            continue
        if time.monotonic() >= deadline:
            for child in children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def children_of(parent: int) -> list[int]:
    """Return the direct children of a process. The children of a killed process pass to the subreaper."""
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
