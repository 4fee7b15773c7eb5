"""Runs whose policies are models of different families: each has its own tokenizer, chat format, ends and context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.cli.main import main
from turnwise.cli.run.eval import measure
from turnwise.cli.run.tournament import play_tournament
from turnwise.inference.common.model_files import read_model
from turnwise.inference.weights.lora import shared_bases
from turnwise.replay.replay import replay
from turnwise.run import start
from turnwise.run.build import build_run, train_from_config
from turnwise.run.checks import dry_run
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError, to_toml
from turnwise.train.model.weights import named_weights
from turnwise.train.validate import config_from_dict
from turnwise.types.short_prompts import whole_steps

from .families import save_families
from .inference.engine_server import KEY_VARIABLE, engine_here
from .test_run_ranks import train_on_two_ranks
from .trained import SMALL, equal, kuhn, lines_of, rows_of, weights_of

pytestmark = pytest.mark.usefixtures("narrow_model")

ROOT = Path(__file__).parents[1]
PAIR = ("describer", "guesser")
LORA = {"lora": {"rank": 2}}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_families(tmp_path_factory.mktemp("families"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(folder: Path, families: tuple[str, str], *, own: Any = ({}, {}), **changes: Any) -> TrainConfig:
    """The describer of the first family, the guesser of the second; ``own`` are further settings of their policies."""
    policies = {actor: {"path": path} | more for actor, path, more in zip(PAIR, families, own, strict=True)}
    team = {"task": "examples.smollm2.views:Views", "policy_sharing": "model_per_actor", "policies": policies}
    short = {"task_options": {"max_tokens": 8}, "eval": {"num_prompts": 1}, "warm_start": {"steps": 0}}
    short |= {"rollout": {"prompts_per_step": 2, "group_size": 2}, "log": {"rollouts_per_step": 100, "progress": False}}
    return config_from_dict({**SMALL, **short, **team, "run_dir": str(folder), **changes})


def moved(run: Any, families: tuple[str, str]) -> set[str]:
    """The policies whose weights are not those of the files."""
    starts = {
        name: dict(named_weights(read_model(path, torch.float32))) for name, path in zip(PAIR, families, strict=True)
    }
    return {name for name in PAIR if not equal(weights_of(run.trainer, name), starts[name])}


CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "frozen": {
        "rollout": {"prompts_per_step": 1, "branches": 2, "tree": {"select": "none"}},
        "own": ({}, {"trainable": False}),
    },
    "adapters": {
        "rollout": {"prompts_per_step": 1, "branches": 2, "tree": {"select": "none"}},
        "policy_sharing": "lora_per_actor",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_two_families_train_and_go_on_with_the_same_bits(tmp_path: Path, families: tuple[str, str], case: str) -> None:
    whole = train_from_config(config_of(tmp_path / "whole", families, **CASES[case]))
    cut = config_of(tmp_path / "cut", families, **CASES[case], steps=1)
    train_from_config(cut).close()
    resumed = train_from_config(cut.model_copy(update={"steps": 2}))
    for name in PAIR:
        assert equal(weights_of(whole.trainer, name), weights_of(resumed.trainer, name))
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "cut")
    assert moved(whole, families) == set(PAIR if case != "frozen" else PAIR[:1]) or case == "adapters"
    if case == "adapters":
        bases = shared_bases(policy.model for policy in whole.trainer.policies.values())
        assert [base.path for base in bases] == list(families)
    # Each policy has read and written its own tokens.
    own = dict(zip(PAIR, map(AutoTokenizer.from_pretrained, families), strict=True))
    for row in rows_of(tmp_path / "whole", "rollouts.jsonl"):
        steps = list(whole_steps(row["steps"]))
        for step in steps:
            tokenizer = own[step["policy"]]
            shown = tokenizer.apply_chat_template(step["prompt"], add_generation_prompt=True, return_dict=False)
            assert step["prompt_token_ids"] == shown
            text = tokenizer.decode(step["completion_token_ids"])
            assert "".join(step["completion_tokens"]) == text
            ended = step["completion_token_ids"][-1] == tokenizer.eos_token_id
            assert ended == (step["finish_reason"] == "stop")
        told = tuple(step["completion"].strip() for step in steps if step["actor_id"] == "describer")
        heard = [step["prompt"][-1]["content"] for step in steps if step["actor_id"] == "guesser"]
        assert heard and all(text.endswith(told) for text in heard), "actors speak text"
        assert "equals the record, bit for bit" in str(replay(tmp_path / "whole", row["id"]))
    # So has what each exports.
    assert main(["export", str(tmp_path / "whole"), "--merge", "--out", str(tmp_path / "out")]) == 0
    for root in (tmp_path / "whole", tmp_path / "out"):
        for name in PAIR:
            folder = root / "policies" / name / ("merged" if case == "adapters" else "")
            exported = AutoTokenizer.from_pretrained(folder)
            assert exported.get_vocab() == own[name].get_vocab() != own[PAIR[name == PAIR[0]]].get_vocab()
            assert exported.chat_template == own[name].chat_template and exported.eos_token == own[name].eos_token
            model = AutoModelForCausalLM.from_pretrained(folder)
            assert model.get_input_embeddings().weight.shape[0] == len(exported)


def test_two_bases_each_have_their_adapters(tmp_path: Path, families: tuple[str, str]) -> None:
    """Adapters of one base share it, beside a tiny model that is made from the texts of the task."""
    _, second = families
    actors = {"proposer": "a", "reviser": "b", "solver": "c"}
    changes = {
        "task": "sudoku", "task_options": {"actors": list(actors), "blanks": [1, 1]}, "policy_sharing": "shared",
        "actors": actors, "warm_start": {"steps": 2, "batch_size": 4},
        "rollout": {"prompts_per_step": 1, "branches": 2},
        "policies": {"a": {"path": second, **LORA}, "b": {"path": second, **LORA}, "c": {"path": "tiny", **LORA}},
    }  # fmt: skip
    run = train_from_config(config_of(tmp_path / "run", families, **changes))
    policies = run.trainer.policies
    assert policies["a"].base is policies["b"].base is not policies["c"].base
    tokenizers = run.arena.own_tokenizers
    assert tokenizers.alike("a", "b") and not tokenizers.alike("a", "c")
    assert run.arena.max_context == {"a": 1600, "b": 1600, "c": 2048}
    for name, base in (("a", "0"), ("b", "0"), ("c", "1")):
        exported = tmp_path / "run" / "policies" / name
        for folder in (exported, exported / "merged", tmp_path / "run" / "bases" / base):
            assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizers[name].get_vocab()


def test_what_reads_the_tokens_of_another_model_must_have_them(tmp_path: Path, families: tuple[str, str]) -> None:
    first, second = families
    config = config_of(tmp_path, families, own=({"reference": second}, {}), loss={"kl": {"coef": 0.1}})
    told = rf"'policies.describer.reference' = '{second}': '{second}' has other tokens than '{first}'"
    for ask in (dry_run, build_run):
        with pytest.raises(ConfigError, match=told):
            ask(config)
    actors = {"guesser": {"teacher": "describer"}}
    config = config_of(tmp_path, families, actors=actors, loss={"kl": {"coef": 0.1}})
    with pytest.raises(ConfigError, match=rf"'actors.guesser.teacher' = 'describer': '{first}' has other tokens than"):
        dry_run(config)
    rollout = {"client": "vllm", "server": {"url": "http://127.0.0.1:1"}}
    told = r"'rollout.server.url' = .*: a server has one base: expected one for each of \[\['describer'\], \['gues"
    with pytest.raises(ConfigError, match=told):
        dry_run(config_of(tmp_path, families, rollout=rollout))
    # A reference of the same family may be beside a policy of another.
    config = config_of(tmp_path, families, own=({"reference": first}, {}), loss={"kl": {"coef": 0.1}})
    assert f'path = "{second}"' in dry_run(config)


def test_a_swap_to_another_family_is_refused(tmp_path: Path, families: tuple[str, str]) -> None:
    train_from_config(config_of(tmp_path, families, steps=1)).close()
    with pytest.raises(
        ValueError, match="swap: actor 'guesser' played with policy 'guesser', whose tokens policy 'describer'"
    ):
        replay(tmp_path, swap=["guesser=describer"])
    assert "sampled again" in str(replay(tmp_path, swap=["guesser=guesser@start"]))


def test_games_between_families(tmp_path: Path, families: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one run with a league, in a comparison of its checkpoints, and in a tournament with a run of another."""
    league = {"share": 0.5, "every": 1, "size": 2}
    policies = {"player0": {"path": families[0]}, "player1": {"path": families[1]}}
    many = {"rollouts_per_step": 100, "progress": False}
    changes = {"policy_sharing": "model_per_actor", "policies": policies, "league": league, "log": many}
    changes |= {"task_options": {"max_tokens": 12}}  # their tokens are short
    changes |= {"warm_start": {"steps": 40, "batch_size": 16, "warmup": 5, "lr": 1e-2}, "credit": {"rule": "constant"}}
    changes |= {"rollout": {"prompts_per_step": 12}}
    config = config_from_dict(kuhn(tmp_path / "two", **changes))
    read, fitting = list[Any](), start.fitting
    monkeypatch.setattr(start, "fitting", lambda *given: read.append(given[0]) or fitting(*given))
    run = train_from_config(config)
    run.close()
    assert read == [run.arena.tokenizer_of(name) for name in policies], "each warm start writes its own tokens"
    assert all(policy.version > 0 for policy in run.trainer.policies.values())
    rows = rows_of(tmp_path / "two", "rollouts.jsonl")
    assert {step["policy"].partition("@")[1] for row in rows for step in row["steps"]} == {"", "@"}
    for row in rows:
        assert "equals the record, bit for bit" in str(replay(tmp_path / "two", row["id"]))
    difference = measure(config, "newest", "newest").difference
    assert difference is not None and difference.difference.mean == 0
    train_from_config(config_from_dict(kuhn(tmp_path / "one", steps=1))).close()
    folders = [tmp_path / "one", tmp_path / "two"]
    result = play_tournament(folders, checkpoints=["newest"], games=4, baselines=["random"])
    assert len(result.participants) == 3 and result.payoffs.between(*result.participants[:2]).games == 4


