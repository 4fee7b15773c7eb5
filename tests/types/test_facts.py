"""turnwise's own notes are typed facts, no keys of the users' dicts; records and pickles of before still load."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import turnwise
from turnwise.arena.recording.lossless_json import encode
from turnwise.arena.recording.recorder import EpisodeRecorder
from turnwise.arena.recording.rollouts_jsonl import EpisodeRecord, plain_result
from turnwise.replay.diff import first_difference
from turnwise.report.credit import result_of
from turnwise.types import (
    INFO_KEYS,
    META_KEYS,
    EpisodeRequest,
    GenerateResult,
    RequestFacts,
    Rollout,
    RolloutFacts,
    RoutedExperts,
    Step,
    StepFacts,
)
from turnwise.types.facts import separate

PACKAGE = Path(turnwise.__file__).parent
KEYS = {"info": INFO_KEYS, "meta": META_KEYS}
OTHERS = {("integrations/environments/gymnasium.py", "action_mask"), ("tasks/proposer_solver/episodes.py", "step")}
"""Keys of Gymnasium's ``info``, and of the ``meta`` of a task's artifacts."""


def keys_used(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield ``info`` or ``meta`` and each key that is read or written there, in any form."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Attribute(attr=("info" | "meta") as bag), slice=key):
                yield bag, key
            case ast.Compare(left=key, comparators=[ast.Attribute(attr=("info" | "meta") as bag)]):
                yield bag, key
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(attr=("info" | "meta") as bag), attr="get" | "pop" | "setdefault"
                ),
                args=[key, *_],
            ):
                yield bag, key
            case (
                ast.AugAssign(target=ast.Attribute(attr=("info" | "meta") as bag), value=value)
                | ast.Assign(targets=[ast.Attribute(attr=("info" | "meta") as bag)], value=value)
                | ast.keyword(arg=("info" | "meta") as bag, value=value)
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr=("info" | "meta") as bag), attr="update"), args=[value]
                )
            ):
                yield from (
                    (bag, key) for each in ast.walk(value) if isinstance(each, ast.Dict) for key in each.keys if key
                )


def foreign_keys(sources: dict[str, str]) -> set[tuple[str, str, str]]:
    """Return (file, dict, key) of each key that is not listed. A name is a constant of its file, or an imported one."""
    constants = {file: dict(re.findall(r'^(\w+) = "(.*)"$', text, re.M)) for file, text in sources.items()}
    found = set()
    for file, text in sources.items():
        if not re.search(r"\b(info|meta)\b", text):
            continue
        tree = ast.parse(text)
        known = constants[file].copy()
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            path = str(node.module).removeprefix("turnwise.").replace(".", "/")
            there = constants.get(f"{path}.py", constants.get("types/play.py", {}))
            known |= {name.name: there[name.name] for name in node.names if name.name in there}
        for bag, key in keys_used(tree):
            match key:
                case ast.Constant(value=said):
                    pass
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    said = known.get(name, f"<{name}>")
                case _:
                    said = f"<{ast.unparse(key)}>"
            if isinstance(said, str) and said not in KEYS[bag] and (file, said) not in OTHERS:
                found.add((file, bag, said))
    return found


def test_the_package_uses_no_key_of_info_or_meta_but_those_that_are_listed():
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert foreign_keys(sources) == set()
    assert not INFO_KEYS.keys() & StepFacts.__dataclass_fields__.keys()
    assert not META_KEYS.keys() & RolloutFacts.__dataclass_fields__.keys()


FORMS = """
step.info["x"]
del step.info["x"]
"x" in step.info
step.info.get("x", 0)
step.info.setdefault("x", 0)
step.info.update({"x": 1})
step.info |= {"x": 1}
step.info = {**old, "x": 1}
Step(info={"x": 1})
step.info[X]
"""


@pytest.mark.parametrize("line", FORMS.split("\n")[1:-1])
def test_the_guard_sees_each_form_of_a_key(line):
    assert foreign_keys({"a.py": f'X = "x"\n{line}'}) == {("a.py", "info", "x")}
    assert foreign_keys({"a.py": f"from turnwise.b import X\n{line}", "b.py": 'X = "x"'}) == {("a.py", "info", "x")}


@pytest.mark.parametrize("facts", [StepFacts(), RequestFacts(), RolloutFacts()])
def test_a_misspelt_fact_is_an_error(facts):
    with pytest.raises(AttributeError):
        facts.gramar = "a"
    with pytest.raises(AttributeError):
        _ = facts.gramar
    with pytest.raises(TypeError):
        type(facts)(gramar="a")


def a_step(**changes) -> Step:
    return Step("solver", 0, [], "4", [1], [2], [-0.5], [(1, 7)], "stop", **changes)


NEW = {
    "step": a_step(
        info={"hint": "a"}, facts=StepFacts(temperature=0.0, seed=3, max_tokens=8, error="down", cached=True)
    ),
    "rollout": Rollout(
        "r-1", "e", "q", meta={"note": 1, "ended": "done"},
        facts=RolloutFacts("sums", policy_versions={"default": 7}, attempt=1, dropped="judge down", own_end=0),
    ),
    "request": EpisodeRequest(
        "e", "q", meta={"note": 1}, facts=RequestFacts(league={"member": 3, "seat": "x", "match": "m"})
    ),
}  # fmt: skip
"""An object of each kind, all of whose values survive JSON."""


def before(new):
    """Return ``new`` as it was before facts had fields: with their keys in the user's dict, and without ``facts``."""
    old = object.__new__(type(new))
    for name, value in new.recorded().items():
        setattr(old, name, value)
    return old


