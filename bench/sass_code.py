"""Machine code of kernels: compile, disassemble, control-flow graph, loops and the longest path through a loop.

``sass.py`` counts with it. It needs nvcc and Triton's cuobjdump, and no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
# As CMake's Release build, but for the kernels that nothing counts.
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-DTURNWISE_COUNTED", "-Wno-deprecated-gpu-targets")
ENDS = ("EXIT", "RET", "KILL", "BRX", "JMX")  # no known successor
WIDTHS = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}


class Instruction(NamedTuple):
    place: int  # bytes from the start of the kernel
    guard: str  # predicate, as "@!P0"; empty: always
    text: str  # operation and operands

    @property
    def operation(self) -> str:
        return self.text.split()[0]

    @property
    def is_jump(self) -> bool:
        """A branch that the hot path may take.

        ``BRA.DIV`` is for lanes that have diverged. A conditional ``CALL`` within the kernel is a branch too (compute
        capability 8.0): what it skips is the branch back of a loop.
        """
        if self.operation.startswith("CALL.REL"):
            return bool(self.guard)
        return bool(re.match(r"(BRA|JMP)\b", self.text)) and ".DIV" not in self.operation

    @property
    def target(self) -> int:
        return int(self.text.rsplit("0x", 1)[1].split()[0].rstrip(")`"), 16)

    @property
    def access(self) -> str:
        """Kind and bytes of a memory access, as ``"stream16"`` (a load past the caches), ``"load8"``, ``"store16"``,
        ``"shared4"``; ``"exp"`` for an exponential, ``"shuffle"`` and ``"vote"`` between
        lanes; or empty."""
        kind = self.operation.split(".")[0]
        if kind in ("SHFL", "VOTE"):
            return {"SHFL": "shuffle", "VOTE": "vote"}[kind]
        if self.operation.startswith("MUFU.EX2"):
            return "exp"
        size = next((n for suffix, n in WIDTHS.items() if suffix in self.operation), 4)
        if kind == "LDG":
            return f"{'stream' if '.EF' in self.operation else 'load'}{size}"
        return f"store{size}" if kind == "STG" else f"shared{size}" if kind == "LDS" else ""


@dataclass
class Block:
    """Instructions that run one after another."""

    begin: int
    code: list[Instruction] = field(default_factory=list)
    after: list[int] = field(default_factory=list)  # begins of the blocks that may follow


@dataclass(frozen=True)
class Usage:
    registers: int  # per thread
    spills: int  # bytes of stack and local memory per thread
    shared: int  # bytes of static shared memory per block


@dataclass
class Kernel:
    """A kernel's machine code and what it uses."""

    name: str  # mangled
    usage: Usage
    code: list[Instruction]

    @functools.cached_property
    def blocks(self) -> dict[int, Block]:
        """Basic blocks by their first place, in the order of the code."""
        starts = {self.code[0].place}
        for here, following in zip(self.code, self.code[1:], strict=False):
            if here.is_jump:
                starts |= {here.target, following.place}
            elif here.operation.startswith(ENDS):
                starts.add(following.place)
        blocks: dict[int, Block] = {}
        for instruction in self.code:
            if instruction.place in starts:
                block = blocks[instruction.place] = Block(instruction.place)
            block.code.append(instruction)
        order = list(blocks)
        for begin, following_block in zip(order, [*order[1:], None], strict=True):
            last = blocks[begin].code[-1]
            falls = bool(last.guard) or not (last.is_jump or last.operation.startswith(ENDS))
            falls = falls or (last.is_jump and bool(re.search(r"\bU?P\d", last.text)))  # `BRA.U !UP0, 0x40`
            after = [last.target] if last.is_jump and last.target in blocks else []
            if falls and following_block is not None:
                after.append(following_block)
            blocks[begin].after = list(dict.fromkeys(after))
        return blocks

    @functools.cached_property
    def loops(self) -> dict[int, set[int]]:
        """Natural loops: the blocks of each, by the header that all its back edges reach."""
        dominators = self._dominators()
        before: dict[int, set[int]] = {b: set() for b in self.blocks}
        for begin, block in self.blocks.items():
            for target in block.after:
                before[target].add(begin)
        loops: dict[int, set[int]] = {}
        for begin, block in self.blocks.items():
            for header in block.after:
                if header not in dominators.get(begin, ()):
                    continue
                body, ways = loops.setdefault(header, {header}), [begin]
                while ways:
                    at = ways.pop()
                    if at not in body:
                        body.add(at)
                        ways += before[at]
        return loops

    def _dominators(self) -> dict[int, set[int]]:
        order = self._postorder()[::-1]
        before: dict[int, list[int]] = {b: [] for b in order}
        for begin in order:
            for target in self.blocks[begin].after:
                before[target].append(begin)
        found = {b: set(order) for b in order}
        found[order[0]] = {order[0]}
        changed = True
        while changed:
            changed = False
            for b in order[1:]:
                new = {b} | set.intersection(*(found[p] for p in before[b]))
                changed, found[b] = changed or new != found[b], new
        return found

    def _postorder(self) -> list[int]:
        first = next(iter(self.blocks))
        seen, done, ways = {first}, [], [(first, iter(self.blocks[first].after))]
        while ways:
            at, rest = ways[-1]
            target = next((t for t in rest if t not in seen), None)
            if target is None:
                done.append(at)
                ways.pop()
            else:
                seen.add(target)
                ways.append((target, iter(self.blocks[target].after)))
        return done

    def longest(self, wanted: Mapping[str, int], header: int | None = None) -> int | None:
        """Return the instructions on the longest path whose memory accesses are exactly ``wanted``; None if none is.

        The path goes once round the loop of ``header``, or without one from the kernel's start to an end. Loops inside
        run once. Accesses that ``wanted`` does not name must not occur; a count of -1 allows any number, and the name
        ``"any"`` all that are not named.
        """
        inside = self.loops[header] if header is not None else set(self.blocks)
        start = header if header is not None else next(iter(self.blocks))
        limits = {k: n for k, n in wanted.items() if n >= 0}
        free = {k for k, n in wanted.items() if n < 0}
        order = [b for b in self._postorder()[::-1] if b in inside]
        rank = {b: i for i, b in enumerate(order)}
        best: dict[int, dict[tuple[tuple[str, int], ...], int]] = {b: {} for b in order}
        best[start][()] = 0
        ends: list[int] = []
        for b in order:
            block = self.blocks[b]
            accesses = [i.access for i in block.code if i.access and i.access not in free]
            own = Counter(a for a in accesses if a in limits or "any" not in free)
            forward = [t for t in block.after if t in rank and rank[t] > rank[b]]
            for used, length in best[b].items():
                total = Counter(dict(used)) + own
                if any(n > limits.get(k, 0) for k, n in total.items()):
                    continue
                key, longer = tuple(sorted(total.items())), length + len(block.code)
                complete = all(total[k] == n for k, n in limits.items())
                if complete and (start in block.after if header is not None else not block.after):
                    ends.append(longer)
                for target in forward:
                    best[target][key] = max(longer, best[target].get(key, 0))
        return max(ends, default=None)

    def hot(self, wanted: Mapping[str, int]) -> int | None:
        """Return the shortest of the loops' longest paths with these accesses: of nested loops the inner one's."""
        found = [self.longest(wanted, header) for header in self.loops]
        return min((length for length in found if length is not None), default=None)


