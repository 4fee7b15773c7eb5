"""Runs one command, and ends with it everything that it started. It is a separate program that imports no turnwise.

    python supervisor.py [--forward PORT SOCKET] GRACE COMMAND ARGUMENT...

It is the subreaper of the command's descendants, so that those that detach become its children. When the command ends,
it kills every descendant at once: none of them changes a file that the command left. When the supervisor gets SIGTERM,
it sends SIGTERM to the command's process group, and SIGKILL after GRACE seconds. It exits with the command's code, or
128 plus the number of the signal that killed it.

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
SIGNALS = (signal.SIGTERM, signal.SIGALRM)


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
    child, asked = 0, False

    def end(*_: object) -> None:
        nonlocal asked
        asked = True
        if child:
            signal.setitimer(signal.ITIMER_REAL, max(grace, 0.001), 0.01)
            kill_group(child, signal.SIGTERM)

    signal.signal(signal.SIGALRM, lambda *_: kill_group(child, signal.SIGKILL))
    signal.signal(signal.SIGTERM, end)
    child = os.fork()
    if child == 0:
        start(command)
    if asked:  # while it was forked
        end()
    if forward:  # its threads take no signal, which would not wake this one
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=connect, args=(listener, path), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    process = status = 0
    while process != child:
        process, status = os.waitpid(-1, 0)
    end_descendants(child)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def start(command: list[str]) -> None:
    """Become the command, in its own session. Exits with 127 if it can't be started."""
    try:
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
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


def end_descendants(child: int) -> None:
    """Kill what is left of the command's group and all descendants, and wait until there are none."""
    kill_group(child, signal.SIGKILL)
    while True:
        for process in descendants_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def descendants_of(parent: int) -> list[int]:
    """Return the children of a process, and theirs. The children of a killed process pass to the subreaper."""
    found = [parent]
    for process in found:  # it grows
        with contextlib.suppress(OSError), open(f"/proc/{process}/task/{process}/children") as file:
            found += map(int, file.read().split())
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
