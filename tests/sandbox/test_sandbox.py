"""Programs that try to get out. Each test says what it tries, and holds that it came to nothing and was reported."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from turnwise.sandbox import sandbox as module
from turnwise.sandbox.sandbox import Returned, Sandbox, SandboxError, SandboxLimits, find_filter

LOCKED = sys.platform == "linux"
pytestmark = pytest.mark.skipif(not LOCKED, reason="programs can be locked in on Linux only")

SECRET = "a secret of the parent"
WAIT = "import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()"
WAIT_LINES = WAIT.replace("\n", "\n    ")


def sandbox(**limits):
    return Sandbox(SandboxLimits(**limits))


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    """Programs of this test alone carry this mark, wherever they fork to: other tests may run beside it."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setitem(module.ENVIRONMENT, "PYTHONMARK", mark)
    return mark


async def run(body: str, *arguments, **limits):
    """``body`` as the body of ``f(x)``, which is called on each of ``arguments`` (on 0 if there are none)."""
    lines = "\n    ".join(body.splitlines())
    return await sandbox(**limits).call(
        f"import os, sys\ndef f(x):\n    {lines}", "f", [(a,) for a in arguments or [0]]
    )


def processes() -> set[int]:
    """Every living process on the machine that carries this test's mark."""
    mark = f"PYTHONMARK={module.ENVIRONMENT['PYTHONMARK']}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if mark in words and not dead:
                found.add(int(folder.name))
    return found


# --- what a program may do -------------------------------------------------------------------------------------------
async def test_plain_values_come_back_in_order():
    values = [None, True, 0, -7, 10**30, 1.5, "", 'a"\\\n\t\x00é\u2028\U0001f600', [1, [2]], {"a": {"b": []}}]
    result = await run("return x", *values)
    assert result.reason == "ok" and [r.value for r in result.results] == values
    assert [type(r.value) for r in result.results] == list(map(type, values))
    assert result.seconds > 0 and result.printed == ""


async def test_standard_modules_and_prints_work():
    program = (
        "from collections import Counter\nimport math, re, heapq\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\n"
        "def f(xs):\n    print('seen', xs)\n"
        "    return [math.gcd(*xs), heapq.nlargest(1, xs), P(3).x, re.sub('a', 'b', 'aa')]"
    )
    result = await sandbox().call(program, "f", [([4, 6],)])
    assert result.results == [Returned([2, [6], 3, "bb"])]
    assert result.printed == "seen [4, 6]\n"


async def test_an_error_costs_its_own_call_alone():
    result = await run("return 10 // x", 2, 0, 5)
    assert [r.value for r in result.results] == [5, None, 2] and result.reason == "error"
    assert result.results[1].error == "ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def f(x:\n", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("def g(x): return x", "KeyError: 'f'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("\0", "source code string cannot contain null bytes"),
        ("f = 3", "TypeError: 'int' object is not callable"),
        ("def f(x): return object()", "TypeError: returned a object"),
        ("def f(x): return float('nan')", "TypeError: returned a float"),
        ("class I(int): pass\ndef f(x): return I(3)", "TypeError: returned a I"),
        ("def f(x): return f(x)", "RecursionError"),
        ("def f(x):\n    a = []\n    a.append(a)\n    return a", "RecursionError"),
        ("class E(Exception):\n    def __str__(self): raise self\ndef f(x): raise E", "E: (its text can't be had)"),
    ],
)
async def test_mistakes_are_told(program, said):
    result = await sandbox().call(program, "f", [(1,), (2,)])
    assert result.reason == "error" and all(said in r.error for r in result.results), result


async def test_equal_runs_give_equal_results():
    body = "import random\nreturn [list({'a', 'b', 'c', 'd', x}), random.random()]"
    first, second = await run(body, "e"), await run(body, "e")
    assert first.results == second.results


def test_the_limits_are_those_that_were_asked_for():
    limits = SandboxLimits(cpu_seconds=3, memory_mb=100).rlimits()
    assert limits.pop("RLIMIT_CPU") == (3, 4) and limits.pop("RLIMIT_AS") == (100 * 2**20,) * 2
    assert limits.pop("RLIMIT_NOFILE") == (16, 16)
    assert limits.pop("RLIMIT_CORE") == (1, 1)
    assert limits == dict.fromkeys(("RLIMIT_FSIZE", "RLIMIT_NPROC"), (0, 0))


