from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from turnwise.sandbox.seccomp import ALLOWED, FATAL, MACHINES, build_filter

HEADERS = {
    "x86_64": [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    "aarch64": [Path("/usr/include/asm-generic/unistd.h")],
}
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050001


def decide(program: bytes, convention: int, number: int, *arguments: int) -> int:
    """What the filter says: an interpreter of the four instructions that it is made of."""
    data = {4: convention, 0: number} | {16 + 8 * index: (*arguments, *[0] * 6)[index] for index in range(6)}
    lines = list(struct.iter_unpack("=HBBI", program))
    place, loaded = 0, 0
    while True:
        code, skip_if, skip_unless, value = lines[place]
        if code == 0x20:
            loaded = data[value]
        elif code == 0x06:
            return value
        else:
            holds = loaded == value if code == 0x15 else loaded >= value
            assert code in (0x15, 0x35)
            place += skip_if if holds else skip_unless
        place += 1


@pytest.mark.parametrize("machine", MACHINES)
def test_each_call_meets_its_fate(machine):
    program = build_filter(machine)
    column, convention = MACHINES[machine]
    said = {number: decide(program, convention, number) for number in range(600)}
    for calls, action in ((ALLOWED, ALLOW), (FATAL, KILL)):
        for name, numbers in calls.items():
            if numbers[column] is not None:
                assert said.pop(numbers[column]) == action, name
    assert set(said.values()) == {REFUSE}


@pytest.mark.parametrize("machine", MACHINES)
def test_no_advice_takes_memory_from_the_machine(machine):
    program, (column, convention) = build_filter(machine), MACHINES[machine]
    said = {advice: decide(program, convention, ALLOWED["madvise"][column], 0, 0, advice) for advice in range(200)}
    assert {said[advice] for advice in range(26)} == {ALLOW}
    assert {said[advice] for advice in range(100, 200)} == {REFUSE}  # MADV_HWPOISON and MADV_SOFT_OFFLINE
    assert decide(program, convention, ALLOWED["read"][column], 0, 0, 100) == ALLOW


def test_another_calling_convention_is_the_end():
    for machine, (_, convention) in MACHINES.items():
        assert decide(build_filter(machine), convention ^ 1, 0) == KILL
    assert decide(build_filter("x86_64"), MACHINES["x86_64"][1], 0x40000000) == KILL  # read, by its x32 number


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_the_kernels(machine):
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    known = {
        name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", header.read_text())
    }
    column = MACHINES[machine][0]
    for name, numbers in (ALLOWED | FATAL).items():
        if numbers[column] is not None:
            assert known[name] == numbers[column], name
        else:
            assert name not in known, name


def test_no_call_that_names_a_file_is_allowed():
    named = {"open", "openat", "openat2", "stat", "newfstatat", "statx", "access", "faccessat", "readlink", "chdir"}
    assert not named & ALLOWED.keys() and not ALLOWED.keys() & FATAL.keys()


def test_an_unknown_machine_is_named():
    with pytest.raises(ValueError, match="machine='vax'"):
        build_filter("vax")
