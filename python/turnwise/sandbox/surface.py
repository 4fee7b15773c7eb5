"""Build the filter of system calls for a whole program in a container, such as an agent with its shell commands.

Unlike the filter of a computation (``seccomp.py``) it passes what programs need: files, processes, sockets. It refuses
what reaches around a container or into the kernel: namespaces, mounts, keys, tracing, ``io_uring``, ``bpf``, modules,
clocks, other families of sockets, and every call that is newer than this table.
"""

from __future__ import annotations

import errno

from turnwise.sandbox.seccomp import (
    _ALLOW,
    _ARCH,
    _AT_LEAST,
    _EQUAL,
    _KILL,
    _LOAD,
    _NUMBER,
    _RETURN,
    MACHINES,
    _line,
    _Numbers,
    argument,
)

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
    "semget": (64, 190), "mq_open": (240, 180), "io_setup": (206, 0),
}  # fmt: skip
"""Calls that fail with ``EPERM``."""
UNKNOWN: dict[str, _Numbers] = {"clone3": (435, 435), "memfd_create": (319, 279)}
"""Calls that fail with ``ENOSYS``, so that programs take an older one: the flags of ``clone3`` can't be read here, and
files without a name are counted nowhere."""

NEWEST = 462
"""The last call that this table knows (``mseal``)."""
NEW_NAMESPACES = 0x7E020000
"""Flags of ``clone`` that make a namespace."""
FAMILIES: dict[int, tuple[int, ...]] = {1: (0, 1), 2: (0, 1, 6, 17), 10: (0, 6, 17, 58), 16: (0,)}
"""Families of sockets and their protocols: Unix, IPv4 and IPv6 (TCP, UDP and ping), and ``NETLINK_ROUTE``, which lists
interfaces. The kernel loads a module for many others when a program asks for one."""
TYPES = (1, 2, 3, 5)
"""Streams, datagrams, raw sockets and ordered packets."""
REQUESTS: tuple[int, ...] = (
    0x5412, 0x541C,  # TIOCSTI, TIOCLINUX: type into a terminal
    0x5423,  # TIOCSETD: loads a line discipline
    0x8940, 0x8941, 0x8980, 0x8981, 0x8982, 0x8983, 0x89A0, 0x89A1, 0x89A2, 0x89A3,  # load bridges, VLANs and DLCI
)  # fmt: skip
"""``ioctl`` requests that fail with ``EPERM``."""
BUFFER_SIZES = (7, 8, 32, 33)
"""``SO_SNDBUF``, ``SO_RCVBUF`` and their variants for root: such a wish counts as fulfilled, and changes nothing, as
the memory of a container is counted with buffers of the usual size."""

_ANY_BIT, _AND = 0x45, 0x54
_CLONE: _Numbers = (56, 220)
_SOCKET: tuple[_Numbers, ...] = ((41, 198), (53, 199))
_IOCTL: _Numbers = (16, 29)
_SET_OPTION: _Numbers = (54, 208)
_SOL_SOCKET = 1
_REFUSE, _NO_CALL, _PRETEND = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x00050000


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
    lines += _only(_CLONE[column], [_line(_LOAD, argument(0)), _line(_ANY_BIT, NEW_NAMESPACES, skip_unless=1)])
    lines += _only(_IOCTL[column], [_line(_LOAD, argument(1)), *_unless(REQUESTS), _line(_RETURN, _ALLOW)])
    for numbers in _SOCKET:
        kind = [_line(_LOAD, argument(1)), _line(_AND, 0xF)]  # without SOCK_NONBLOCK and SOCK_CLOEXEC
        checks = [*kind, *_unless(TYPES), _line(_RETURN, _REFUSE)]
        for family, protocols in FAMILIES.items():
            protocol = [_line(_LOAD, argument(2)), *_unless(protocols), _line(_RETURN, _REFUSE), _line(_RETURN, _ALLOW)]
            checks += [_line(_LOAD, argument(0)), _line(_EQUAL, family, skip_unless=len(protocol)), *protocol]
        lines += _only(numbers[column], checks)
    option = [_line(_LOAD, argument(1)), _line(_EQUAL, _SOL_SOCKET, skip_if=1), _line(_RETURN, _ALLOW)]
    option += [_line(_LOAD, argument(2)), *_unless(BUFFER_SIZES), _line(_RETURN, _ALLOW), _line(_RETURN, _PRETEND)]
    lines += _only(_SET_OPTION[column], option)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _only(number: int | None, checks: list[bytes]) -> list[bytes]:
    """Return lines that refuse the call ``number`` unless ``checks`` skip the refusal, and load the number again."""
    assert number is not None
    body = [*checks, _line(_RETURN, _REFUSE), _line(_LOAD, _NUMBER)]
    return [_line(_EQUAL, number, skip_unless=len(body)), *body]


def _unless(values: tuple[int, ...]) -> list[bytes]:
    """Return lines that skip the line after them if the loaded number is one of ``values``."""
    return [_line(_EQUAL, value, skip_if=len(values) - place) for place, value in enumerate(values)]
