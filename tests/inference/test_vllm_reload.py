"""New weights in a live vLLM model: the short way gives what vLLM's own gives, and is not taken where it can't."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.inference.vllm.reload import _ROUTE, reload_worker
from turnwise.types import ModelResponse

from .helpers import EXACT, build, sent, teacher_forced

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
FAMILIES = ["served", "served-untied", "served-qwen2", "served-llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


class InProcess:
    """A vLLM engine in this process, whose worker tests can reach."""

    def __init__(self, model: Any, folder: Path, **settings: Any) -> None:
        from vllm import EngineArgs, LLMEngine

        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder), dtype="float32", skip_tokenizer_init=True, generation_config="vllm",
                logprobs_mode="processed_logprobs", load_format="dummy", kv_cache_memory_bytes=2**25, block_size=32,
                enforce_eager=True, enable_chunked_prefill=False, disable_log_stats=True, **settings,
            )
        )  # fmt: skip
        [worker] = self.llm.collective_rpc(lambda worker: worker)
        self.runner = worker.model_runner
        self.worker = worker
        self.load(weights_of(model))

    def load(self, weights: Any) -> None:
        reload_worker(self.worker, weights)
        assert self.llm.reset_prefix_cache(True)

    def error_of(self, model: Any) -> float:
        """The largest error of log-probabilities in three completions."""
        from vllm import SamplingParams

        prompt = [5, 6, 7, 8] * 8
        for seed in range(3):
            params = SamplingParams(max_tokens=8, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
            self.llm.add_request(str(seed), {"type": "token", "prompt_token_ids": prompt}, params)
        done: list[Any] = []
        while self.llm.has_unfinished_requests():
            done += [output.outputs[0] for output in self.llm.step() if output.finished]
        found = []
        for one in done:
            logprobs = [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)]
            told = ModelResponse("", list(one.token_ids), logprobs, "length", [], prompt)
            found.append(float((teacher_forced(model, told) - torch.tensor(logprobs)).abs().max()))
        return max(found)


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    """Give this process back what vLLM changes in it."""
    environment, threads = dict(os.environ), torch.set_num_threads
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    yield
    torch.set_num_threads = threads
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def engine(family: str, in_process: None, tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """One engine for the tests of a family: it takes seconds to start."""
    return InProcess(build(family), tmp_path_factory.mktemp("engine"))


def other(family: str, seed: int) -> Any:
    """A model whose every weight differs from its initial one: biases and norms, which start out constant, as well."""
    model = build(family, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("family", ["served"], indirect=True)
def test_a_tied_head_is_stale_unless_it_is_packed_again(
    engine: InProcess, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What :func:`repack_embeddings` is for; the day that vLLM does it, this test says so.

    It comes first: once the head was loaded by its own name, it is not stale.
    """
    model = other("served", 4)
    with monkeypatch.context() as patch:
        patch.setattr("turnwise.inference.vllm.reload.repack_embeddings", lambda *model: None)
        engine.load(dict(sent(model)))
    assert engine.error_of(model) > 0.05
    engine.load(dict(sent(model)))
    assert engine.error_of(model) < EXACT
    engine.load(weights_of(model))  # records the route that the next test takes


def test_the_short_way_is_exact(engine: InProcess, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layerwise: list[Any] = []
    monkeypatch.setattr("turnwise.inference.vllm.reload._reload_layerwise", lambda *call: layerwise.append(call))
    for seed in (1, 2):
        model = other(family, seed)
        engine.load(weights_of(model))
        assert engine.error_of(model) < EXACT
    assert not layerwise


@pytest.mark.parametrize("family", ["served"], indirect=True)
def test_it_keeps_no_weights_alive(engine: InProcess, family: str) -> None:
    for seed in (1, 2):
        weights = weights_of(other(family, seed))
        engine.load(weights)
        watched = {name: weakref.ref(tensor) for name, tensor in weights.items()}
        del weights
        assert not [name for name, tensor in watched.items() if tensor() is not None], f"after update {seed}"


@pytest.mark.parametrize("family", ["served"], indirect=True)
def test_a_tied_head_may_be_named_or_not(engine: InProcess, family: str) -> None:
    for seed, named in enumerate((True, False, False, True), 1):
        model = other(family, seed)
        weights = weights_of(model)
        assert weights.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
        if not named:
            del weights["lm_head.weight"]
        engine.load(weights)
        assert engine.error_of(model) < EXACT


@pytest.mark.parametrize("family", ["served-untied"], indirect=True)
def test_a_failure_on_the_way_is_made_good_by_the_next_update(engine: InProcess, family: str) -> None:
    for _ in range(2):  # the short way, and vLLM's after a failure
        broken = weights_of(other(family, 9)) | {"model.layers.1.mlp.down_proj.weight": torch.zeros(3, 3)}
        with pytest.raises(Exception):  # noqa: B017 - what vLLM's loaders raise
            engine.load(broken)
        assert _ROUTE not in vars(engine.runner.get_model())
    model = other(family, 3)
    engine.load(weights_of(model))
    assert engine.error_of(model) < EXACT


@pytest.mark.parametrize("family", ["served"], indirect=True)
def test_a_model_that_changes_weights_before_it_loads_them_takes_the_long_way(
    engine: InProcess, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine.runner.get_model()
    plain = served.load_weights
    del vars(served)[_ROUTE]  # found when the client put in its model's weights
    monkeypatch.setattr(served, "load_weights", lambda weights: plain((name, w.clone()) for name, w in weights))
    for seed in (1, 2):
        model = other(family, seed)
        engine.load(weights_of(model))
        assert vars(served)[_ROUTE] is None
        assert engine.error_of(model) < EXACT
    monkeypatch.setattr(
        served, "load_weights", lambda weights: plain(pair for pair in weights if pair[0] != "model.norm.weight")
    )
    engine.load(weights_of(model))
    assert vars(served)[_ROUTE] is None, "a weight that no loader took"


def test_with_adapters_the_base_takes_the_short_way(in_process: None, tmp_path: Path) -> None:
    engine = InProcess(build("served"), tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8)
    for seed in (1, 2):
        engine.load(weights_of(other("served", seed)))
        assert vars(engine.runner.get_model())[_ROUTE] is not None
