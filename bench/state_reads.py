"""Times the work between copies of a state: reads and owned writes, steps of environments, the replay of a rollout."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import state_envs
from common import statements
from state_cases import Method, has, make, walk

Row = dict[str, Any]

READS = {
    "held key": "game['turn']",
    "random paths": "read_paths(data, paths)",
    "three-hop chain": "data['messages'][7]['content']",
    "traversal of messages": "total(messages)",
    "traversal with isinstance": "leaves(messages)",
    "int list element": "ids[32_768]",
    "int list, all elements": "sum(ids)",
    "key in dict": "'turn' in game",
    "len": "len(messages)",
    "owned write, dict": "game['turn'] = 7; game['turn'] = 8",
    "owned write, list": "scores[0] = 7.0; scores[0] = 8.0",
    "owned append and pop": "scores.append(7.0); scores.pop()",
}
READ_ONLY = {  # of persistent maps: what their interface has, said in the same words
    "pyrsistent": ["held key", "random paths", "three-hop chain", "traversal of messages", "int list element"],
    "immutables": ["held key", "random paths", "three-hop chain", "int list element"],
}
READ_ONLY["pyrsistent"] += ["int list, all elements", "key in dict", "len"]
READ_ONLY["immutables"] += ["key in dict", "len"]


# ---------------------------------------------------------------------------------------------------------------------
# Reads, and writes to what is owned
# ---------------------------------------------------------------------------------------------------------------------
def read_paths(data: Any, paths: list[Any]) -> None:
    for path in paths:
        value = data
        for key in path:
            value = value[key]


def total(message_list: Any) -> int:
    length = 0
    for message in message_list:
        length += len(message["content"])
    return length


def leaves(value: Any) -> int:
    """Read every leaf as plain code does, and return their number."""
    if isinstance(value, dict):
        return sum(leaves(inner) for inner in value.values())
    return sum(map(leaves, value)) if isinstance(value, list) else 1


def reads(ways: Mapping[str, Method], rounds: int) -> list[Row]:
    """Time the same statements on plain containers, on a fork's facade and on persistent maps, with M and token ids."""
    data = make("M")
    for index, message in enumerate(data["messages"]):  # one kind of content, so that its length can be asked for
        data["messages"][index] = message | {"content": str(message["content"])}
    data["ids"] = [random.Random(0).randrange(152_000) for _ in range(65_536)]
    paths = [path for path, value in walk(data) if path[0] != "ids" and not isinstance(value, dict | list)]
    paths = random.Random(0).sample(paths, 256)
    cases, results = {}, {}
    for name in ("deepcopy", *(n for n in ("immutables", "pyrsistent") if n in ways), "turnwise"):
        held = ways[name].fork(ways[name].hold(data))
        root = held.data if name == "turnwise" else held
        names = {"data": root, "game": root["game"], "messages": root["messages"], "ids": root["ids"], "paths": paths}
        names |= {"scores": root["game"]["score"], "read_paths": read_paths, "total": total, "leaves": leaves}
        for case in READ_ONLY.get(name, READS):
            cases[f"{name}/{case}"] = (READS[case], names)
        results[name] = (total(data["messages"]), root["ids"][32_768], root["messages"][7]["content"])
        assert results[name] == results["deepcopy"], f"{name}: reads something else"
    seconds = statements(cases, rounds, seconds=0.4)
    return [
        {
            "read": case,
            "method": "plain" if name == "deepcopy" else name,
            "ns": seconds[f"{name}/{case}"] * 1e9,
            "× plain": seconds[f"{name}/{case}"] / seconds[f"deepcopy/{case}"],
        }
        for case in READS
        for name in ways
        if f"{name}/{case}" in seconds
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Environments
# ---------------------------------------------------------------------------------------------------------------------
def replay(env: Any, fork: Callable[[Any], Any], said: list[list[str]]) -> tuple[float, float, str]:
    """Replay a tree: in each turn, every branch is a fork that takes its reply, and the best branch continues.

    Returns the seconds of all copies, the total seconds, and the last prompt.
    """
    copying = 0.0
    start = time.perf_counter()
    for turn in said:
        branches = []
        for reply in turn:
            before = time.perf_counter()
            branch = fork(env)
            copying += time.perf_counter() - before
            _, reward, _ = branch.step(reply)
            branches.append((reward, branch))
        env = max(branches, key=lambda pair: pair[0])[1]
    return copying, time.perf_counter() - start, env.prompt()


def rollouts(ways: Mapping[str, Method], rounds: int, documents: int) -> list[Row]:
    """Time the replay of a tree rollout, without the model's own time."""
    said = state_envs.replies(documents)
    plain = state_envs.Warehouse.new(documents)
    envs: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        name: (plain, ways[name].fork) for name in ("deepcopy", "pickle", "copium") if name in ways
    }
    envs["deepcopy, config shared by hand"] = (state_envs.SharedWarehouse.new(documents), copy.deepcopy)
    if has("ForkableMixin"):
        envs["turnwise"] = (state_envs.forkable_warehouse(documents), copy.deepcopy)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in envs}
    prompts = {name: replay(env, fork, said)[2] for name, (env, fork) in envs.items()}
    assert len(set(prompts.values())) == 1, "the replays end differently"
    for _ in range(max(3, rounds // 10)):
        for name, (env, fork) in envs.items():
            samples[name].append(replay(env, fork, said)[:2])
    rows = []
    for name, taken in samples.items():
        copying, whole = (statistics.median(column) for column in zip(*taken, strict=True))
        rows.append({"method": name, "copying, ms": copying * 1e3, "whole, ms": whole * 1e3, "share": copying / whole})
    return rows


def steps(rounds: int) -> list[Row]:
    """Time ``step()`` of real environments, unchanged and forked."""
    if not has("ForkableMixin"):
        return []
    said = [turn[0] for turn in state_envs.replies(200)]

    def warehouse(env: Any) -> list[Any]:
        del env.transcript[21:]
        return [env.step(reply) for reply in said]

    plain = state_envs.Warehouse.new(200)
    forked = copy.deepcopy(state_envs.forkable_warehouse(200))
    known = {"Warehouse step": (plain, forked, warehouse), **state_envs.gymnasium_steps()}
    rows = []
    for name, (plain, forked, play) in known.items():
        assert repr(play(plain)) == repr(play(forked)), f"{name}: a forked environment plays differently"
        count = len(play(plain))
        cases = {way: ("play(env)", {"play": play, "env": env}) for way, env in (("plain", plain), ("fork", forked))}
        seconds = statements(cases, rounds)
        for way, method in (("plain", "plain"), ("fork", "turnwise")):
            ratio = seconds[way] / seconds["plain"]
            rows.append({"read": name, "method": method, "ns": seconds[way] / count * 1e9, "× plain": ratio})
    return rows