def test_each_base_has_its_server(tmp_path: Path, families: tuple[str, str]) -> None:
    """Both servers get the weights of each update: the trainer computes what they sampled."""
    models = [read_model(path, torch.float32) for path in families]
    with engine_here(models[0]) as (one, _), engine_here(models[1]) as (two, _):
        server = {"url": {"describer": one.url, "guesser": two.url}, "api_key_env": KEY_VARIABLE}
        rollout = {"prompts_per_step": 2, "group_size": 2, "client": "vllm", "server": server}
        run = train_from_config(config_of(tmp_path, families, rollout=rollout, steps=3, update={"lr": 1e-2}))
        run.close()
    for row in rows_of(tmp_path)[-2:]:
        assert all(row[f"{name}/sampler_trainer_logprob_max_diff"] < 1e-4 for name in PAIR)
    assert moved(run, families) == set(PAIR)


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.usefixtures("warm_starts")
@pytest.mark.xdist_group("warm_python")
def test_two_processes_train_two_families(tmp_path: Path, families: tuple[str, str]) -> None:
    changes = {"device": "cpu", "update": {"lr": 3e-4}, "rollout": {"prompts_per_step": 2, "group_size": 2}}
    one = train_from_config(config_of(tmp_path / "one", families, **changes))
    train_on_two_ranks(config_of(tmp_path / "two", families, **changes))
    for name, policy in one.trainer.policies.items():
        folder = tmp_path / "two" / "policies" / name
        got = dict(named_weights(read_model(str(folder), torch.float32)))
        assert max(float((got[key] - value).abs().max()) for key, value in policy.weights()) <= 1e-5
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == one.arena.tokenizer_of(name).get_vocab()


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_a_cluster_has_a_pool_for_each_family(tmp_path: Path, families: tuple[str, str]) -> None:
    pools = {name: {"engine": "transformers", "policies": [name], "cpus": 0.3} for name in PAIR}
    cluster = {"backend": "ray", "learner": {"cpus": 0.5}, "engines": pools, "arena": {"count": 1, "cpus": 0.3}}
    changes = {"cluster": cluster, "filter": {"drop_zero_advantage": False}, "loss": {"entropy_coef": 0.01}}
    (tmp_path / "run.toml").write_text(to_toml(config_of(tmp_path / "run", families, **changes)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "turnwise", "train", str(tmp_path / "run.toml")]
    subprocess.run(command, env=environment, check=True, timeout=300)
    for row in rows_of(tmp_path / "run")[-2:]:
        assert all(row[f"{name}/sampler_trainer_logprob_max_diff"] < 1e-4 and row[f"{name}/updates"] for name in PAIR)
        assert {row[f"cluster/version/engine-{name}-0/{name}"] for name in PAIR} == {row["step"]}
