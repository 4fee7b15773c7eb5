"""A run of ``turnwise train`` under torchrun, with its models in the shards of two processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from turnwise.cli.main import main
from turnwise.run import build
from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import dry_run
from turnwise.run.ranks import join_ranks, rank_variables, shard
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.checkpoint.files import fingerprint
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.model.policy import Policy
from turnwise.train.validate import config_from_dict, contradictions

from .inference.mixtures import build as build_mixture
from .trained import SMALL, rows_of

pytestmark = pytest.mark.xdist_group("warm_python")
SLOW = [pytest.mark.slow, pytest.mark.representative]

COMMON: dict[str, Any] = {**SMALL, "device": "cpu", "update": {"lr": 3e-4}, "loss": {"kl": {"coef": 0.1}}}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {
        "policy_sharing": "lora_per_actor", "loss": {"kl": {"coef": 0.1, "apply_to": "reward"}},
        "credit": {"rule": "episodic"},
    },
    "parallel": {"policy_sharing": "model_per_actor", "sharding": {"parallel": True}},
    "teacher": {
        "policy_sharing": "model_per_actor", "policies": {"default": {"path": "tiny"}, "big": {"path": "tiny"}},
        "actors": {"reviser": {"teacher": "big"}}, "distill": {"top_k": 4}, "sharding": {"parallel": True},
    },
}  # fmt: skip


def train_on_two_ranks(config: TrainConfig) -> str:
    """Run ``turnwise train`` under torchrun, and return what it prints."""
    file = config.run_dir.with_suffix(".toml")
    file.write_text(to_toml(config))
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*torchrun, "-m", "turnwise", "train", str(file), "--traceback"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=SLOW) for case in ("full", "lora", "parallel")),
        pytest.param("teacher", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_a_run_as_one_does(tmp_path: Path, case: str) -> None:
    one, two = (config_from_dict({**COMMON, **CASES[case], "run_dir": str(tmp_path / name)}) for name in ("one", "two"))
    train_from_config(one).close()
    told = train_on_two_ranks(two)
    assert told.count("training for 2 steps") == 1, "rank 0 speaks for all"
    assert ("a sharded run exports adapters alone" in told) == (case == "lora")
    # The exported weights are those of one process, and so are the metrics.
    files = sorted(file.relative_to(one.run_dir) for file in one.run_dir.glob("policies/*/*.safetensors"))
    assert files
    for file in files:
        got, want = load_file(two.run_dir / file), load_file(one.run_dir / file)
        assert got.keys() == want.keys()
        assert max(float((got[name] - value).abs().max()) for name, value in want.items()) <= 1e-5
    for got, want in zip(rows_of(two.run_dir), rows_of(one.run_dir), strict=True):
        losses = [name for name in want if name.endswith(("loss", "grad_norm", "/kl", "updates"))]
        assert losses and {name: got[name] for name in losses} == pytest.approx(
            {name: want[name] for name in losses}, rel=1e-3, abs=1e-5
        )
    # One process exports them from the shards, bit for bit as both did at the end.
    assert main(["export", str(two.run_dir), "--out", str(tmp_path / "exported")]) == 0
    for file in files:
        if "merged" not in file.parts:
            assert (tmp_path / "exported" / file).read_bytes() == (two.run_dir / file).read_bytes()
    # One process goes on from the shards.
    more = two.model_copy(update={"steps": 3})
    run = train_from_config(more)
    assert [row["step"] for row in rows_of(two.run_dir)] == [1, 2, 3]
    for policy in run.trainer.policies.values():
        policy.check_finite("after a resume")
    run.close()


@pytest.mark.slow
def test_two_processes_replay_the_experts_of_a_mixture(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["tell the digits"] * 3, vocab_size=300)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    build_mixture("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=2048, **ends).save_pretrained(
        tmp_path / "m"
    )
    tokenizer.save_pretrained(tmp_path / "m")
    settings: dict[str, Any] = {
        "task": "split_clues", "steps": 1, "policies": {"default": {"path": str(tmp_path / "m"), "dtype": "bfloat16"}},
        "rollout": {"routing_replay": True, "prompts_per_step": 2, "branches": 3}, "device": "cpu",
        "filter": {"drop_zero_advantage": False}, "eval": {"every": 0, "num_prompts": 2},
        "health": {"start_questions": 0},
    }  # fmt: skip
    one, two = (config_from_dict({**settings, "run_dir": str(tmp_path / name)}) for name in ("one", "two"))
    train_from_config(one).close()
    train_on_two_ranks(two)
    [got], [want] = rows_of(two.run_dir), rows_of(one.run_dir)
    assert got["default/routing/replayed"] == want["default/routing/replayed"] == 1.0
    name = "default/sampler_trainer_logprob_max_diff"
    assert got[name] == pytest.approx(want[name], rel=1e-3) and got[name] < 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("warm_starts")
def test_equal_runs_of_two_processes_have_equal_bits(tmp_path: Path) -> None:
    """Also of what each rank draws for itself: adapters with dropout."""
    found = []
    for name in ("first", "second"):
        lora = {"default": {"lora": {"rank": 4, "dropout": 0.2}, "dropout": True}}
        config = config_from_dict({**COMMON, "policies": lora, "run_dir": str(tmp_path / name)})
        train_on_two_ranks(config)
        newest = list_checkpoints(config.run_dir / "checkpoints")[-1]
        adapter = config.run_dir / "policies" / "default" / "adapter_model.safetensors"
        files = [adapter, *newest.glob("rng*.safetensors")]
        assert len(files) == 3
        found.append({file.name: fingerprint(file) for file in files})
    assert found[0] == found[1]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "MASTER_ADDR": "node0"}


def test_the_processes_of_torchrun_and_srun_find_each_other() -> None:
    assert rank_variables(TORCHRUN) == {}
    assert rank_variables(SRUN) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    assert rank_variables({}) is None and rank_variables({"WORLD_SIZE": "8"}) is None
    assert rank_variables({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert rank_variables({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ConfigError, match="srun started 4 tasks, but MASTER_ADDR is not set"):
        rank_variables({name: value for name, value in SRUN.items() if name != "MASTER_ADDR"})
    # Ranks that groups of weights do not divide are refused.
    config = config_from_dict({"sharding": {"parallel": True}})
    tokenizer = build_tokenizer(["0123456789"])
    policies = {name: Policy(name, build_model(tokenizer), config.update, total_steps=1) for name in ("a", "b")}
    mesh = SimpleNamespace(size=lambda: 3, get_rank=lambda: 0, device_type="cpu")
    with pytest.raises(ConfigError, match=r"the 2 groups of weights divide \(a, b\), got 3"):
        shard(policies, config, mesh)


GIVEN_BACK = """
import ctypes
from turnwise.run.ranks import join_ranks
from turnwise.train.validate import config_from_dict
try:
    join_ranks(config_from_dict({"device": "cpu", "sharding": {"timeout": 0.01}}))
