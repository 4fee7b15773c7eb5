"""Runs one command, and ends with it everything that it started. It is a separate program that imports no turnwise.

    python supervisor.py OPTIONS COMMAND ARGUMENT...

It is the subreaper of the command's descendants, so that those that detach become its children. When the command ends,
it kills every descendant at once: none of them changes a file that the command left. When the supervisor gets SIGTERM,
it sends SIGTERM to the command's process group, and SIGKILL after the grace. It exits with the command's code, or 128
plus the number of the signal that killed it.

``OPTIONS`` is JSON. ``grace`` is in seconds. ``control`` is a file with a key: the command finds the number of a pipe
that holds it in ``TURNWISE_CONTROL``, and the file is gone. Inside a container, ``forward`` has a port and the Unix
socket to which its clients are connected, and ``lock`` what the command gives up: ``limits`` by their name in
:mod:`resource`, ``user`` and ``filter`` (see ``turnwise.sandbox.surface``). Outside of it, ``watch`` has the bytes of
memory and disk and the number of files that end the command, and its ``folder``.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1
SIGNALS = (signal.SIGTERM, signal.SIGALRM)
NOT_STARTED = 127
"""Exit code of a command that can't be started."""
MOST_CLIENTS = 64
"""Clients that are connected at once; more wait."""
LONG_PATH = 3000
POLL = 0.1


