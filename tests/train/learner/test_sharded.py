"""Policies sharded over two processes train as in one: same weights to 1e-6, same metrics, same skipped updates.

Each sharded weight is named, watched, and refused where its bytes would be written. The processes talk over gloo on the
CPU. ``torchrun`` starts them once for all cases, with ``sharded_ranks.py`` as its script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.train.checkpoint.checkpoint import load_weights
from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.learner.local import LocalLearner
from turnwise.train.model.weights import bit_sums, named_weights

from . import sharded_ranks
from .sharded_ranks import (
    CASES,
    CHECKPOINTED,
    CONFIG,
    LEARNED,
    OFFLOADED,
    READ,
    ROUNDED,
    RULES,
    WORLD,
    Case,
    clones,
    half,
    make_batch,
    make_lm,
    make_policy,
    odd,
    pair,
    results,
    ruled,
    step,
    train,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("warm_python")]
# `done` costs a minute, and a test that reads it nothing: CI runs them all.
READER = pytest.mark.representative


# ---- the tests: one torchrun for most of them ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[Case, dict[str, dict[str, Tensor]]]:
    """Three steps in one process, with a checkpoint after the second."""
    found = {}
    for case in LEARNED:
        learner = LocalLearner({"default": make_policy(case)}, CONFIG)
        found[case] = {"first": step(learner, 1), "second": step(learner, 2)}
        learner.save(folder / str(case) / "one", 2, {"anything": [1]})
        found[case]["third"] = step(learner, 3)
    learner = LocalLearner({"default": make_policy(ROUNDED, dtype=torch.bfloat16)}, CONFIG)
    found["rounded"] = {"first": step(learner, 1), "second": step(learner, 2)}
    learner.save(folder / "rounded" / "one", 2, {"anything": [1]})
    return found


@pytest.fixture(scope="module")
def done(folder: Path, alone: Any, warm_python: str) -> list[dict[str, Any]]:
    """What each rank found."""
    for tied in (False, True):
        make_policy(Case("trie", False, tied)).model.save_pretrained(folder / f"tied {tied}")
    return found_by(warm_python, WORLD, folder)


def torchrun(python: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, sharded_ranks.__file__, *arguments], env=environment, capture_output=True, text=True, timeout=400
    )


def found_by(python: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    ran = torchrun(python, ranks, str(folder), *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def check_pair(got: dict[str, Any], folder: Path, near: float) -> None:
    want = pair(folder, None)
    for number in ("one", "two", "three", "again"):
        assert got[number]["moved"] == want[number]["moved"] and got[number]["drawn"] == want[number]["drawn"]
        assert got[number]["metrics"].keys() == want[number]["metrics"].keys()
        for name, weights in want[number]["weights"].items():
            assert furthest(got[number]["weights"][name], weights) <= near, (number, name)
        for name, metrics in want[number]["metrics"].items():
            assert_close(got[number]["metrics"][name], metrics, name)
    assert want["one"]["moved"] == {"first", "second", "third"} and want["two"]["moved"] == {"second", "third"}
    for name, weights in got["three"]["weights"].items():
        assert equal(got["again"]["weights"][name], weights), name
    assert got["state"] == want["state"] == (2, {"anything": [1]})
    assert got["progress"].keys() == want["progress"].keys()
    for name, progress in want["progress"].items():
        kl = got["progress"][name]["extra"].pop("kl_coef")
        assert (kl or 0.0) == pytest.approx(progress["extra"].pop("kl_coef") or 0.0, rel=1e-6)
        assert got["progress"][name] == progress
    assert torch.allclose(got["reference"], want["reference"], atol=1e-5) and got["told"] == "the client is gone"


def check_learned(got: dict[str, Any], want: dict[str, dict[str, Tensor]], near: float) -> None:
    """The steps are those of one process. Checkpoints bring back the same bits, and so do the files of one process."""
    for number in ("first", "second", "third"):
        assert furthest(got[number], want[number]) <= near, number
    assert got["state"] == (2, {"anything": [1]}) and not equal(got["second"], got["third"])
    assert equal(got["loaded"], got["second"]) and equal(got["again"], got["third"])
    assert equal(got["from one"], want["second"]) and furthest(got["third from one"], want["third"]) <= near


@READER
def test_groups_of_weights_train_at_the_same_time(done: list[dict[str, Any]], folder: Path) -> None:
    """Each has ranks of its own, here one. Their training is that of one process, random draws included."""
    check_pair(done[0]["pair"], folder, 1e-6)


def test_a_rank_that_dies_ends_the_run(tmp_path: Path, warm_python: str) -> None:
    ran = torchrun(warm_python, WORLD, str(tmp_path), "--die")
    assert ran.returncode != 0 and "exitcode  : 3" in ran.stderr, ran.stderr


def test_copies_of_the_weights_train_as_one(alone: Any, folder: Path, tmp_path: Path, warm_python: str) -> None:
    """Four ranks hold two copies in two shards each; one process resumes from their checkpoint, and they from its."""
    for case in LEARNED:
        shutil.copytree(folder / str(case) / "one", tmp_path / str(case) / "one")
    near = 5e-6  # four ranks cut other micro-batches, and Adam's first step divides a small gradient by itself
    found = found_by(warm_python, 4, tmp_path, "--copies")
    for case in LEARNED:
        got = found[0][f"learner {case}"]
        check_learned(got, alone[case], near)
        assert {each[f"learner {case}"]["sums"] for each in found} == {bit_sums(got["third from one"].items())}
        learner = LocalLearner({"default": make_policy(case, seed=1)}, CONFIG)
        learner.load(tmp_path / str(case) / "two" / "step_00000002")
        assert equal(learner.send("default", clones), got["second"])
    check_pair(found[0]["pair"], tmp_path, near)


def assert_close(got: dict[str, float], want: dict[str, float], case: Any) -> None:
    # How many tokens micro-batches share depends on the cut, in one process too.
    cut = {"unique_token_share"}
    assert got.keys() == want.keys()
    for name in got.keys() - cut:
        assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), (case, name)


@READER
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_train_as_one(done: list[dict[str, Any]], case: Case) -> None:
    want = results(case, None)
    for found in done:
        got = found[str(case)]
        assert got["weights"].keys() == want["weights"].keys()
        worst = max(float((got["weights"][name] - value).abs().max()) for name, value in want["weights"].items())
        moved = max(
            float((value - dict(make_policy(case).weights())[name]).abs().max())
            for name, value in want["weights"].items()
        )
        assert moved > 1e-3, "steps that move nothing show nothing"
        assert worst <= 1e-6, worst
        for one, other in zip(got["metrics"], want["metrics"], strict=True):
            assert_close(one, other, case)
        assert got["kl_coef"] == pytest.approx(want["kl_coef"], rel=1e-6)
        assert want["kl_coef"] != 0.1
    assert done[0][str(case)]["sums"] == done[1][str(case)]["sums"]


@READER
@pytest.mark.parametrize("rule", RULES)
def test_rules_read_what_all_ranks_have(done: list[dict[str, Any]], rule: str) -> None:
    want = ruled(rule, None)
    for found in done:
        got = found[f"rule {rule}"]
        assert furthest(got["weights"], want["weights"]) <= 1e-6
        for one, other in zip(got["metrics"], want["metrics"], strict=True):
            assert_close(one, other, rule)
        assert got["adapted"] == pytest.approx(want["adapted"], rel=1e-4)


@READER
def test_sums_of_shards_and_ranks_with_other_models(done: list[dict[str, Any]]) -> None:
    for case in map(str, CASES):
        for found in done:
            assert found[case]["sums"] == bit_sums(found[case]["weights"].items())
    # One rank ties its embeddings, so it has no weights of its own for the head.
    for found in done:
        assert found["other model"].startswith("policies: expected the same models on all ranks; rank 1 differs")


@READER
def test_a_rank_without_rows_and_a_nan_on_one_rank_keep_no_other_waiting(done: list[dict[str, Any]]) -> None:
    want = odd(None)
    told = "policy 'default': weight 'model.embed_tokens.weight' is not finite in this test: 1 of"
    for found in done:
        got = found["odd"]
        assert max(got[name]["seconds"] for name in ("one row", "no row", "nan", "after")) < 20
        for name in ("one row", "no row", "nan", "after"):
            assert_close(got[name]["metrics"], want[name]["metrics"], name)
            assert got[name]["sums"] == done[0]["odd"][name]["sums"]
        assert got["no row"]["metrics"] == {}
        assert got["nan"]["metrics"]["skipped_updates"] == 1 == got["nan"]["metrics"]["updates"]
        assert got["told"].startswith(told) and want["told"].startswith(told)


@READER
@pytest.mark.parametrize("case", LEARNED, ids=str)
def test_rank_0_trains_sends_saves_and_loads_for_all(done, alone, folder: Path, case: Case) -> None:
    got = done[0][f"learner {case}"]
    check_learned(got, alone[case], 1e-6)
    # One process resumes from the shards of two.
    learner = LocalLearner({"default": make_policy(case, seed=1)}, CONFIG)
    saved = folder / str(case) / "two" / "step_00000002"
    assert learner.load(saved) == (2, {"anything": [1]})
    assert equal(learner.send("default", clones), got["second"])
    assert furthest(step(learner, 3), got["third"]) <= 1e-6
    evaluated = {"default": make_policy(case, seed=1)}
    load_weights(saved, evaluated)
    assert equal(dict(evaluated["default"].weights()), got["second"])


@READER
@pytest.mark.parametrize("case", LEARNED, ids=str)
def test_errors_of_one_call_leave_the_ranks_together(done, folder: Path, case: Case, tmp_path: Path) -> None:
    got = done[0][f"learner {case}"]
    assert got["told"] == "the client is gone" and "nowhere" in got["refused"]
    assert got["sums"] == done[1][f"learner {case}"]["sums"]
    learner = LocalLearner({"default": make_policy(case)}, CONFIG)
    assert torch.allclose(got["reference"], learner.reference_logprobs("default", make_batch()), atol=1e-5)
    saved = folder / str(case) / "two" / "step_00000002"
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "rng.safetensors", "rng-1.safetensors", "queue.pickle"} <= {
        file.name for file in saved.iterdir()
    }
    damaged = shutil.copytree(saved, tmp_path / saved.name)
    (damaged / "__1_0.distcp").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged"):
        learner.load(damaged)


@READER
def test_types_of_layers_adapters_and_bases(done: list[dict[str, Any]]) -> None:
    want = half(None)
    for found in done:
        got = found["half"]
        assert got["dtypes"] == want["dtypes"] == 2
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-2)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-2, abs=1e-3)
    # Layers are computed in the chosen type.
    [want] = train(make_policy(CASES[1]), [make_batch()])
    for found in done:
        got = found["narrow"]
        assert got["computed"] == {torch.bfloat16} and got["kept"] == {torch.float32}
        assert got["metrics"]["grad_norm"] == pytest.approx(want["grad_norm"], rel=0.1)
        assert got["metrics"]["grad_norm"] != pytest.approx(want["grad_norm"], rel=1e-5)


@READER
def test_shards_of_a_bfloat16_model_are_its_masters(done: list[dict[str, Any]], alone: Any, folder: Path) -> None:
    for found in done:
        assert found["rounded"]["computed"] == {torch.bfloat16} and found["rounded"]["kept"] == {torch.float32}
    got, want = done[0]["rounded"], alone["rounded"]
    for name, weight in got["first"].items():
        assert weight.dtype == torch.bfloat16, "what engines get"
        assert torch.allclose(weight.float(), want["first"][name].float(), atol=2e-3, rtol=2e-2), name
    # A checkpoint of either goes on in the other.
    learner = LocalLearner({"default": make_policy(ROUNDED, seed=5, dtype=torch.bfloat16)}, CONFIG)
    learner.load(folder / "rounded" / "two" / "step_00000002")
    read = learner.send("default", clones)
    for name in got["first"]:
        assert torch.equal(got["from one"][name], want["second"][name]), name
        assert torch.equal(read[name], got["second"][name]) and torch.equal(got["again"][name], got["third"][name])


@READER
@pytest.mark.parametrize(("kept", "case"), [("offload", OFFLOADED), ("checkpointing", CHECKPOINTED)])
def test_ways_to_save_memory_train_alike(done: list[dict[str, Any]], kept: str, case: Case) -> None:
    """Shards in the CPU's memory, and activations that are computed again."""
    want = results(case, None)
    for found in done:
        assert furthest(found[kept]["weights"], want["weights"]) <= 1e-6


@READER
@pytest.mark.parametrize("case", READ, ids=str)
def test_only_the_first_rank_reads_the_weights(done: list[dict[str, Any]], folder: Path, case: Case) -> None:
    want = results(case, None, path=folder / f"tied {case.tied}")
    for found in done:
        assert furthest(found[f"read {case}"]["weights"], want["weights"]) <= 1e-6


@READER
def test_no_sharded_weight_is_dropped_or_written(done: list[dict[str, Any]]) -> None:
    want = [name for name, _ in named_weights(make_lm())]
    assert "lm_head.weight" not in want and len(want) > 10
    for found in done:
        found = found["report"]
        assert found["named"] == want, "tied ones once, all others as they are"
        assert found["small"] == 4 and found["copied"] and not found["written"]
        assert found["watched"] == [1] * len(want), "a change of one weight is a change of its number alone"
        refused = dict(found["refused"])
        assert "'model.embed_tokens.weight', 'lm_head.weight' are missing" in refused.pop("part")
        assert list(refused) == ["plain", "transfer", "shapes", "file"]
        for said in refused.values():
            assert "'model.embed_tokens.weight' is a DTensor" in said and "get_model_state_dict" in said


# ---- comparing -------------------------------------------------------------------------------------------------------
def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())