except RuntimeError as error:
    assert "127.0.0.1" in str(error), error
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
free(malloc(24 << 20))
last = [malloc(3 << 19) for _ in range(64)][-1]
flags = ctypes.c_size_t.from_address(last - ctypes.sizeof(ctypes.c_size_t)).value
print("mapped" if flags & 2 else "in the heap")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep no large blocks")
def test_a_rank_on_the_cpu_gives_each_freed_mebibyte_back(warm_python: str) -> None:
    """Blocks of 1.5 MiB are mapped after a larger one was freed; glibc alone would then take them from its heap.

    There are more of them than a start leaves room for at the heap's top.
    """
    variables = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ran = subprocess.run(
        [warm_python, "-c", GIVEN_BACK], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100
    )
    assert (ran.stdout, ran.returncode) == ("mapped\n", 0), ran.stderr


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"replicas": 3}, "config key 'sharding.replicas' = 3: expected a divisor of the 2 processes"),
        ({"replicas": 2, "parallel": True}, "expected one of them, got both"),
        ({"offload": True}, "config key 'sharding.offload' = true: expected a GPU, got the device 'cpu'"),
    ],
)
def test_settings_that_do_not_fit_the_ranks_are_refused(monkeypatch, settings: dict[str, Any], told: str) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        join_ranks(config_from_dict({"device": "cpu", "sharding": settings}))


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "critic": (
        {"loss": {"critic": {}}, "filter": {"drop_zero_advantage": False}},
        "'loss.critic': a value head trains in one process, not in 2",
    ),
    "replicas": ({"sharding": {"replicas": 3}}, "'sharding.replicas' = 3: expected a divisor of the 2 processes"),
    "both": ({"sharding": {"replicas": 2, "parallel": True}}, "expected one of them, got both"),
    "offload": ({"sharding": {"offload": True}}, "'sharding.offload' = true: expected a GPU"),
}


@pytest.mark.parametrize("case", LATE)
@pytest.mark.parametrize("by", ["torchrun", "cluster"])
def test_what_several_ranks_cannot_train_is_refused_by_a_dry_run(monkeypatch, tmp_path, case: str, by: str) -> None:
    """A critic was refused after the whole warm start."""
    settings, told = LATE[case]
    cluster = {"backend": "ray", "learner": {"count": 2}} if by == "cluster" else {}
    for name, value in TORCHRUN.items() if by == "torchrun" else ():
        monkeypatch.setenv(name, value)
    given = {"device": "cpu", "rollout": {"group_size": 2}, "run_dir": str(tmp_path), "cluster": cluster, **settings}
    with pytest.raises(ConfigError, match=told):
        dry_run(config_from_dict(given))
    # Without torchrun the same settings are refused by the process that starts the ranks, before any model is loaded.
    monkeypatch.setattr(build, "load_models", lambda *_, **__: pytest.fail("models were loaded"))
    with pytest.raises(ConfigError, match=told):
        build_run(config_from_dict(given), mesh=SimpleNamespace(size=lambda: 2))


def test_groups_of_weights_divide_the_ranks() -> None:
    config = config_from_dict({"policies": {"a": {}, "b": {}, "c": {}}, "sharding": {"parallel": True}})
    assert "that the 3 groups of weights divide (a, b, c), got 2" in contradictions(config, 2)[0]
    assert contradictions(config, 3) == contradictions(config, 1) == []
