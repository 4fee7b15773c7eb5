"""The examples run, and say what they claim."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.replay.replay import replay
from turnwise.run.build import train_from_config
from turnwise.run.checks import dry_run
from turnwise.train.validate import load_config

from .families import save_families
from .trained import rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")

EXAMPLES = Path(__file__).parents[1] / "examples"
SUDOKU = sorted((EXAMPLES / "sudoku").glob("*.toml"))
SHORT: dict[str, object] = {
    "steps": 3,
    "threads": 1,
    "health.start_questions": 0,
    "warm_start.steps": 4,
    "warm_start.batch_size": 8,
    "rollout.prompts_per_step": 3,
    "rollout.branches": 4,
    "eval.every": 2,
    "eval.num_prompts": 4,
    "checkpoint.every": 2,
    # A model that can't write a grid yet ties every group; the reward itself, below 0 then, still moves weights.
    "credit.rule": "episodic",
}
TEAM = ["proposer", "reviser"]
WEIGHTS = {"single": ["default"], "prompt": ["default"], "lora": TEAM, "full": TEAM}


def checked(folder: Path) -> list[dict]:
    """The metrics of a short run in which no episode failed."""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "validation" in rows[2]
    assert all(row.get("episodes/failed", 0) == 0 for row in rows)
    return rows


def run_example(folder: Path, name: str, *arguments: str) -> str:
    """What the example prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_drop_in(tmp_path: Path) -> None:
    """Both ways of one training step give the same losses and gradients, and the model learns."""
    printed = run_example(tmp_path, "drop_in.py")
    assert "losses and gradients agree" in printed


