"""The bench of the state store: its states, that a wrong copy is caught, its goals, a tree in a process of its own."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]
BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(("size", "pickled", "containers"), [("S", 1.3, 40), ("M", 98, 280), ("L", 1_900, 3_000)])
def test_states_have_their_size(load: Load, size: str, pickled: float, containers: int) -> None:
    cases = load("state_cases")
    data = cases.make(size)
    found = cases.census(data)
    assert found["pickled, kB"] == pytest.approx(pickled, rel=0.05)
    assert found["containers"] == pytest.approx(containers, rel=0.1)
    assert cases.same(data, cases.make(size)) and data["game"] is not cases.make(size)["game"]
    for what, whole in (("leaves", found["leaves"]), ("containers", found["containers"])):
        chosen = cases.writes(data, what)
        assert len(chosen) == pytest.approx(whole / 100, abs=12 + whole / 1000)
        for path, value in chosen:
            assert type(value) is type(cases.at(data, path)) and value != cases.at(data, path)


def test_ways_agree_and_a_wrong_one_is_caught(load: Load) -> None:
    bench, cases = load("bench_state"), load("state_cases")
    Method = sys.modules["state_cases"].Method  # the one that the bench knows
    for size in ("S", "M"):
        bench.verify(size, cases.methods())
    for wrong in (lambda held: held, lambda held: {**held}, lambda held: copy.deepcopy({**held, "game": {"turn": 1}})):
        with pytest.raises(AssertionError, match=r"writing to a fork|a written fork"):
            bench.verify("S", {"wrong": Method("wrong", wrong)})
    # Same looks at types and arrays.
    cases = load("state_cases")
    data = cases.make("L")
    assert cases.same(data, copy.deepcopy(data))
    for path, value in ((("arrays", "map", 3, 4), 9.0), (("game", "turn"), False), (("token_ids", 7), 1)):
        other = copy.deepcopy(data)
        cases.at(other, path[:-1])[path[-1]] = value
        assert not cases.same(data, other)
    timing = load("timing")
    names = {"sleep": time.sleep}
    seconds = timing.statements({"short": ("pass", {}), "long": ("sleep(0.02)", names)}, rounds=3, seconds=0.2)
    assert 0 < seconds["short"] < 1e-5 and 0.02 <= seconds["long"] < 0.1


def test_goals(load: Load) -> None:
    goals = load("state_goals").goals
    fork = {"fork, µs": 1.0, "8 copies, µs": 8.0, "8 × (copy + write), µs": 8.0}
    fork |= {f"8 × (copy + 1% of {what}), µs": 2.0 for what in ("leaves", "containers")}
    slow = {key: value * 100 for key, value in fork.items()}
    copied = [{"state": "S", "method": "deepcopy", **slow}, {"state": "S", "method": "turnwise", **fork}]
    written = [{"state": "S", "first write": "counter", "µs": 4.0}]
    read = [{"read": "held key", "method": m, "× plain": 1.2} for m in ("plain", "turnwise")]
    listed = [
        {"write": "insert(0)", "method": "turnwise", "µs": 4.0, "bytes un-shared": 5_000},
        {"write": "insert(0)", "method": "plain", "µs": 40.0},
        {"write": "append", "method": "turnwise", "µs": 400.0, "bytes un-shared": 5_000},
    ]
    tree = {"state": "S", "method": "turnwise", "versions": 2048, "in deepcopies": 270.0, "pickles / checkpoint": 4.0}
    tree |= {"prune, µs": 3.0, "× empty": 2.5}

    def met(*grown: dict[str, Any]) -> dict[str, str]:
        rows = goals(copied, written, read, list(grown), listed)
        return {row["goal"].removesuffix(", µs").removesuffix(", × plain"): row["met"] for row in rows}

    without_tree = {
        "deepcopy / fork": "NO",
        "8 deepcopies / 8 × (fork + write)": "yes",
        "first write, counter": "NO",
        "held key": "yes",
        "insert(0) of a long list": "yes",
        "insert(0) of a long list, bytes un-shared": "NO",
    }
    assert met() == without_tree  # nor is copium there
    assert met({**tree, "versions": 32}) == without_tree
    assert met(tree) == without_tree | {
        "pickles of each version / checkpoint": "NO",
        "64 branches × 32 turns, in deepcopies": "yes",
        "prune, µs per version": "yes",
        "gc.collect, × of the process without a tree": "NO",
    }


def test_a_tree_alone_has_no_torch(load: Load) -> None:
    """What its process imports is what the collector walks: the store must not bring torch."""
    code = (
        "import sys; sys.argv = ['', 'tree', 'S', 'turnwise', '2', '3']; import runpy; "
        f"runpy.run_path({str(BENCH / 'state_tree.py')!r}, run_name='__main__'); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCH)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["prune"] > 0 and found["gc.collect"] > 0
    assert ("checkpoint" in found) is load("state_cases").has("load")
