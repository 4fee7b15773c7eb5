"""The client and the learner with SkyRL's real server: what they send, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.inference import TinkerClient
from turnwise.inference.tinker import TinkerServer, TinkerServerError
from turnwise.inference.weights.lora import SharedBase
from turnwise.train.config.policies import LoraConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.learner.local import LocalLearner
from turnwise.train.learner.tinker.learner import TinkerLearner
from turnwise.train.learner.tinker.remote import RemoteAdapter, RemotePolicy
from turnwise.train.model.loading import peft_config
from turnwise.train.model.policy import Policy
from turnwise.types import ContextLengthError, ModelRequest, Sampling, TrainingBatch

from .helpers import KEY, Server

RANK, PROMPT = 4, [5, 40, 41, 42, 43, 1, 6]


@pytest.fixture(scope="module")
def connected(server: Server) -> TinkerServer:
    return TinkerServer(server.url, KEY, timeout=300, patience=5)


def config_of(base: Path, kind: str = "skyrl-jax") -> TrainConfig:
    return TrainConfig(
        policies={"default": {"path": str(base), "lora": {"rank": RANK}}},
        learner={"type": "tinker", "tinker": {"server": kind}},
        rollout={"client": "tinker"},
        loss={"type": "ppo"},
        # The server doesn't clip gradients.
        update={"lr": 1e-3, "max_grad_norm": 1e6},
    )


def make_learner(server: TinkerServer, config: TrainConfig, base: Path, seed: int = 3) -> TinkerLearner:
    policy = RemotePolicy("default", config.optimizer_of("default"), total_steps=10)
    adapter = RemoteAdapter(server, str(base), RANK, seed)
    return TinkerLearner({"default": policy}, {"default": adapter}, config, str(base))


def make_client(server: TinkerServer, base: Path) -> TinkerClient:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return TinkerClient(server, tokenizer, ["default"], vocabulary=len(tokenizer), context_length=2048)


async def sampled(client: TinkerClient, version: int) -> TrainingBatch:
    """Sample four rows of several lengths, and give them advantages. SkyRL compiles anew for each ``max_tokens``."""
    requests = [ModelRequest(PROMPT[: 7 - i], Sampling(max_tokens=8, seed=2**40 + i)) for i in range(4)]
    responses = await client.generate(requests)
    assert all(response.policy_versions == [(len(response.logprobs), version)] for response in responses)
    rows = [response.prompt_token_ids + response.completion_token_ids for response in responses]
    ours = [np.arange(len(row)) >= 7 - i for i, row in enumerate(rows)]
    logprobs = [[0.0] * (7 - i) + response.logprobs for i, response in enumerate(responses)]
    return TrainingBatch.of_rows(
        token_ids=np.concatenate(rows),
        cu_seqlens=np.cumsum([0, *map(len, rows)]),
        loss_mask=np.concatenate(ours).astype(np.uint8),
        rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
        advantages=np.array([1.0, -0.5, 2.0, -1.5], np.float32),
        rewards=np.zeros(4, np.float32),
        temperatures=np.ones(4, np.float32),
        actor_index=np.zeros(4, np.int64),
        policy_index=np.zeros(4, np.int64),
        min_version=np.zeros(4, np.int64),
        actors=["only"],
        policies=["default"],
    )


def downloaded(server: TinkerServer, learner: TinkerLearner, folder: Path) -> dict[str, torch.Tensor]:
    path = learner.adapters["default"].save_for_sampler(f"test-{learner.unique_suffix()}")
    server.download(path, folder)
    return load_file(folder / "adapter_model.safetensors")


def update(learner: Any, batch: TrainingBatch) -> dict[str, float]:
    return learner.update(batch, ["default"], {}, np.random.default_rng(0), lambda *_: None).metrics["default"]


@pytest.mark.representative
async def test_one_step_is_that_of_a_local_learner(connected: TinkerServer, base: Path, tmp_path: Path) -> None:
    """From an equal adapter: same loss, same gradient, same weights, in float32 of JAX and of torch."""
    config = config_of(base)
    there, client = make_learner(connected, config, base), make_client(connected, base)
    there.send("default", lambda weights: client.load_weights("default", weights, 0))
    batch = await sampled(client, version=0)
    start = downloaded(connected, there, tmp_path / "before")
    # The same adapter in this process.
    shared = SharedBase(AutoModelForCausalLM.from_pretrained(base))
    model = shared.add_adapter("default", peft_config(LoraConfig(rank=RANK)), seed=0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(start[name])
    policy = Policy("default", model, config.optimizer_of("default"), total_steps=10)
    here = LocalLearner({"default": policy}, config)
    expected, found = update(here, batch), update(there, batch)
    assert expected["grad_norm"] > 0.1
    for key in ("loss", "grad_norm", "ratio_max", "learning_rate", "updates", "tokens"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    assert found["sampler_trainer_logprob_max_diff"] < 1e-4
    # The server's three attention matrices A are one, which stays as it is while B is 0.
    after = downloaded(connected, there, tmp_path / "after")
    moved = {name: tensor - start[name] for name, tensor in policy.weights()}
    assert max(float(tensor.abs().max()) for tensor in moved.values()) == pytest.approx(1e-3, rel=0.01)
    for name, tensor in moved.items():
        difference = (after[name] - start[name]) - tensor
        assert float(difference.norm()) <= 0.01 * float(tensor.norm()) + 1e-9, name
    await client.close()


async def test_weights_and_versions_follow_the_updates(connected: TinkerServer, base: Path) -> None:
    """The tokens of the next version have the log-probs that the trained weights give them."""
    learner, client = make_learner(connected, config_of(base), base), make_client(connected, base)
    with pytest.raises(RuntimeError, match="has no weights yet"):
        await client.generate([ModelRequest(PROMPT)])
    for version in range(2):
        learner.send("default", lambda weights, v=version: client.load_weights("default", weights, v))
        assert client.version("default") == version
        batch = await sampled(client, version)
        measured = update(learner, batch)
        assert measured["sampler_trainer_logprob_max_diff"] < 1e-4 and measured["grad_norm"] > 0
        assert learner.policies["default"].version == version + 1
    await client.close()


async def test_sampling_as_any_client_does(connected: TinkerServer, base: Path) -> None:
    client = make_client(connected, base)
    client.load_weights("default", [("base_model", str(base))], 7)
    ask = lambda **changes: ModelRequest(PROMPT, Sampling(**{"seed": 1, "max_tokens": 8, **changes}))  # noqa: E731
    first, again, other, greedy, short = await client.generate(
        [ask(), ask(), ask(seed=2), ask(temperature=0.0), ask(max_tokens=2)]
    )
    assert first == again and first.completion_token_ids != other.completion_token_ids
    assert first.policy_versions == [(len(first.completion_token_ids), 7)]
    assert short.finish_reason == "length" and len(short.completion_token_ids) == 2
    # Greedy tokens are the most likely ones, by the model in this process, and so are their log-probs.
    model = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.tensor([PROMPT + greedy.completion_token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    assert logprobs.argmax(-1).tolist() == greedy.completion_token_ids
    assert greedy.logprobs == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)
    # Given tokens are scored as they were sampled.
    scores = await client.score([ask(), ask()], [first.completion_token_ids, other.completion_token_ids])
    assert scores[0] == pytest.approx(first.logprobs, abs=1e-4)
    assert scores[1] == pytest.approx(other.logprobs, abs=1e-4)
    # A stop token ends a completion and is kept; so does a stop string.
    stop = first.completion_token_ids[3]
    place = first.completion_token_ids.index(stop)
    text = client.tokenizer.decode([stop])
    for changes in ({"stop_token_ids": (stop,)}, {"stop": (text,)} if text.strip() else {"stop_token_ids": (stop,)}):
        [cut] = await client.generate([ask(**changes)])
        assert cut.completion_token_ids[-1] == stop and cut.finish_reason == "stop"
        assert cut.completion_token_ids == first.completion_token_ids[: place + 1]
    with pytest.raises(ValueError, match=r"temperature=0\.7: expected 1, or 0"):
        await client.generate([ask(temperature=0.7)])
    with pytest.raises(ValueError, match=r"top_p=0\.9, top_k=0: expected 1 and 0"):
        await client.generate([ask(top_p=0.9)])
    with pytest.raises(ContextLengthError, match="leaves no room in the 2048-token context"):
        await client.generate([ModelRequest([5] * 2048)])
    with pytest.raises(ValueError, match=r"policy='other': expected one of \['default'\]"):
        await client.generate([ModelRequest(PROMPT, policy="other")])
    assert client.stats()["requests"] == 9
    await client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.generate([ask()])


async def test_a_saved_run_goes_on_with_its_optimizer(connected: TinkerServer, base: Path, tmp_path: Path) -> None:
    config = config_of(base)
    whole, client = make_learner(connected, config, base), make_client(connected, base)
    whole.send("default", lambda weights: client.load_weights("default", weights, 0))
    batch = await sampled(client, 0)
    update(whole, batch)
    saved = whole.save(tmp_path / "checkpoints", 1, {"of": "the run"})
    expected = update(whole, batch)
    parts = make_learner(connected, config, base, seed=9)
    assert parts.load(saved) == (1, {"of": "the run"})
    assert parts.policies["default"].version == 1 and parts.policies["default"].updates == 1
    found = update(parts, batch)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    own, theirs = (downloaded(connected, each, tmp_path / str(id(each))) for each in (whole, parts))
    assert all(torch.allclose(own[name], theirs[name], rtol=0, atol=1e-6) for name in own)
    held = json.loads((saved / "tinker.json").read_text())
    assert held["states"]["default"].startswith("tinker://") and KEY not in (saved / "tinker.json").read_text()
    await client.close()


async def test_log_probs_of_the_reference(connected: TinkerServer, base: Path) -> None:
    learner, client = make_learner(connected, config_of(base), base), make_client(connected, base)
    learner._base = connected.sampler(base_model=str(base))
    client.load_weights("default", [("base_model", str(base))], 0)
    batch = await sampled(client, 0)
    found = learner.reference_logprobs("default", batch).numpy()
    trained = batch.loss_mask.astype(bool)
    assert found[trained] == pytest.approx(batch.rollout_logprobs[trained], abs=1e-4)
    assert found[batch.cu_seqlens[:-1]].tolist() == [0.0] * 4
    await client.close()


async def test_a_wrong_kind_of_server_is_noticed(connected: TinkerServer, base: Path) -> None:
    learner, client = make_learner(connected, config_of(base, "hosted"), base), make_client(connected, base)
    client.load_weights("default", [("base_model", str(base))], 0)
    with pytest.raises(ValueError, match="'hosted': the first answer is that of a server that averages"):
        update(learner, await sampled(client, 0))
    await client.close()


def test_what_the_server_refuses_is_told(connected: TinkerServer, base: Path) -> None:
    with pytest.raises(TinkerServerError, match=r"LoRA rank 64 must be between 1 and 8"):
        RemoteAdapter(connected, str(base), 64, 0)
    with pytest.raises(TinkerServerError, match=r"[Cc]heckpoint not found|404"):
        make_learner(connected, config_of(base), base).adapters["default"].load_state("tinker://nobody/weights/none")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(
        TinkerServerError, match=r"no Tinker server answers at http://127\.0\.0\.1:9: .*Connection refused"
    ):
        TinkerServer("http://127.0.0.1:9", KEY)