@pytest.mark.slow
def test_recipes_reach_what_their_rows_say(tmp_path: Path) -> None:
    """A game of one's own, in no more than 40 lines, also if it had ended before; and the team to start from."""
    table = [line for line in (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    rows = {line.split("|")[1].strip(): line for line in table}
    lines = (EXAMPLES / "vowels.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    expected = re.search(r"last batch: (\d+)% vowels", rows["`python examples/vowels.py`"])
    for _ in range(2):
        assert run_example(tmp_path, "vowels.py").splitlines()[-1] == f"vowels in the last batch: {expected[1]}%"
    shutil.copytree(EXAMPLES / "start", tmp_path / "start")
    row = rows["`turnwise train run.toml` in `examples/start`"]
    low, high = (float(share) / 100 for share in re.search(r"\((.*)% to (.*)%\)", row).groups())
    command = [sys.executable, "-m", "turnwise", "train", "run.toml"]
    subprocess.run(command, cwd=tmp_path / "start", env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    reached = json.loads((tmp_path / "start/runs/my_team/held_out.json").read_text())["success"]
    assert low <= reached <= high


@pytest.mark.slow
def test_train_loop(tmp_path: Path) -> None:
    """The loop without the trainer fits on two pages, and its reward rises."""
    assert len((EXAMPLES / "train_loop.py").read_text(encoding="utf-8").splitlines()) <= 120
    printed = run_example(tmp_path, "train_loop.py", "15")
    first, last = map(float, printed.splitlines()[-1].removeprefix("reward rose from ").split(" to "))
    assert first < 0.1 and last > 0.2, printed


@pytest.mark.slow
@pytest.mark.needs("trl")
def test_trl_trie(tmp_path: Path) -> None:
    """TRL's trainer has its own loss and gradient with log-probs from the trie of its batch."""
    printed = run_example(tmp_path, "trl_trie.py")
    assert "loss and gradient are TRL's" in printed


@pytest.mark.parametrize(
    "name", ["plan_path", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sokoban", "code_duel"))]
)
def test_teams_that_walk_or_write(name: str, tmp_path: Path) -> None:
    """Three steps: both actors' calls train, and no episode fails."""
    given = {**SHORT, "run_dir": str(tmp_path / "run")}
    if name == "code_duel":
        # No reward of an episode is below 0 here, so without a program in sight nothing would train.
        given["credit.rule"] = "constant"
    config = load_config(EXAMPLES / f"{name}.toml", given)
    run = train_from_config(config)
    lines = checked(tmp_path / "run")
    trained = {actor.id for actor in run.task.actors for line in lines if line.get(f"samples/{actor.id}")}
    assert trained == {actor.id for actor in run.task.actors}


def test_at_grpo_samples_as_its_paper(tmp_path: Path) -> None:
    """Two steps with a tiny model: the trainer has the sampler's log-probs over the kept tokens, in trees of four."""
    given = {**SHORT, "steps": 2, "policies.default.path": "tiny", "warm_start.steps": 0, "rollout.prompts_per_step": 2}
    config = load_config(EXAMPLES / "at_grpo" / "plan_path.toml", {**given, "run_dir": str(tmp_path / "run")})
    assert config.rollout.sampling().cut == {"top_p": 0.9, "top_k": 20} and config.rollout.temperature == 1.5
    train_from_config(config)
    rows = [row for row in rows_of(tmp_path / "run") if row["step"]]
    assert len(rows) == 2 and all(row["episodes/failed"] == 0 for row in rows)
    assert all(1 < row["sampling_mask/kept"] <= 20 for row in rows)
    assert all(0 < row["default/sampler_trainer_logprob_max_diff"] <= 1e-5 for row in rows)


def test_sub_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: no episode fails, and each attempt opens a child for both parts or for each."""
    monkeypatch.chdir(EXAMPLES.parent)
    given = {"steps": 2, "threads": 1, "health.start_questions": 0, "rollout.prompts_per_step": 2}
    given |= {"eval.num_prompts": 4}
    config = load_config(EXAMPLES / "sub_agents.toml", {**given, "run_dir": str(tmp_path / "run")})
    train_from_config(config)
    rows = [row for row in rows_of(tmp_path / "run") if row["step"] and "episodes" in row]
    assert len(rows) == 2
    for row in rows:
        children = row["metric/gateway/children/worker"]
        assert 1.0 <= children <= 2.0 and row["metric/gateway/calls/worker"] == children
        assert row["episodes"] == 16 + 16 * children and row["episodes/failed"] == 0
        assert row["samples/boss"] or row["samples/worker"]


@pytest.mark.needs("peft")
def test_simulated_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps: the agent's calls train, the user's never do, and recorded talks play again."""
    monkeypatch.chdir(EXAMPLES.parent)
    given = {**SHORT, "rollout.branches": 1, "rollout.group_size": 2, "credit.rule": "constant"}
    config = load_config(EXAMPLES / "simulated_user.toml", {**given, "run_dir": str(tmp_path / "run")})
    run = train_from_config(config)
    assert run.config.rollout.check_private
    for row in (row for row in checked(tmp_path / "run") if row["step"]):
        assert row["samples/agent"] and not row.get("samples/user") and row["dropped/not_trainable"] >= row["episodes"]
    assert {name: policy.updates for name, policy in run.trainer.policies.items()} == {"agent": 3, "user": 0}
    talk = rows_of(tmp_path / "run", "rollouts.jsonl")[0]
    assert "equals the record, bit for bit" in str(replay(tmp_path / "run", talk["id"]))


def test_each_level_has_both_loops() -> None:
    assert [path.stem for path in SUDOKU] == sorted(name + kind for name in WEIGHTS for kind in ("", "_async"))


@pytest.mark.parametrize(
    "path",
    [p if p.stem == "lora_async" else pytest.param(p, marks=pytest.mark.slow) for p in SUDOKU],
    ids=lambda p: p.stem,
)
def test_sudoku_at_every_level(path: Path, tmp_path: Path) -> None:
    """Three steps of each: every policy learns, the loop is the one that the file names, the whole folder is there."""
    config = load_config(path, {**SHORT, "run_dir": str(tmp_path / "run")})
    run = train_from_config(config)
    level, _, kind = path.stem.partition("_")
    policies = run.trainer.policies
    assert list(policies) == WEIGHTS[level]
    assert all(policy.version > 0 for policy in policies.values())
    assert checked(tmp_path / "run")[-1]["staleness_max"] == (1 if kind else 0)
    assert sorted(folder.name for folder in (tmp_path / "run" / "policies").iterdir()) == sorted(policies)
    if level in ("lora", "full"):
        first, second = (dict(policy.weights()) for policy in policies.values())
        assert any(not torch.equal(first[name], second[name]) for name in first), "each learns for itself"


def write_gguf(path: Path) -> None:
    """Write a random Llama of one layer with a vocabulary of bytes, as llama.cpp names its parts."""
    import numpy as np
    from gguf import GGUFWriter, TokenType

    letters = [*map(chr, range(33, 127)), "ab"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters]
    width, kinds = 16, [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * len(letters)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}")
    normal = np.random.default_rng(0).standard_normal
    shapes = {
        **{"attn_q": (width, width), "attn_k": (8, width), "attn_v": (8, width), "attn_output": (width, width)},
        **{"ffn_gate": (32, width), "ffn_up": (32, width), "ffn_down": (width, 32)},
        **{"attn_norm": (width,), "ffn_norm": (width,)},
    }
    parts = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    parts |= {f"blk.0.{name}": shape for name, shape in shapes.items()}
    for name, shape in parts.items():
        writer.add_tensor(f"{name}.weight", normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.needs("nbclient", "ipykernel", "matplotlib")
def test_the_notebook_runs_and_its_team_learns(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    shown = "".join(output.get("text", "") for output in outputs)
    assert shown.count("→") == 4 and "step 20\n  writer\n" in shown
    curve = [row["validation"] for row in rows_of(tmp_path / "runs/quickstart") if "validation" in row]
    assert len(curve) == 11 and curve[0] < 0.1 and curve[-1] > 0.4


@pytest.mark.needs("gguf", "accelerate")
def test_a_gguf_file_becomes_a_model_that_trains(tmp_path: Path) -> None:
    """The folder has the file's weights in float32, its chat template, and the end of a message as end of text."""
    spec = importlib.util.spec_from_file_location("smollm2_model", EXAMPLES / "smollm2" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write_gguf(tmp_path / "model.gguf")
    module.convert(tmp_path / "model.gguf", tmp_path / "folder")

    model, tokenizer = (kind.from_pretrained(tmp_path / "folder") for kind in (AutoModelForCausalLM, AutoTokenizer))
    source = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "7+5"}], tokenize=False)
    assert chat == "<|im_start|>7+5<|im_end|>"
    tokens = tokenizer(chat, return_tensors="pt")["input_ids"]
    assert torch.equal(model(tokens).logits, source(tokens).logits)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


@pytest.mark.needs("langchain_openai", "langgraph", "agents", "renderers")
def test_team_of_two_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on a tiny model: each framework's calls are recorded, and each actor is rewarded for its own form."""
    monkeypatch.chdir(EXAMPLES.parent)
    short = {**SHORT, "steps": 2, "policies.default.path": "tiny", "run_dir": str(tmp_path / "run")}
    del short["credit.rule"], short["warm_start.steps"], short["warm_start.batch_size"]
    train_from_config(load_config(EXAMPLES / "smollm2" / "frameworks.toml", short | {"rollout.branches": 1}))
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2] and not any(row.get("episodes/failed") for row in rows)
    for actor in ("planner", "worker"):
        assert rows[1][f"metric/gateway/calls/{actor}"] == 1.0
        assert {f"metric/{name}/{actor}" for name in ("form", "right")} <= set(rows[1])

    from examples.smollm2.frameworks import form, planned, right

    extras = {"result": {"planner": "Plan: 9 - 2", "worker": "It is 7"}}
    assert form(extras) == {"planner": 1.0, "worker": 0.0}
    assert right(extras, {"answer": 7}) == 1.0 and right(extras, {"answer": 9}) == 0.0
    assert planned(extras, {"answer": 7}) == {"planner": 1.0} and planned(extras, {"answer": 11}) == {"planner": 0.0}


@pytest.mark.parametrize("actors", [["solver", "verifier"], ["solver"]])
def test_solver_and_verifier_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actors: list[str]) -> None:
    """Two steps on a tiny model: each actor plays, and an evaluation counts what the verifier changes."""
    monkeypatch.chdir(EXAMPLES.parent)
    short = {**SHORT, "steps": 2, "policies.default.path": "tiny", "run_dir": str(tmp_path / "run")}
    del short["credit.rule"], short["warm_start.steps"], short["warm_start.batch_size"]
    config = load_config(
        EXAMPLES / "smollm2" / "verifier.toml", short | {"rollout.branches": 1, "task_options.actors": actors}
    )
    run = train_from_config(config)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2] and not any(row.get("episodes/failed") for row in rows)
    for actor in actors:
        assert {f"metric/outcome/{actor}", f"metric/form/{actor}"} <= set(rows[1])
    assert ("metric/verdict/verifier" in rows[1]) == ("verifier" in actors)
    assert {actor.id for actor in run.task.actors} == set(actors)


def test_a_verifier_keeps_right_answers_and_replaces_others() -> None:
    from examples.smollm2.verifier import QUESTIONS, Verifier, attempt, form, outcome, verdict

    question = "Ann has 9 apples and gets 2 more. How many apples does Ann have now?"
    artifact = Verifier().artifact(question)
    assert artifact["answer"] == QUESTIONS[question] == 11
    said = {"solver": "9 - 2 = 7", "verifier": "Wrong: 9 + 2 = 11"}
    fixed = {"said": said, "answer": said["verifier"]}
    assert attempt(fixed, artifact) == {"solver": 0.0}
    assert outcome(fixed, artifact) == {"solver": 1.0, "verifier": 1.0}
    assert form(fixed) == {"solver": 1.0, "verifier": 1.0} and verdict(fixed, artifact) == {"verifier": 1.0}
    kept = {"said": {"solver": "It is 7", "verifier": "Right"}, "answer": "It is 7"}
    assert outcome(kept, artifact) == {"solver": 0.0, "verifier": 0.0}
    assert form(kept) == {"solver": 0.0, "verifier": 1.0} and verdict(kept, artifact) == {"verifier": 0.0}
    assert verdict({"said": {"solver": "9 + 2 = 11"}}, artifact) == {}


def test_a_verifier_with_a_calculator_sees_what_the_solver_s_sum_is() -> None:
    from examples.smollm2.verifier import Options, Verifier

    def shown(calculator: bool, answer: str) -> list[str]:
        task = Verifier(Options(calculator=calculator))
        state = SimpleNamespace(current_actor="verifier", data={"answer": answer})
        chat = task.episodes()["checked"].build_messages(state, None, {"question": "How many?"})
        return [message["content"] for message in chat if message["role"] == "user"]

    assert not any("calculator" in text for text in shown(False, "9 - 2 = 8"))
    with_it = shown(True, "9 - 2 = 8")
    assert with_it[-1] == "How many?\n9 - 2 = 8\nThe calculator says 9 - 2 = 7"
    assert [text.splitlines()[-1][-2:] for text in with_it[:-1]] == ["35", "35", "27", " 7"]
    assert shown(True, "It is 7.")[-1] == "How many?\nIt is 7."


def test_a_deal_pays_both_their_share_and_a_bad_one_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on a tiny model, and the rules by hand."""
    from examples.smollm2.haggle import Haggling, deal, form, gain, prompt

    artifact = Haggling().artifact("lamp 30 50")
    assert prompt("buyer", artifact, None) == "The lamp is worth 50 to you. Make an offer."
    assert prompt("seller", artifact, 42) == "The lamp cost you 30. The buyer offers 42."
    for price, dealt, gains, agreed in ((42, True, (0.4, 0.6), 1), (42, False, (0, 0), 0), (25, True, (1, -0.25), 0)):
        extras = {"dealt": dealt, "price": price}
        assert gain(extras, artifact) == dict(zip(("buyer", "seller"), gains, strict=True))
        assert deal(extras, artifact) == {"buyer": agreed, "seller": agreed}
    assert form({"readable": {"buyer": [True, False], "seller": []}}) == {"buyer": 0.5}

    state = SimpleNamespace(data={}, current_actor="buyer")
    episode = Haggling().episodes()["haggle"]
    episode.setup(state, None, artifact)
    for actor, said, over in (("buyer", "40", False), ("seller", "45", False), ("buyer", "deal", True)):
        state.current_actor, state.last_completion_text = actor, said
        episode.env_response(state, None, artifact)
        assert episode.is_done(state, None, artifact) == over
    assert state.data["dealt"] and state.data["price"] == 45

    monkeypatch.chdir(EXAMPLES.parent)
    short = {**SHORT, "steps": 1, "policies.default.path": "tiny", "run_dir": str(tmp_path / "run")}
    del short["credit.rule"]
    train_from_config(load_config(EXAMPLES / "smollm2" / "haggle.toml", short | {"rollout.branches": 1}))
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1] and not any(row.get("episodes/failed") for row in rows)
    assert {"metric/gain/buyer", "metric/gain/seller", "metric/deal/buyer"} <= set(rows[1])


@pytest.mark.parametrize("actors", [["describer", "guesser"], ["guesser"]])
def test_describer_and_guesser_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actors: list[str]) -> None:
    """A step on a tiny model: each actor plays, with the other's view or without."""
    monkeypatch.chdir(EXAMPLES.parent)
    short = {**SHORT, "steps": 1, "policies.default.path": "tiny", "run_dir": str(tmp_path / "run")}
    del short["credit.rule"], short["warm_start.steps"], short["warm_start.batch_size"]
    train_from_config(
        load_config(EXAMPLES / "smollm2" / "views.toml", short | {"rollout.branches": 1, "task_options.actors": actors})
    )
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1] and not any(row.get("episodes/failed") for row in rows)
    assert {name for name in rows[1] if name.startswith("metric/form/")} == {f"metric/form/{actor}" for actor in actors}


def test_a_guess_counts_if_the_description_has_not_the_word() -> None:
    from examples.smollm2.views import KINDS, Views, form, right

    task = Views()
    splits = {
        split: {task.artifact(q)["secret"] for q in task.draw(split, 60, 0)}
        for split in ("train", "validation", "eval")
    }
    assert not splits["train"] & (splits["validation"] | splits["eval"]) and not splits["validation"] & splits["eval"]
    words = [word for kind in KINDS.values() for word in kind.split()]
    assert len(set(words)) == len(words) == 72
    artifact = {"words": "tiger, boat, hat, bread", "secret": "boat"}
    for describer, guesser, reward, forms in (
        ("It floats.", "boat", 1.0, (1.0, 1.0)),
        ("It floats.", "It is a boat!", 1.0, (1.0, 0.0)),
        ("It floats.", "boat or hat", 0.0, (1.0, 0.0)),
        ("A Boat.", "boat", 0.0, (0.0, 1.0)),
        ("It tows boats.", "boat", 0.0, (0.0, 1.0)),
        ("Oarsmen row in a boathouse.", "boat", 1.0, (1.0, 1.0)),
        ("It floats. It is big.", "hat", 0.0, (0.0, 1.0)),
        ("", "boat", 1.0, (None, 1.0)),
    ):
        said = {"describer": describer, "guesser": guesser}
        assert right(said, artifact) == reward, said
        scores = form({"said": said}, artifact)
        assert (scores.get("describer"), scores["guesser"]) == forms, said


def test_the_pair_of_two_families_is_planned(tmp_path: Path) -> None:
    """As Dr. MAS trains it, with two small models in place of its own, which are not here."""
    solver, verifier = reversed(save_families(tmp_path))
    questions = "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}\\n#### {n + 1}"}}\n' for n in range(2000))
    (tmp_path / "questions.jsonl").write_text(questions, encoding="utf-8")
    given = {"task_options.path": str(tmp_path / "questions.jsonl"), "run_dir": str(tmp_path / "run")}
    told = dry_run(load_config(EXAMPLES / "math_orchestra_pair.toml", given))
    for name, path in (("solver", "Qwen/Qwen2.5-7B-Instruct"), ("verifier", "meta-llama/Llama-3.2-3B-Instruct")):
        assert f"# actor '{name}' plays with policy '{name}'" in told and f'path = "{path}"' in told
    given |= {"policies.solver.path": solver, "policies.verifier.path": verifier}
    told = dry_run(load_config(EXAMPLES / "math_orchestra_pair.toml", given))
    assert "context 1600" in told and "context 1500" in told and 'transfer = "nccl"' in told
