"""Build the filter of system calls for a sandboxed program, which the Linux kernel enforces (seccomp-bpf).

A process needs no privilege to install the filter, and can never remove it. The filter binds root too. It is a list of
``struct sock_filter`` over ``struct seccomp_data``: see https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

from __future__ import annotations

import errno
import struct

# numbers on (x86_64, aarch64); None where the machine has no such call
_Numbers = tuple[int | None, int | None]

ALLOWED: dict[str, _Numbers] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "futex": (202, 98), "sched_yield": (24, 124),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "getpid": (39, 172), "gettid": (186, 178), "getrusage": (98, 165), "times": (100, 153),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "restart_syscall": (219, 128),
    "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""Calls that a computation needs after its imports. None opens, lists or inspects a file by name, and none sleeps."""

FATAL: dict[str, _Numbers] = {
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None),
    "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "pidfd_send_signal": (424, 424), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203),
    "bind": (49, 200), "io_uring_setup": (425, 425), "bpf": (321, 280), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "setrlimit": (160, 164),
}  # fmt: skip
"""Calls that no computation makes by accident. The kernel kills the process at once, so the attempt is visible."""

OWN_LIMITS: dict[str, _Numbers] = {"prlimit64": (302, 261), "setitimer": (38, 103)}
"""Calls with which a process that serves several jobs bounds each of them. The first reaches no other process here."""

RARE_ADVICE = 100
"""``madvise`` takes memory of the whole machine out of use from this advice on (``MADV_HWPOISON``), if root asks."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""For each machine name: its column in the tables above, and the kernel's number of its architecture (AUDIT_ARCH)."""

_X32 = 0x40000000  # call numbers from here on are a second set (x32) on x86_64

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ARCH, _NUMBER = 4, 0  # offsets in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


def build_filter(machine: str, *, own_limits: bool = False) -> bytes:
    """Build the filter for ``machine`` (``platform.machine()``). :data:`ALLOWED` calls pass, :data:`FATAL` calls kill.

    With ``own_limits`` those of :data:`OWN_LIMITS` pass too. Any other call fails, which raises ``PermissionError`` in
    Python. Raises ``ValueError`` for a machine whose call numbers are not known here.
    """
    if machine not in MACHINES:
        raise ValueError(f"machine={machine!r}: expected one of {sorted(MACHINES)}")
    column, convention = MACHINES[machine]
    # First kill calls of another architecture and of x32, whose numbers mean other calls.
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, convention, skip_if=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, skip_unless=1),
        _line(_RETURN, _KILL),
    ]
    advice = [_line(_LOAD, argument(2)), _line(_AT_LEAST, RARE_ADVICE, skip_unless=1), _line(_RETURN, _REFUSE)]
    number = ALLOWED["madvise"][column]
    assert number is not None
    lines += [_line(_EQUAL, number, skip_unless=len(advice) + 1), *advice, _line(_LOAD, _NUMBER)]
    if own_limits:
        limit, timer = (numbers[column] for numbers in OWN_LIMITS.values())
        assert limit is not None and timer is not None
        itself = [_line(_LOAD, argument(0)), _line(_EQUAL, 0, skip_unless=1), _line(_RETURN, _ALLOW)]
        lines += [_line(_EQUAL, limit, skip_unless=len(itself) + 1), *itself, _line(_RETURN, _REFUSE)]
        lines += [_line(_EQUAL, timer, skip_unless=1), _line(_RETURN, _ALLOW)]
    for calls, action in ((ALLOWED, _ALLOW), (FATAL, _KILL)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                lines += [_line(_EQUAL, number, skip_unless=1), _line(_RETURN, action)]
    return b"".join([*lines, _line(_RETURN, _REFUSE)])


def _line(code: int, value: int, *, skip_if: int = 0, skip_unless: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_unless, value)


def argument(index: int) -> int:
    """Return the offset of the low half of a call's argument in ``struct seccomp_data``."""
    return 16 + 8 * index
