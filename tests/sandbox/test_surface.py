"""The filter of whole programs: what it refuses, and that programs work under it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

from turnwise.sandbox.seccomp import MACHINES
from turnwise.sandbox.surface import NEWEST, REFUSED, REQUESTS, UNKNOWN, build_program_filter

NUMBER = {machine: column for machine, (column, _) in MACHINES.items()}
here = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="Linux on a machine whose calls are known"
)


def locked(action) -> tuple[int, int]:
    """Run ``action`` in a forked process under the filter. Return its value, or -1, and the number of its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        lines = build_program_filter(platform.machine())
        kept = ctypes.create_string_buffer(lines, len(lines))
        program = struct.pack("@HP", len(lines) // 8, ctypes.addressof(kept))
        header = ctypes.create_string_buffer(program, len(program))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0
        try:
            ctypes.set_errno(0)
            value = action(libc)
            found = (int(value), ctypes.get_errno() if value < 0 else 0)
        except OSError as error:
            found = (-1, error.errno)
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with open(reader) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(status) == 0, status
    return tuple(json.loads(text))


def test_every_known_machine_has_a_filter_of_whole_lines():
    for machine in MACHINES:
        lines = build_program_filter(machine)
        assert len(lines) % 8 == 0 and len(lines) // 8 < 4096
    with pytest.raises(ValueError, match="machine='riscv64': expected one of"):
        build_program_filter("riscv64")


COLUMN = NUMBER.get(platform.machine(), 0)
CALLS = {name: numbers[COLUMN] for name, numbers in {**REFUSED, **UNKNOWN}.items() if numbers[COLUMN] is not None}


@here
@pytest.mark.parametrize("name", CALLS)
def test_rare_calls_are_refused(name):
    number = CALLS[name]
    expected = errno.EPERM if name in REFUSED else errno.ENOSYS
    assert locked(lambda libc: libc.syscall(number, 0, 0, 0, 0, 0, 0)) == (-1, expected)


@here
def test_newer_calls_than_the_table_knows_do_not_exist():
    for number in (NEWEST + 1, 1000, 0x40000000 + 39):
        assert locked(lambda libc, number=number: libc.syscall(number, 0, 0, 0)) == (-1, errno.ENOSYS)


@here
@pytest.mark.parametrize(
    ("family", "kind", "protocol", "passes"),
    [
        (socket.AF_UNIX, socket.SOCK_STREAM, 0, True),
        (socket.AF_INET, socket.SOCK_STREAM, 0, True),
        (socket.AF_INET6, socket.SOCK_DGRAM, 0, True),
        (16, socket.SOCK_RAW, 0, True),  # NETLINK_ROUTE
        (16, socket.SOCK_RAW, 12, False),  # NETLINK_NETFILTER
        (17, socket.SOCK_RAW, 0, False),  # AF_PACKET
        (38, socket.SOCK_SEQPACKET, 0, False),  # AF_ALG
        (40, socket.SOCK_STREAM, 0, False),  # AF_VSOCK reaches the host of a virtual machine
        (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 6, True),
        (socket.AF_INET, socket.SOCK_STREAM, 132, False),  # SCTP; the kernel would load modules for these
        (socket.AF_INET, socket.SOCK_STREAM, 262, False),  # MPTCP
        (socket.AF_INET6, socket.SOCK_DGRAM, 136, False),  # UDP-Lite
        (socket.AF_INET, 6, 0, False),  # DCCP by its type
    ],
)
def test_families_of_sockets(family, kind, protocol, passes):
    value, error = locked(lambda libc: libc.socket(int(family), int(kind), protocol))
    assert (value >= 0) if passes else (value, error) == (-1, errno.EPERM)


@here
def test_processes_and_threads_pass_and_new_namespaces_do_not():
    clone = (56, 220)[COLUMN]
    for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
        assert locked(lambda libc, flag=flag: libc.syscall(clone, flag | signal.SIGCHLD, 0, 0, 0, 0)) == (
            -1,
            errno.EPERM,
        )

    def works(libc):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return int(subprocess.run(["sh", "-c", "echo 4"], capture_output=True, check=True).stdout)

    assert locked(works) == (4, 0)


@here
def test_a_socket_keeps_the_buffers_that_are_counted_and_takes_other_options():
    with socket.socket() as one:
        before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

        def wish(libc):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 8)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, 7, 9)  # the number of SO_SNDBUF, of another level
            return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

        assert locked(wish) == (before, 0)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@here
def test_no_input_is_typed_into_a_terminal_and_no_module_loaded_by_a_request():
    master, slave = os.openpty()
    for request in REQUESTS:
        assert locked(lambda libc, request=request: libc.ioctl(slave, request, b"xxxx")) == (-1, errno.EPERM)
    assert locked(lambda libc: os.get_terminal_size(slave).columns + 1)[0] >= 1
    os.close(master)
    os.close(slave)
