from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from turnwise.tasks import TASKS, build_task
from turnwise.tasks.base import check_counts, check_split, split_of


@pytest.fixture(params=sorted(TASKS))
def task(request, tmp_path):
    options = {}
    if request.param in ("gsm8k", "math_orchestra"):
        path = tmp_path / "q.jsonl"
        path.write_text("\n".join(json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) for i in range(80)))
        options = {"path": str(path)}
    return build_task(request.param, options)


def test_every_task_keeps_the_promises_of_the_protocol(task):
    actors = {actor.id for actor in task.actors}
    episodes = task.episodes()
    assert {request.episode_type for request in task.requests(0, 2, 2)} == {task.name} <= set(episodes)
    metric, _, actor = task.success_metric.partition("/")
    (evaluated,) = {request.episode_type for request in task.eval_requests("eval", 2)}
    assert actor in {*actors, "model"} and metric in episodes[evaluated].rubric.names
    prompts = {actor.id: actor.system_prompt for actor in task.actors}
    has_tools = {actor.id: bool(actor.tools) for actor in task.actors}
    for who, messages, completion in task.demonstrations(8, 0):
        assert messages[0] == {"role": "system", "content": prompts[who]}
        assert messages[-1]["role"] in ({"user", "tool"} if has_tools[who] else {"user"}) and completion
    assert all(isinstance(text, str) and text for text in task.texts())


def test_questions_of_a_split_are_always_the_same(task):
    for split in ("eval", "validation"):
        few, more = task.eval_requests(split, 2), task.eval_requests(split, 4)
        assert more[:2] == few and len({json.dumps(request.artifact) for request in more}) == 4
    held_out = {json.dumps(r.artifact) for split in ("eval", "validation") for r in task.eval_requests(split, 4)}
    assert len(held_out) == 8
    assert not held_out & {json.dumps(r.artifact) for step in range(20) for r in task.requests(step, 8, 1)}


def test_unknown_tasks_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="task='sudoko': unknown; did you mean 'sudoku'"):
        build_task("sudoko")
    with pytest.raises(ValueError, match="known: " + ", ".join(sorted(TASKS))):
        build_task("zzz")


def test_hash_splits_are_frozen_and_eight_in_ten_train():
    assert [split_of(text) for text in "efgh"] == ["train", "validation", "eval", "train"]
    counts = Counter(split_of(str(i)) for i in range(5000))
    assert counts["train"] / 5000 == pytest.approx(0.8, abs=0.02)
    assert counts["eval"] / 5000 == pytest.approx(0.1, abs=0.02)


def test_checks_name_what_is_wrong():
    with pytest.raises(ValueError, match="copies=0"):
        check_counts(questions=1, copies=0)
    with pytest.raises(ValueError, match="split='dev'"):
        check_split("dev")


def test_importing_every_task_needs_no_torch_no_key_and_no_network():
    modules = ", ".join(["turnwise.tasks.tiny", *(place.partition(":")[0] for place in TASKS.values())])
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules), 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})
