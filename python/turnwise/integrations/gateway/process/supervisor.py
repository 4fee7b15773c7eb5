"""Runs one command, and ends with it everything that it started. It is a separate program that imports no turnwise.
It has more than 400 lines because a container gets this file alone.

    python supervisor.py OPTIONS COMMAND ARGUMENT...

It is the subreaper of the command's descendants, so that those that detach become its children. When the command ends,
it kills every descendant at once: none of them changes a file that the command left. When the supervisor gets SIGTERM,
it sends SIGTERM to the command's process group, and SIGKILL after the grace. It exits with the command's code, or 128
plus the number of the signal that killed it.

``OPTIONS`` is JSON. ``grace`` is in seconds. ``seconds`` kill the command, as a container of docker or podman may
outlive a trainer that was killed. ``control`` is a file with a key: the command finds the number of a pipe that holds
it in ``TURNWISE_CONTROL``, and the file is gone. Inside a container, ``forward`` has a port and the Unix socket to
which its clients are connected, and ``lock`` what the command gives up: ``limits`` by their name in :mod:`resource`,
``user`` and ``filter`` (see ``turnwise.sandbox.surface``). Outside of it, ``watch`` has the bytes of memory and disk
and the number of files that end the command, and its ``folder``.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
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
MAX_CLIENTS = 64
"""Clients that are connected at once; more wait."""
POLL = 0.1
SOCKET, PIPE = 256 << 10, 64 << 10
"""Bytes that count for each socket and pipe: what its buffers may hold."""
IN_MEMORY = ("/tmp", "/dev/shm")
SHARED = (b"/dev/zero (deleted)",)
"""How the kernel names shared memory without a file."""
LEAST_FREE = 1 << 30
"""Bytes that commands leave on the disk for others, or a twentieth of it."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


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
    elif "seconds" in options:
        signal.setitimer(signal.ITIMER_REAL, float(options["seconds"]))
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
    places = threading.BoundedSemaphore(MAX_CLIENTS)
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

    What they hide takes time to find, and the size of the folder too, so at most a tenth of a core is spent on it.
    """
    hidden, next_look, folder = 0, 0.0, str(limits["folder"])
    with contextlib.suppress(OSError, ValueError):  # a folder is open for each level of the folders
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    while True:
        processes = find_descendants(os.getpid())
        broken = ""
        if time.monotonic() >= next_look:
            began = time.monotonic()
            held = Held(processes)
            hidden = held.memory
            broken = disk_beyond(folder, held, int(limits["disk"]), int(limits["files"]))
            next_look = time.monotonic() + max(POLL, 9 * (time.monotonic() - began))
        # Processes that start, end or change while they are counted may count twice, so what is too much counts again.
        over = (most := int(limits["memory"])) and measure_memory(processes, hidden, most) > most
        if not broken and over and measure_memory(find_descendants(os.getpid()), hidden, most) > most:
            broken = f"more memory than memory_gb={most / 2**30:g}"
        if broken:
            print(f"turnwise: the container used {broken}, and was ended", file=sys.stderr, flush=True)
            kill_group(child, signal.SIGKILL)
            return
        time.sleep(POLL)


def measure_memory(processes: "list[int]", hidden: int, most: int) -> int:
    """Return the bytes of memory of processes: what is resident or swapped out, page tables, and what is ``hidden``.

    What they share counts once where a plain sum is more than ``most``.
    """
    used = {process: in_kilobytes(f"/proc/{process}/status", b"VmRSS", b"VmPTE", b"VmSwap") for process in processes}
    if sum(used.values()) + hidden <= most:
        return sum(used.values()) + hidden
    total = hidden
    for process in used:
        shares = in_kilobytes(f"/proc/{process}/smaps_rollup", b"Pss", b"SwapPss")
        shared = in_kilobytes(f"/proc/{process}/smaps_rollup", b"Pss_Shmem") if shares else 0
        # A process that has just ended has no shares, nor anything else. One whose shares can't be read has the rest.
        names = (b"VmPTE",) if shares else (b"VmRSS", b"VmPTE", b"VmSwap")
        total += shares - shared + in_kilobytes(f"/proc/{process}/status", *names)
    return total


def in_kilobytes(path: str, *names: bytes) -> int:
    """Return the bytes in the lines ``name: number kB`` of a file; 0 if it can't be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        lines = (line.split() for line in file)
        return 1024 * sum(int(line[1]) for line in lines if line and line[0][:-1] in names)
    return 0


