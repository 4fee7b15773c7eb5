"""Build the filter of system calls for a whole program in a container, such as an agent with its shell commands.

Unlike the filter of a computation (``seccomp.py``) it passes what programs need: files, processes, sockets. It refuses
what reaches around a container or into the kernel: namespaces, mounts, keys, tracing, ``io_uring``, ``bpf``, modules,
clocks, other families of sockets, and every call that is newer than this table.
"""

from __future__ import annotations

import errno

from turnwise.sandbox.seccomp import _ALLOW, _ARCH, _EQUAL, _KILL, _LOAD, _NUMBER, _RETURN, MACHINES, _line, _Numbers

REFUSED: dict[str, _Numbers] = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "acct": (163, 89), "swapon": (167, 224),
    "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None), "sysfs": (139, None),
    "_sysctl": (156, None), "ustat": (136, None), "lookup_dcookie": (212, 18),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
"""Calls that fail with ``EPERM``."""
UNKNOWN: dict[str, _Numbers] = {"clone3": (435, 435), "memfd_create": (319, 279)}
"""Calls that fail with ``ENOSYS``, so that programs take an older one: the flags of ``clone3`` can't be read here, and
files without a name are counted nowhere."""

NEWEST = 462
"""The last call that this table knows (``mseal``)."""
NEW_NAMESPACES = 0x7E020000
"""Flags of ``clone`` that make a namespace."""
FAMILIES = (1, 2, 10)
"""Families of sockets: Unix, IPv4 and IPv6. ``AF_NETLINK`` passes for ``NETLINK_ROUTE``, which lists interfaces."""
NETLINK = 16
TERMINAL_INPUT = (0x5412, 0x541C)
"""``ioctl`` requests that type into a terminal: ``TIOCSTI`` and ``TIOCLINUX``."""

_AT_LEAST, _ANY_BIT = 0x35, 0x45
_CLONE: _Numbers = (56, 220)
_SOCKET: tuple[_Numbers, ...] = ((41, 198), (53, 199))
_IOCTL: _Numbers = (16, 29)
_REFUSE, _NO_CALL = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def build_program_filter(machine: str) -> bytes:
    """Build the filter for ``machine`` (``platform.machine()``). Raises ``ValueError`` for one that is unknown here."""
    if machine not in MACHINES:
        raise ValueError(f"machine={machine!r}: expected one of {sorted(MACHINES)}")
    column, convention = MACHINES[machine]
    lines = [_line(_LOAD, _ARCH), _line(_EQUAL, convention, skip_if=1), _line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]
    lines += [_line(_AT_LEAST, NEWEST + 1, skip_unless=1), _line(_RETURN, _NO_CALL)]  # x32 calls too
    for calls, action in ((REFUSED, _REFUSE), (UNKNOWN, _NO_CALL)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                lines += [_line(_EQUAL, number, skip_unless=1), _line(_RETURN, action)]
    lines += _only(_CLONE[column], [_line(_LOAD, _argument(0)), _line(_ANY_BIT, NEW_NAMESPACES, skip_unless=1)])
    typed = [
        _line(_EQUAL, request, skip_if=len(TERMINAL_INPUT) - place) for place, request in enumerate(TERMINAL_INPUT)
    ]
    ioctl = [_line(_LOAD, _argument(1)), *typed, _line(_RETURN, _ALLOW)]
    lines += _only(_IOCTL[column], ioctl)
    for numbers in _SOCKET:
        passes = [[_line(_EQUAL, family, skip_unless=1), _line(_RETURN, _ALLOW)] for family in FAMILIES]
        routes = [_line(_EQUAL, NETLINK, skip_unless=3), _line(_LOAD, _argument(2)), _line(_EQUAL, 0, skip_unless=1)]
        checks = [_line(_LOAD, _argument(0)), *(line for both in passes for line in both), *routes]
        lines += _only(numbers[column], [*checks, _line(_RETURN, _ALLOW)])
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _only(number: int | None, checks: list[bytes]) -> list[bytes]:
    """Return lines that refuse the call ``number`` unless ``checks`` skip the refusal, and load the number again."""
    assert number is not None
    body = [*checks, _line(_RETURN, _REFUSE), _line(_LOAD, _NUMBER)]
    return [_line(_EQUAL, number, skip_unless=len(body)), *body]


def _argument(index: int) -> int:
    """Return the offset of the low half of an argument in ``struct seccomp_data``."""
    return 16 + 8 * index