# ---------------------------------------------------------------------------------------------------------------------
# From files
# ---------------------------------------------------------------------------------------------------------------------
def tool(name: str) -> str:
    """Return the path of a CUDA tool: on the PATH, or Triton's own copy."""
    if found := shutil.which(name):
        return found
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{name}: expected it on the PATH or in Triton. Install the CUDA toolkit or Triton.")
    return str(path)


def compile_file(name: str, architecture: int) -> Path:
    """Return the cubin of ``csrc/cuda/<name>.cu`` for one architecture. What the sources gave before is taken again."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc: expected it on the PATH. Install the CUDA toolkit.")
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True).stdout
    contents = [path.read_bytes() for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
    made_of = hashlib.sha256(b"\0".join([version, repr(FLAGS).encode(), *contents])).hexdigest()[:16]
    folder = ROOT / "build" / "cubin" / made_of
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{name}.sm_{architecture}.cubin"
    with FileLock(cubin.with_suffix(".lock")):  # tests in several processes ask for one file
        if not cubin.exists():
            source, new = ROOT / "csrc" / "cuda" / f"{name}.cu", cubin.with_suffix(".new")
            command = [nvcc, *FLAGS, f"-arch=sm_{architecture}", "-I", ROOT / "csrc", "-cubin", "-o", new, source]
            subprocess.run(command, check=True)
            new.rename(cubin)
    return cubin


def read(binary: Path, *options: str) -> list[Kernel]:
    """Return the kernels of a cubin, or of a module with ``options`` such as ``-arch sm_90``."""

    def dump(what: str) -> str:
        command = [tool("cuobjdump"), what, *options, str(binary)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    usages = {name: Usage(*numbers) for name, *numbers in _usages(dump("-res-usage"))}
    _, *parts = re.split(r"Function : (\S+)", dump("-sass"))
    code = dict(zip(parts[::2], map(parse, parts[1::2]), strict=True))
    return [Kernel(name, usages[name], lines) for name, lines in code.items()]


def _usages(text: str) -> Iterable[tuple[str, int, int, int]]:
    for name, numbers in re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", text):
        n = {key: int(value) for key, value in re.findall(r"(\w+)(?:\[0\])?:(\d+)", numbers)}
        yield name, n["REG"], n.get("STACK", 0) + n.get("LOCAL", 0), n.get("SHARED", 0)


def parse(text: str) -> list[Instruction]:
    """Read instructions as cuobjdump prints them; the NOPs that fill up the end are left out."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z]\S.*?) *;", text)
    code = [Instruction(int(place, 16), guard.strip(), line) for place, guard, line in found]
    while code and code[-1].text.startswith("NOP"):
        code.pop()
    return code