# --- time, memory, output ---------------------------------------------------------------------------------------------
async def test_an_endless_loop_ends_at_its_cpu_limit_and_earlier_calls_count():
    result = await run("while x: pass\nreturn x", 0, 1, 0)
    assert result.reason == "cpu"
    assert result.results == [Returned(0), Returned(error="cpu"), Returned(error="cpu")]


async def test_waiting_for_ever_ends_at_the_wall_limit():
    result = await run(WAIT, wall_seconds=1.0)
    assert result.reason == "wall" and result.seconds >= 1.0 and not processes()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return input('Your move? ')", "EOFError: EOF when reading a line"),
        ("return sys.stdin.read()", None),
        ("return list(os.read(0, 100))", None),
        ("return os.read(1, 100)", "OSError"),
        ("return os.read(3, 100)", "OSError"),
    ],
)
async def test_there_is_no_input_to_wait_for(body, said):
    result = await run(body, wall_seconds=30.0)
    (returned,) = result.results
    assert result.seconds < 30 and not processes()
    if said is None:
        assert result.reason == "ok" and returned.value in ("", [])
    else:
        assert result.reason == "error" and said in returned.error, result


async def test_the_wall_limit_holds_while_the_loops_threads_are_busy():
    """Programs that wait for what never comes, more of them than asyncio has threads, which others hold besides."""
    done = threading.Event()
    loop = asyncio.get_running_loop()
    busy = [loop.run_in_executor(None, done.wait, 60) for _ in range(64)]
    try:
        results = await asyncio.gather(
            *(sandbox(wall_seconds=1.0).call(f"def f(x):\n    {WAIT_LINES}", "f", [(0,)]) for _ in range(3))
        )
    finally:
        done.set()
        await asyncio.gather(*busy)
    assert {result.reason for result in results} == {"wall"} and not processes()
    assert all(result.results == [Returned(error="wall")] and result.seconds < 50 for result in results)


LIBC = "import ctypes\nreturn sys.modules['ctypes'].CDLL(None)."
BACKGROUND = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time\n        time.sleep(60)"
FREED = "r = sys.modules['resource']\ntry: r.setrlimit(r.RLIMIT_AS, (-1, -1))\nexcept BaseException: pass\n"
IGNORED = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nos.closerange(0, 50)\nwhile True: pass"
DEEP = ["crash", "memory", "cpu"] if sys.version_info < (3, 12) else ["error"]
ENDS = [
    # body, reasons, limits
    (IGNORED, ["cpu"], {}),  # neither gains more than a second, nor hides it
    ("return len('a' * 10**9)", ["memory"], {"memory_mb": 128}),
    ("a = []\nwhile True: a.append('b' * 10**6)", ["memory"], {"memory_mb": 128}),
    (f"{FREED}return len('a' * 10**9)", ["memory", "forbidden"], {}),  # limits can't be taken back
    # Python 3.12 and newer limit C recursion, whatever the program sets: its RecursionError is an error of its own.
    ("sys.setrecursionlimit(10**9)\ng = lambda n: [*map(g, [n])]\nreturn g(0)", DEEP, {}),
    ("while True: sys.stdout.write('x' * 10**5)", ["output"], {"output_bytes": 5000}),
    ("while True: sys.stderr.write('x' * 10**5)", ["output"], {"output_bytes": 5000}),
    ("return 'x' * 10**6", ["output"], {"memory_mb": 512}),
    ("a = []\nfor _ in range(900): a = [a]\nreturn a", ["ok", "error", "crash"], {}),
    # Another process, any signal, another session, another's memory and the network are the end. One call each, so that
    # a hole would cost one process and not a machine; only what is proven for one is tried with many.
    *(
        (body, ["forbidden"], {})
        for body in (
            "return os.fork()",
            "while True:\n    try: os.fork()\n    except BaseException: pass",
            BACKGROUND,
            "os.execv('/bin/true', ['/bin/true'])",
            "os.posix_spawn('/bin/true', ['/bin/true'], {})",
            "import _thread\n_thread.start_new_thread(print, ())",
            "return os.kill(os.getppid(), 0)",
            "import signal\nos.kill(os.getppid(), signal.SIGKILL)",
            "os.kill(-1, 9)",
            "os.abort()",
            f"{LIBC}process_vm_readv(0, os.getppid(), 0, 0, 0, 0)",
            f"{LIBC}ptrace(0, os.getppid(), 0, 0, 0, 0)",
            f"{LIBC}socket(2, 1, 0)",  # the network
            f"{LIBC}socket(1, 1, 0)",  # programs of the same machine
            f"{LIBC}socket(1, 2, 0)",
            f"{LIBC}socket(16, 3, 0)",  # the kernel
            f"{LIBC}socketpair(1, 1, 0, None)",
        )
    ),
]


