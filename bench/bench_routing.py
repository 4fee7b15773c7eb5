"""Routing replay: the log-probabilities of sampler and trainer of a mixture of experts, without and with replay.

A small random Qwen3-MoE and DeepSeek-V3 of 32 experts, 4 of them per token, sample completions: in transformers
(``TransformersClient``) and in vLLM. The trainer's pass computes their log-probabilities, with its own choice of
experts and with the recorded one. "other experts" is the share of choices, one for each token and layer, in which the
trainer's own differs from the sampler's. "max" and "mean" are the differences over all tokens in nats, "max" as in the
metric ``sampler_trainer_logprob_max_diff``.

"vllm" is a server of ``VLLMClient``, to which the weights are sent, as in a run. vLLM's CPU build doesn't return its
experts. So "vllm, watched" reads them off the routers of an engine in this process, which samples one row after the
other; no run does so. Both need vLLM::

    python bench/bench_routing.py
    .venv-vllm/bin/python bench/bench_routing.py --sampler vllm "vllm, watched"
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, finish
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.inference import TransformersClient, VLLMClient
from turnwise.inference.common.routed_experts import recording, watch_routers
from turnwise.samples.pack import pack as pack_samples
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import pack
from turnwise.train.terms.columns.routing_replay import NAME, ExpertsToReplay, StreamExperts
from turnwise.types import ModelRequest, ModelResponse, RoutedExperts, Sample, Sampling, StepFacts

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "num_experts_per_tok": 4,
    "initializer_range": 0.1, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "head_dim": 32},
    "deepseek_v3": {
        "n_routed_experts": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 64,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
"""Sizes that vLLM's CPU kernels take: of latent attention 512 and 64."""
DTYPES = ("float32", "bfloat16")


Requests = Sequence[ModelRequest]


def build(kind: str, dtype: str, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind], **ids, "eos_token_id": tokenizer.eos_token_id})
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def sampled_by_transformers(model: Any, tokenizer: Any, requests: Requests) -> list[ModelResponse]:
    return asyncio.run(_answers(TransformersClient(model, tokenizer, routed_experts=True), requests))


def sampled_by_a_server(model: Any, tokenizer: Any, requests: Requests) -> list[ModelResponse]:
    return asyncio.run(_answers(VLLMClient(model, tokenizer, kv_cache_gb=2**-3, max_num_seqs=32), requests))


async def _answers(client: Any, requests: Requests) -> list[ModelResponse]:
    async with client:
        return await client.generate(requests)


