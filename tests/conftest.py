"""Settings of all tests: no network, no time limit on property tests, and which tests `make test` leaves out.

Marks: only `make test-all` runs `slow` tests; `.ci/run` runs those that are also `representative`. Of products of three
or more parameters, a few cases that contain each pair of values are quick; the others are slow. Tests that start
processes or a browser are sorted by their fixtures (`COSTLY`). Tests marked `gpu` exist only if torch sees a GPU, tests
marked `vllm` only if vLLM is installed, and tests marked `needs("name")` only if that package is. `make test-all`
installs most of them, some in separate environments.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import multiprocessing.spawn
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import HealthCheck, settings

from turnwise.utils import memory
from turnwise.utils.threads import end_program_loop

from .trained import games, team  # noqa: F401  # fixtures
from .warm_python import started

# Set this before any import of transformers, so that a test that asks the Hub for a model fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test cuts the power, and to wait for the disk takes as long as a small run. A closed file still raises.
os.fsync = os.fstat  # type: ignore[assignment]

# A shell's background jobs ignore Ctrl-C, and programs that tests start inherit that. Some tests send them Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("turnwise", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("turnwise")

# Fixtures that mark the tests that use them: one builds for minutes, one starts servers.
MARKED_FIXTURES = {"emulator": "slow", "vllm_servers": "vllm"}
# Packages that the tests with a fixture need. Other tests name theirs: `pytest.mark.needs("trl")`.
NEEDED_BY_FIXTURES = {"peer": ("trl", "verl"), "verl": ("verl",), "skyrl": ("skyrl",)}
# Fixtures that start processes for each test. In each room, one test of each of these runs by default, or in CI; the
# rest are slow.
COSTLY = {
    "warm_python": "default",
    "warm_starts": "default",
    "run_ranks": "ci",
    "browser": "ci",
    "ray_address": "ci",
}
# Types of parameters that are compared by value; others are compared by identity.
PLAIN = (str, int, float, type(None))


# Collecting makes hundreds of thousands of objects that stay: searching them for garbage takes a third of its time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    memory._frozen = True  # else each training run counts what is frozen, which takes up to half a second
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """Exempt what exists from garbage collection: of imports and collected tests one takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_program() -> Iterator[None]:
    """Each test is a program of its own: its event loop ends with it."""
    yield
    end_program_loop()


NARROW = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}


@contextlib.contextmanager
def _narrow() -> Iterator[None]:
    from turnwise.tasks import tiny

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "build_model", functools.partial(tiny.build_model, **NARROW))
        yield


@pytest.fixture(scope="session")
def narrow() -> Callable[[], AbstractContextManager[None]]:
    """A context in which runs with ``path = "tiny"`` get one narrow layer, for fixtures that outlive a file."""
    return _narrow


@pytest.fixture(scope="module")
def narrow_model() -> Iterator[None]:
    """Runs of this process with ``path = "tiny"`` get one narrow layer: enough where a test asks for no skill."""
    with _narrow():
        yield


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A program to start as Python: its imports are done. Without compilation, and with one thread."""
    if not sys.platform.startswith("linux"):
        yield sys.executable
        return
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    with started(tmp_path_factory.mktemp("warm"), environment) as program:
        yield program


@pytest.fixture
def warm_starts(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process starts as ``sys.executable``, or by multiprocessing, has its imports done."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(warm_python))


def pytest_report_header(config: pytest.Config) -> list[str]:
    import torch

    from turnwise.ops.common import dispatch

    kernels = "native and torch" if dispatch.extension is not None else "torch alone: the compiled module did not load"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, so cases for a GPU are not generated"
    vllm = "tested here" if importlib.util.find_spec("vllm") else "not installed here: `make test-vllm` tests it"
    slow = "left out: `make test-all` runs them" if "not slow" in config.option.markexpr else "included"
    return [f"backends: {kernels}", f"GPU: {gpu}", f"vLLM: {vllm}", f"slow tests: {slow}"]


@functools.cache
def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def can_run(item: pytest.Item) -> bool:
    """Tell whether the packages that a test needs are installed."""
    named = [package for mark in item.iter_markers("needs") for package in mark.args]
    for fixture in getattr(item, "fixturenames", ()):
        named += NEEDED_BY_FIXTURES.get(fixture, ())
    return all(map(is_installed, named))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    missing = set() if torch.cuda.is_available() else {"gpu"}
    missing |= set() if is_installed("vllm") else {"vllm"}
    # Leave out the tests that this machine can't run.
    for item in items:
        for fixture in set(getattr(item, "fixturenames", ())) & MARKED_FIXTURES.keys():
            item.add_marker(MARKED_FIXTURES[fixture])
        if not item.get_closest_marker("xdist_group"):  # `--dist loadgroup` keeps files whole
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    without = {item for item in items if missing & {mark.name for mark in item.iter_markers()} or not can_run(item)}
    config.hook.pytest_deselected(items=list(without))
    items[:] = [item for item in items if item not in without]

    # Mark the cases of a product slow that are not needed to cover each pair of values.
    quick: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            quick.setdefault((str(item.path), item.originalname), []).append(item)
    for cases in quick.values():
        chosen = covering([axes(case) for case in cases], 2)
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker(pytest.mark.slow)

    # Of the tests with a costly fixture, keep one of each room.
    seen: set[tuple[str, str]] = set()
    for item in items:
        for fixture in COSTLY.keys() & set(getattr(item, "fixturenames", ())):
            kind = (item.nodeid.split("/")[1], fixture)
            if kind in seen or COSTLY[fixture] == "ci":
                item.add_marker(pytest.mark.slow)
            if kind not in seen and COSTLY[fixture] == "ci":
                item.add_marker(pytest.mark.representative)
            if COSTLY[fixture] == "ci" or not item.get_closest_marker("slow"):
                seen.add(kind)


def axes(case: pytest.Function) -> tuple[tuple[str, object], ...]:
    """Return the parameters of a case as ``(names, value)``. Those of one `parametrize` count as one."""
    given = {name: value if isinstance(value, PLAIN) else id(value) for name, value in case.callspec.params.items()}
    together = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [tuple(re.findall(r"\w+", n)) if isinstance(n, str) else tuple(n) for n in together]
    alone = [(name,) for name in given if not any(name in some for some in names)]
    return tuple((",".join(some), tuple(given[name] for name in some)) for some in [*names, *alone])


def covering(cases: list[tuple[tuple[str, object], ...]], together: int) -> set[int]:
    """Choose a few cases that contain each pair of values of all cases, or each value alone. Returns their indices.

    >>> cases = [(("a", a), ("b", b), ("c", c)) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    >>> sorted(covering(cases, 2))
    [0, 3, 5, 6]
    >>> sorted(covering(cases, 1))
    [0, 7]
    """
    if len(cases[0]) <= together:
        return set(range(len(cases)))
    of_case = [set(itertools.combinations(case, together)) for case in cases]
    missing: set[object] = set().union(*of_case)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(of_case[index] & missing))
        chosen.add(best)
        missing -= of_case[best]
    return chosen