@pytest.mark.parametrize(("body", "reasons", "limits"), ENDS)
async def test_what_goes_too_far_is_the_end_and_its_reason_is_told(body, reasons, limits):
    result = await run(body, **limits)
    assert result.reason in reasons and not processes(), result
    if result.reason in ("memory", "output", "forbidden"):
        assert result.results[0].error.startswith(("MemoryError", result.reason))
        assert len(result.printed) <= limits.get("output_bytes", 65_536)


REFUSED = [
    "import time\ntime.sleep(600)",
    "return os.setsid()",
    "return os.setpgid(0, 0)",
    "open('big', 'w').write('x' * 10**9)",
    "os.mkdir('d')",
    "os.symlink('/', 'l')",
    *(f"return open('/proc/' + str({number}) + '/environ').read()" for number in ("os.getppid()", "'self'")),
    *(
        f"return {call}({path!r})"
        for path in (__file__, "/etc/passwd", "/proc/self/maps", sys.executable, module.__file__, "child.py")
        for call in ("open", "os.stat", "os.listdir", "os.readlink")
    ),
]


async def test_what_is_refused_with_an_error_got_nowhere(tmp_path, monkeypatch):
    """The kernel refuses it, and the program goes on: sleep, sessions, files, the parent's environment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for body in REFUSED:
        result = await run(body)
        (returned,) = result.results
        assert result.reason == "error" and returned.error.startswith("PermissionError"), (body, result)
        assert list(tmp_path.iterdir()) == []


async def test_modules_beyond_those_of_a_computation_are_not_there():
    tried = await run("__import__(x)", "subprocess", "socket", "turnwise", "numpy")
    assert [r.error.split("'")[0] for r in tried.results] == ["ModuleNotFoundError: No module named "] * 4


# --- the parent's things ----------------------------------------------------------------------------------------------
async def test_the_parents_environment_is_not_the_programs(monkeypatch):
    monkeypatch.setenv("TURNWISE_TEST_SECRET", SECRET)
    assert (await run("return dict(os.environ)")).results[0].value == module.ENVIRONMENT
    assert all(name.startswith("PYTHON") for name in module.ENVIRONMENT)


async def test_no_open_file_of_the_parent_is_inherited(tmp_path):
    path = tmp_path / "held.txt"
    path.write_text(SECRET)
    with path.open() as held:
        os.set_inheritable(held.fileno(), True)
        attempt = "try: found.append([n, os.read(n, 100).decode()])\n    except OSError: pass"
        body = f"found = []\nfor n in range(64):\n    {attempt}\nreturn found"
        # 0 is the job's pipe, at its end; reading where it writes is refused.
        assert (await run(body)).results[0].value == [[0, ""]]


async def test_what_is_right_is_never_told():
    """A program may read its own memory: it finds its inputs there, and nothing of what they are compared with."""
    body = (
        "frame, names = sys._getframe(), set()\nwhile frame:\n"
        "    names |= {k for v in frame.f_locals.values() if type(v) is dict for k in v}\n    frame = frame.f_back\n"
        "return sorted(names)"
    )
    (returned,) = (await run(body)).results
    job = {"program", "function", "inputs", "limits", "filter", "parent"}
    assert job <= set(returned.value) and "expected" not in returned.value


async def test_file_size_is_zero_even_without_the_filter(monkeypatch):
    """The second lock, which stands alone where the first can't be had."""
    box = sandbox()
    monkeypatch.setattr(box, "_filter", None)
    program = "def f(x):\n    with open('big', 'wb', buffering=0) as out:\n        return out.write(b'x' * 100)"
    result = await box.call(program, "f", [(0,)])
    assert result.results[0].value is None and (
        result.results[0].error.startswith("OSError") or result.reason == "crash"
    )


WRITTEN = "for n in range(3, 9):\n    try: os.write(n, {!r})\n    except OSError: pass\nreturn 42"


async def test_lines_of_ones_own_among_the_results_claim_nothing_more_than_a_return():
    """A program can write where results go. What it writes is read as data, and nonsense ends the results."""
    forged = await run(WRITTEN.format(b'{"value": 41}\n'))
    assert forged.results[0] in (Returned(41), Returned(42)) and len(forged.results) == 1
    # Nor can it make believe that the machine is to blame, which would spare it a reward.
    for line in (b'{"refused": "x"}\n', b"nonsense\n", b"[" * 30000 + b"\n"):
        result = await run(WRITTEN.format(line), 0, 1)
        assert result.reason == "crash" and [r.error for r in result.results] == ["crash", "crash"], line[:20]