def main() -> int:
    options, command = json.loads(sys.argv[1]), sys.argv[2:]
    grace, forward = float(options["grace"]), options.get("forward")
    linux = sys.platform == "linux"
    if forward:
        # It listens before the command runs, but no thread may run when the command is forked.
        listener = socket.create_server(("127.0.0.1", forward[0]), backlog=128)
    pipe = key_pipe(options["control"]) if "control" in options else None
    if linux:
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
        start(command, options.get("lock"), bool(options.get("watch")))
    if linux:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process of this user reads its memory
    if pipe is not None:
        os.close(pipe)
    if asked:  # while it was forked
        end()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # its threads take no signal, which would not wake this one
    if forward:
        threading.Thread(target=connect, args=(listener, forward[1]), daemon=True).start()
    if options.get("watch"):
        threading.Thread(target=watch, args=(options["watch"], child), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    process = status = 0
    while process != child:
        process, status = os.waitpid(-1, 0)
    end_descendants(child)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


# -- the command -------------------------------------------------------------------------------------------------------
def key_pipe(path: str) -> int:
    """Return a pipe that holds the key of a file, once: who reads it first has it. The file is removed."""
    with open(path, "rb") as file:
        key = file.read()
    os.unlink(path)
    reader, writer = os.pipe()
    os.write(writer, key)
    os.close(writer)
    os.set_inheritable(reader, True)
    os.environ["TURNWISE_CONTROL"] = str(reader)
    return reader


def start(command: list[str], lock: "dict[str, object] | None", contained: bool) -> None:
    """Become the command, in its own session. Exits with 127 if it can't be started, or can't be locked in."""
    try:
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if contained:
            leave_trainer()
        if lock is not None:
            give_up(lock)
        elif sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        print(f"{command[0]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr, flush=True)
    os._exit(NOT_STARTED)


def leave_trainer() -> None:
    """Let the kernel end this process before the trainer when memory is short, and leave the trainer's keys behind."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    number = KEYCTL.get(os.uname().machine)
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None)


def give_up(lock: "dict[str, object]") -> None:
    """Permanently give up resources, root and the kernel's rarer calls. Raises ``OSError`` if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, limit in lock["limits"].items():  # type: ignore[attr-defined]
        _, hard = resource.getrlimit(getattr(resource, name))
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(getattr(resource, name), (most, most))
    if lock.get("user") is not None:
        user: int = lock["user"]  # type: ignore[assignment]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    if lock.get("filter"):
        lines = bytes.fromhex(lock["filter"])  # type: ignore[arg-type]
        kept = ctypes.create_string_buffer(lines, len(lines))
        program = struct.pack("@HP", len(lines) // 8, ctypes.addressof(kept))  # struct sock_fprog
        header = ctypes.create_string_buffer(program, len(program))
        prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def prctl(libc: ctypes.CDLL, option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if libc.prctl(ctypes.c_int(option), *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


# -- the gateway, inside a container -----------------------------------------------------------------------------------
def connect(listener: socket.socket, path: str) -> None:
    """Connect each client of ``listener`` to the Unix socket at ``path``."""
    places = threading.BoundedSemaphore(MOST_CLIENTS)
    while True:
        places.acquire()
        try:
            client, _ = listener.accept()
        except OSError:  # a client that left, or too many open files
            places.release()
            time.sleep(POLL)
            continue
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:
            client.close()
            server.close()
            places.release()
            continue
        threading.Thread(target=both_ways, args=(client, server, places), daemon=True).start()


def both_ways(client: socket.socket, server: socket.socket, places: threading.Semaphore) -> None:
    """Send on what each of two sockets sends, until both have ended."""
    with client, server:
        answers = threading.Thread(target=copy, args=(server, client), daemon=True)
        answers.start()
        copy(client, server)
        answers.join()
    places.release()


def copy(source: socket.socket, sink: socket.socket) -> None:
    """Send on what ``source`` sends, until it ends or breaks."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


# -- limits, outside of a container ------------------------------------------------------------------------------------
def watch(limits: "dict[str, int | str]", child: int) -> None:
    """End the command when all its processes together use more memory, or its folder more disk, than they may.

    The size of the folder takes time to find, so at most a tenth of a core is spent on it.
    """
    next_look = 0.0
    while True:
        processes = descendants_of(os.getpid())
        broken = ""
        if (most := int(limits["memory"])) and memory_of(processes, most) > most:
            broken = f"more memory than memory_gb={most / 2**30:g}"
        elif time.monotonic() >= next_look:
            began = time.monotonic()
            broken = disk_beyond(str(limits["folder"]), processes, int(limits["disk"]), int(limits["files"]))
            next_look = time.monotonic() + max(POLL, 9 * (time.monotonic() - began))
        if broken:
            print(f"turnwise: the container used {broken}, and was ended", file=sys.stderr, flush=True)
            kill_group(child, signal.SIGKILL)
            return
        time.sleep(POLL)


def memory_of(processes: "list[int]", most: int) -> int:
    """Return the bytes of memory of processes. What they share counts once where a plain sum is more than ``most``."""
    resident, shares = {}, {}
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/statm") as file:
            resident[process] = int(file.read().split()[1]) * resource.getpagesize()
    if sum(resident.values()) <= most:
        return sum(resident.values())
    for process in resident:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{process}/smaps_rollup") as file:
            shares[process] = 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return sum((resident | shares).values())


class Held:
    """A folder kept open, so that those below it have short paths."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def disk_beyond(folder: str, processes: "list[int]", most: int, most_files: int) -> str:
    """Return the limit that a folder and its removed but open files exceed; empty if none."""
    used = files = 0
    folders: list[tuple[str, Held | None]] = [(folder, None)]
    while folders:
        path, held = folders.pop()
        try:
            if len(path) > LONG_PATH:
                held = Held(path)
                path = f"/proc/self/fd/{held.number}"
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                        files += 1
                        if entry.is_dir(follow_symlinks=False):
                            folders.append((entry.path, held))
                    if used > most:
                        return f"more disk than disk_gb={most / 2**30:g}"
                    if files > most_files:
                        return f"more files than max_files={most_files}"
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return "more folders in each other than can be counted"
    removed = {}
    for process in processes:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as opened:
            for entry in opened:
                with contextlib.suppress(OSError):
                    found = entry.stat()
                    if found.st_nlink == 0:
                        removed[found.st_dev, found.st_ino] = found.st_blocks * 512
    return f"more disk than disk_gb={most / 2**30:g}" if used + sum(removed.values()) > most else ""


# -- the end -----------------------------------------------------------------------------------------------------------
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


def descendants_of(parent: int) -> "list[int]":
    """Return the children of a process, and theirs. The children of a killed process pass to the subreaper."""
    found = [parent]
    for process in found:  # it grows
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):  # each has the children that it made itself
                with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