def sampled_by_vllm(model: Any, tokenizer: Any, requests: Requests) -> list[ModelResponse]:
    """Sample one request after the other, with the options of turnwise's servers."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    seen: dict[int, list[np.ndarray]] = {}

    def watch(module: Any) -> None:
        for runner in module.modules():
            if isinstance(runner, MoERunner):
                keep = seen.setdefault(runner.layer_id, []).append
                runner.router.set_capture_fn(lambda ids, keep=keep: keep(ids.cpu().numpy().astype(np.uint8)))

    responses = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = LLM(
            folder, dtype=str(model.dtype).removeprefix("torch."), max_num_seqs=1, max_model_len=256, block_size=32,
            enforce_eager=True, enable_chunked_prefill=False, enable_prefix_caching=False, kv_cache_memory_bytes=2**26,
            logprobs_mode="processed_logprobs", compilation_config={"custom_ops": ["-rotary_embedding"]},
        )  # fmt: skip
    engine.apply_model(watch)
    layers = model.config.num_hidden_layers
    for request in requests:
        for each in seen.values():
            each.clear()
        prompt, sampling = list(request.prompt_token_ids), request.sampling
        params = SamplingParams(
            temperature=1.0, max_tokens=sampling.max_tokens, seed=sampling.seed, logprobs=0, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        [output] = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        chosen = output.outputs[0]
        tokens = list(chosen.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, chosen.logprobs, strict=True)]
        by_layer = {layer: np.concatenate(parts) for layer, parts in seen.items()}
        blank = np.zeros_like(next(iter(by_layer.values())))
        experts = np.stack([by_layer.get(layer, blank) for layer in range(layers)], axis=1)
        assert len(experts) == len(prompt) + len(tokens) - 1, "one choice for each token but the last"
        versions = [(len(tokens), 0)]
        response = ModelResponse("", tokens, logprobs, "length", versions, prompt)
        response.routed_experts = RoutedExperts(experts)
        responses.append(response)
    del engine
    return responses


SAMPLERS = {
    "transformers": sampled_by_transformers,
    "vllm": sampled_by_a_server,
    "vllm, watched": sampled_by_vllm,
}


def measure(model: Any, responses: Sequence[ModelResponse]) -> dict[str, Any]:
    """Compare the responses with the trainer's pass over them as one packed stream."""
    samples = [
        Sample(n, "bench", "actor", 0, 0, None, f"r{n}", 0, "default", r.prompt_token_ids, r.completion_token_ids,
               r.logprobs, r.policy_versions, 0.0, 0.0, 1.0,
               facts=StepFacts(routed_experts=r.routed_experts))
        for n, r in enumerate(responses)
    ]  # fmt: skip
    forward = Forward(model, "packed")
    ExpertsToReplay().selected(None, [], samples)
    micro = pack(pack_samples(samples, {}, {}), np.arange(len(samples)))
    experts = micro.columns.get(NAME)
    row: dict[str, Any]
    if not isinstance(experts, StreamExperts):
        with torch.no_grad():
            off = (forward(micro)[0] - micro.rollout_logprobs_N).abs()
        row = {"tokens": len(off), "other experts %": None, "max": float(off.max()), "mean": float(off.mean())}
        return row | {"max, replay": None, "mean, replay": None}
    assert experts.recorded == experts.tokens, "all tokens are recorded"
    with torch.no_grad():
        without, replayed = (forward(each)[0] for each in (micro.for_another_model(), micro))
        routers = watch_routers(model)
        assert routers is not None
        forward.trims = False  # the trial records all tokens of the last layer too
        with recording(routers) as record:
            forward(micro.for_another_model())
        assert record is not None
        own = record.take().to(torch.int16)
    recorded = experts.values[:, 0, 0] >= 0
    layers = list(routers.of_layers)
    other_TL = (own.sort(-1).values != experts.values.sort(-1).values).any(-1)[:, layers] & recorded[:, None]
    row = {"tokens": len(without), "other experts %": 100 * float(other_TL[recorded].float().mean())}
    for name, logprobs in (("", without), (", replay", replayed)):
        off = (logprobs - micro.rollout_logprobs_N).abs()
        row |= {f"max{name}": float(off.max()), f"mean{name}": float(off.mean())}
    return row


def measure_case(kind: str, dtype: str, sampler: str, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer, rng = build_tokenizer(["hello world 0123456789"]), np.random.default_rng(0)
    model = build(kind, dtype, tokenizer)
    tokens = 8 if options.quick else options.tokens
    requests = [
        ModelRequest(rng.integers(3, 250, rng.integers(8, 64)).tolist(), Sampling(max_tokens=tokens, seed=seed))
        for seed in range(4 if options.quick else options.rows)
    ]
    sample = SAMPLERS[sampler]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"method": "turnwise", "model": kind, "dtype": dtype, "sampler": sampler} | measure(
            model, sample(model, tokenizer, requests)
        )


def main() -> None:
    options = arguments(
        __doc__, {"rows": 32, "tokens": 64}, model=list(MODELS), dtype=list(DTYPES), sampler=list(SAMPLERS)
    )
    if importlib.util.find_spec("vllm") is None and options.sampler != ["transformers"]:
        print("without vllm: it is not installed here")
        options.sampler = ["transformers"]
    if options.quick:
        options.sampler = ["transformers"]
    rows = [
        measure_case(kind, dtype, sampler, options)
        for sampler in options.sampler
        for kind in options.model
        for dtype in options.dtype
    ]
    for row in rows:
        least = 1e-4 if row["dtype"] == "float32" else 0.2
        off = row["max, replay"] or 0.0
        assert off < least, f"with the same experts, sampler and trainer differ by {off}"
    finish("routing", "Routing replay, sampler and trainer", rows, options)


if __name__ == "__main__":
    main()