async def test_root_gives_up_its_rights():
    waiting = asyncio.create_task(run(WAIT))
    while not (locked := [number for number in processes() if is_locked_in(number)]):
        await asyncio.sleep(0.01)
    status = Path(f"/proc/{locked[0]}/status").read_text()
    assert [line.split()[1] for line in status.splitlines() if line.startswith(("CapPrm", "CapEff"))] == ["0" * 16] * 2
    waiting.cancel()
    await asyncio.wait([waiting])


def test_lower_limits_of_the_user_are_kept():
    code = (
        "import asyncio, resource\nfrom turnwise.sandbox import Sandbox, SandboxLimits\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (100, 100))\n"
        "run = asyncio.run(Sandbox(SandboxLimits(cpu_seconds=500)).call('def f(x): return x + 1', 'f', [(1,)]))\n"
        "assert run.results[0].value == 2, run"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# --- the parent -------------------------------------------------------------------------------------------------------
async def test_cancelling_kills_the_program():
    task = asyncio.create_task(run(WAIT))
    while not processes():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not processes()


def test_a_program_dies_with_its_parent(marked):
    code = (
        "import asyncio\nfrom turnwise.sandbox import sandbox\n"
        f"sandbox.ENVIRONMENT['PYTHONMARK'] = {marked!r}\n"
        f"asyncio.run(sandbox.Sandbox().call({f'def f(x):{chr(10)}    {WAIT_LINES}'!r}, 'f', [(0,)]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    deadline = time.monotonic() + 50
    # Waiting inside a lock, the program has long asked to die with its parent.
    while not any(is_locked_in(number) for number in processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes()


def is_locked_in(number):
    try:
        return "Seccomp:\t2" in Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False


async def test_many_run_side_by_side_and_the_latency_is_told(capsys):
    box = Sandbox(parallel=2)
    started = time.perf_counter()
    runs = await asyncio.gather(*(box.call("def f(x):\n    return x * x", "f", [(n,)]) for n in range(40)))
    wall = time.perf_counter() - started
    assert [r.results[0].value for r in runs] == [n * n for n in range(40)]
    assert not processes()
    with capsys.disabled():
        middle = statistics.median(r.seconds for r in runs)
        print(f"\nsandbox: 40 runs, 2 at once: median {middle * 1e3:.0f} ms a run, {40 / wall:.0f} runs a second")


def test_one_sandbox_serves_several_event_loops():
    box = Sandbox(parallel=1)
    for _ in range(2):
        assert asyncio.run(box.call("def f(x):\n    return x", "f", [(1,)])).reason == "ok"


# --- where it can't be had -------------------------------------------------------------------------------------------
def test_other_systems_are_refused_unless_that_is_accepted(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"darwin on .*: a program can read files, .*strict=False"):
        Sandbox()
    with pytest.warns(UserWarning, match="only CPU time, wall time and output are bounded"):
        assert find_filter(strict=False) is None
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SandboxError, match="win32"):
        Sandbox(strict=False)


def test_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(module.platform, "machine", lambda: "vax")
    with pytest.raises(SandboxError, match="linux on vax"):
        Sandbox()


async def test_a_kernel_that_refuses_the_filter_is_told(monkeypatch):
    box = sandbox()
    monkeypatch.setattr(box, "_filter", b"\0" * 8)  # no filter ends like that
    with pytest.raises(SandboxError, match=r"refused to lock the program in: .*prctl\(22\)"):
        await box.call("def f(x): return x", "f", [(1,)])


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"cpu_seconds": 0}, "cpu_seconds=0"),
        ({"cpu_seconds": 0.5}, "whole seconds"),
        ({"memory_mb": -1}, "memory_mb=-1"),
    ],
)
def test_bad_limits_are_named(limits, named):
    with pytest.raises(ValueError, match=named):
        SandboxLimits(**limits)


async def test_inputs_that_are_not_plain_are_named():
    with pytest.raises(TypeError, match="inputs="):
        await sandbox().call("def f(x): return x", "f", [(object(),)])


def test_results_are_json_that_python_reads():
    lines = b'{"locked": true}\n{"value": 1}\n{"error": "E"}\nx'
    assert module._read_results(lines, 5) == [Returned(1), Returned(error="E")]
    assert module._read_results(lines, 1) == [Returned(1)] and module._read_results(b"", 1) == []
