"""Where the processes of a run fit, and what is said if they don't."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.cluster.placement import Node, NoRoom, describe, fit, roles_of
from turnwise.train.config.cluster import ClusterConfig


def cluster(**settings: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"backend": "ray", **settings})


def node(name: str, free: dict[str, float] | None = None, **has: float) -> Node:
    return Node(name, "10.0.0.1", has, has if free is None else free)


TEAM = cluster(
    learner={"count": 2, "gpus": 1},
    engines={"main": {"count": 3, "min_count": 1, "gpus": 2, "cpus": 4}},
    arena={"count": 2, "cpus": 0.5},
)


def test_the_processes_of_a_run() -> None:
    roles = roles_of(TEAM)
    assert [role.name for role in roles] == [
        "rank-0", "rank-1", "engine-main-0", "engine-main-1", "engine-main-2", "worker-0", "worker-1",
    ]  # fmt: skip
    assert [role.must for role in roles] == [True, True, True, False, False, True, True]
    assert roles[0].resources == {"CPU": 1, "GPU": 1} and roles[2].resources == {"CPU": 4, "GPU": 2}
    assert [role.number for role in roles] == [0, 1, 0, 1, 2, 0, 1]
    [alone] = roles_of(cluster())
    assert alone.name == "rank-0" and alone.resources == {"CPU": 1}


def test_roles_fill_the_nodes_and_an_engine_stays_on_one() -> None:
    nodes = [node("a", CPU=8, GPU=3), node("b", CPU=8, GPU=2)]
    placed = fit(roles_of(TEAM), nodes)
    # Those that must be there come first, so one engine of two GPUs and two ranks.
    assert placed["engine-main-0"] == "a" and {placed["rank-0"], placed["rank-1"]} == {"a", "b"}
    assert "engine-main-1" not in placed and "engine-main-2" not in placed
    lines = list(describe(roles_of(TEAM), placed))
    assert lines[2] == "engine-main-0  a  (4 CPU, 2 GPU)"
    assert lines[3] == "engine-main-1  no room now; joins when there is  (4 CPU, 2 GPU)"
    # Invented resources count.
    roles = roles_of(cluster(engines={"main": {"count": 2, "min_count": 2, "resources": {"sim_gpu": 1}}}))
    with pytest.raises(NoRoom, match=r"sim_gpu \(asked 2, 1 there\)"):
        fit(roles, [node("a", CPU=8, sim_gpu=1)])
    assert fit(roles, [node("a", CPU=8, sim_gpu=1), node("b", CPU=8, sim_gpu=1)])["engine-main-1"] == "b"


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([node("a", CPU=8, GPU=2)], r"Missing: GPU \(asked 4, 2 there\)"),
        ([node("a", CPU=8)], r"Missing: GPU \(asked 4, 0 there\)\. The nodes: a has 8 CPU, 0 GPU"),
        ([node("a", CPU=5, GPU=8)], r"Missing: CPU \(asked 7, 5 there\)"),
        ([node(name, CPU=8, GPU=1) for name in "abcd"], "one node with 4 CPU, 2 GPU for engine-main-0"),
        ([], "there are none"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(nodes: list[Node], missing: str) -> None:
    with pytest.raises(NoRoom, match=missing) as refused:
        fit(roles_of(TEAM), nodes)
    assert "2 ranks (1 CPU, 1 GPU each), 1 engine of pool main (4 CPU, 2 GPU each), 2 workers" in str(refused.value)