class Held:
    """What processes hold beyond their folder and their resident memory.

    ``memory`` is that of buffers of sockets and pipes, and of shared memory, which stays when no process has its pages.
    ``disk`` is that of removed files that are open or mapped. ``files`` counts those in folders that are memory.
    """

    def __init__(self, processes: "list[int]") -> None:
        self.memory = self.files = 0
        self.removed: dict[tuple[int, int], int] = {}
        self.shared: dict[bytes, int] = {}
        buffers: dict[int, int] = {}
        for process in processes:
            with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as opened:
                for entry in opened:
                    with contextlib.suppress(OSError):
                        found = entry.stat()
                        if stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                            buffers[found.st_ino] = SOCKET if stat.S_ISSOCK(found.st_mode) else PIPE
                        elif found.st_nlink == 0:
                            self.removed[found.st_dev, found.st_ino] = found.st_blocks * 512
            with contextlib.suppress(OSError), open(f"/proc/{process}/maps", "rb") as file:
                if b" (deleted)" in (maps := file.read()):
                    self.look_at(process, maps)
        self.memory = sum(buffers.values()) + sum(self.shared.values())
        self.disk = sum(self.removed.values())
        host = os.stat("/").st_dev
        for process in reversed(processes):  # the first of them is the tool, outside of the container
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{process}/root").st_dev != host:
                    places = [os.statvfs(f"/proc/{process}/root{place}") for place in IN_MEMORY]
                    self.files = sum(place.f_files - place.f_ffree for place in places)
                    break

    def look_at(self, process: int, maps: bytes) -> None:
        """Add the removed files that a process has mapped. Only root sees their blocks; others see what is mapped."""
        for line in maps.splitlines():
            where, _, offset, device, number, *name = line.split(None, 5)
            if not name or not name[0].endswith(b" (deleted)"):
                continue
            begin, end = (int(place, 16) for place in where.split(b"-"))
            size = end - begin + int(offset, 16)
            if name[0] in SHARED:
                self.shared[number] = max(size, self.shared.get(number, 0))
                continue
            major, minor = (int(part, 16) for part in device.split(b":"))
            key = os.makedev(major, minor), int(number)
            with contextlib.suppress(OSError):
                size = os.stat(f"/proc/{process}/map_files/{begin:x}-{end:x}").st_blocks * 512
            self.removed[key] = max(size, self.removed.get(key, 0))


class Folder:
    """An open folder, below which no link leads elsewhere. It is made readable if its owner made it unreadable."""

    def __init__(self, name: str, above: "Folder | None" = None) -> None:
        within: int | None = None if above is None else above.number
        self.number: int
        try:
            self.number = os.open(name, FOLDER, dir_fd=within)
        except PermissionError:
            bare = os.open(name, getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
            try:
                os.chmod(f"/proc/self/fd/{bare}", 0o700)
                self.number = os.open(f"/proc/self/fd/{bare}", os.O_RDONLY | os.O_DIRECTORY)
            finally:
                os.close(bare)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def disk_beyond(folder: str, held: Held, most: int, most_files: int) -> str:
    """Return the limit that a folder and what is held beyond it exceed, or the lack of disk; empty if there is none."""
    used, files = held.disk, held.files
    left: list[tuple[str, Folder | None]] = [(folder, None)]
    while left:
        name, above = left.pop()
        try:
            opened = Folder(name, above)
            with os.scandir(opened.number) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            left.append((entry.name, opened))
                    files += 1
                    if used > most:
                        return f"more disk than disk_gb={most / 2**30:g}"
                    if files > most_files:
                        return f"more files than max_files={most_files}"
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return "more folders in each other than can be counted"
            if error.errno in (errno.EACCES, errno.EPERM):
                return "a folder that can't be read, and so not be counted"
    system = os.statvfs(folder)
    if system.f_bavail * system.f_frsize < min(LEAST_FREE, system.f_blocks * system.f_frsize // 20):
        return f"disk, of which the file system of {folder} has almost none left"
    return f"more disk than disk_gb={most / 2**30:g}" if used > most else ""


# -- the end -----------------------------------------------------------------------------------------------------------
def kill_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_descendants(child: int) -> None:
    """Kill what is left of the command's group and all descendants, and wait until there are none."""
    kill_group(child, signal.SIGKILL)
    while True:
        for process in find_descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def find_descendants(parent: int) -> "list[int]":
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