@pytest.mark.parametrize("kind", NEW)
def test_pickles_and_records_of_before_and_of_now_load_alike(kind):
    new = NEW[kind]
    old = before(new)
    assert not hasattr(old, "facts") and ("league" in old.meta if kind == "request" else len(new.facts.known()) > 3)
    for stored in (old, new):
        assert pickle.loads(pickle.dumps(stored, protocol=5)) == copy.deepcopy(stored) == new
    assert type(new).of_record(new.recorded()) == new
    assert type(new).of_record({name: getattr(old, name) for name in new.recorded()}) == new


def test_facts_that_a_pickle_does_not_know_have_their_defaults():
    stored = pickle.dumps(StepFacts(seed=3))
    assert b"temperature" not in stored and pickle.loads(stored) == StepFacts(seed=3)
    assert pickle.loads(pickle.dumps(RolloutFacts())).policy_versions == {}


def test_an_entry_of_a_user_may_be_called_like_a_fact():
    """Neither changes the other, in the object and in the record."""
    mine = {"error": "my own", 3: "three", "user:hint": 1}
    step = a_step(info=dict(mine), facts=StepFacts(seed=3))
    assert step.recorded()["info"] == {"seed": 3, "user:error": "my own", 3: "three", "user:hint": 1}
    assert Step.of_record(step.recorded()) == step and step.info == mine and step.facts.error is None


def test_a_record_is_read_as_it_was_written_before():
    """The line has all in ``info`` and ``meta``; experts are in none. Facts with their defaults make no difference."""
    step = copy.deepcopy(NEW["step"])
    step.facts.routed_experts = RoutedExperts(np.zeros((1, 1, 1), dtype=np.uint8))
    rollout = copy.deepcopy(NEW["rollout"])
    rollout.steps = [step]
    row = plain_result(GenerateResult(rollout, group_id="q"))
    [call] = row["steps"]
    assert call["info"] == {
        "temperature": 0.0, "seed": 3, "max_tokens": 8, "cached": True, "error": "down", "hint": "a",
    }  # fmt: skip
    assert row["meta"] == {
        "task": "sums", "policy_versions": {"default": 7}, "attempt": 1, "dropped": "judge down", "own_end": 0,
        "note": 1, "ended": "done",
    }  # fmt: skip
    assert "facts" not in {*row, *call}
    step.facts.routed_experts = None
    assert result_of(row).rollout == rollout
    older = copy.deepcopy(row)
    older["meta"] |= {"spawned_by": None, "lost_tokens": 0}
    older["steps"][0]["info"]["raw_reward"] = None
    assert first_difference(older, row, tokenizer=None) is None
    assert separate(StepFacts, older["steps"][0]["info"])[0] == step.facts


@pytest.mark.parametrize("older", [True, False])
def test_a_recorded_call_that_is_no_step_of_the_episode_is_read(older):
    request, step = copy.deepcopy(NEW["request"]), NEW["step"]
    recording = EpisodeRecorder(request, 5, {"seed": 0}).to_json(GenerateResult(Rollout("e0", "e", "q")))
    call = encode(step.recorded())
    if older:
        call = {"$dataclass": ["turnwise.types.play:Step", call]}
    recording["events"] = [["ask", "e0#0", {"call": call}]]
    record = EpisodeRecord({"id": "e0", "steps": [], "children": [], "replay": recording})
    assert record.calls["e0#0"].step == step.recorded() and not record.calls["e0#0"].seen
    assert record.request == request
