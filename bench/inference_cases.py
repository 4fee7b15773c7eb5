"""Models, workloads and clients for ``bench_inference.py``. Every client gets the same requests."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from timing import give_back_freed_memory
from torch import Tensor, nn
from train_cases import Case, make_model

from turnwise.inference.local import decode
from turnwise.inference.local.kv_cache import SharedPrefix
from turnwise.inference.scripted import ByteTokenizer
from turnwise.run.clients import KINDS
from turnwise.train.validate import config_from_dict
from turnwise.types import ModelRequest, ModelResponse, Sampling

PLAIN = "Hugging Face generate"
ALPHABET = 250  # tokens of a prompt are drawn from 0..249, which every vocabulary here has
TEMPERATURE = 1.0
ROWS = 256  # completions at a time


class Endless(ByteTokenizer):
    """A tokenizer without an end token, so that every method samples the same number of tokens."""

    eos_token_id: int | None = None  # type: ignore[assignment]


class Size(NamedTuple):
    """Sizes of the workloads. "flat" has ``rows`` × ``tokens`` from short prompts, all at once. "tree" has ``trees`` of
    ``turns`` turns, at each of which ``siblings`` answer one prompt with ``answer`` tokens; the first prompt has
    ``prompt`` tokens, and each next one is longer."""

    rows: int = 256
    tokens: int = 64
    trees: int = 4
    turns: int = 4
    siblings: int = 8
    prompt: int = 512
    answer: int = 16


SIZE, QUICK = Size(), Size(rows=8, tokens=8, trees=1, turns=2, siblings=2, prompt=64, answer=4)
Turns = list[list[ModelRequest]]
"""Lists of requests; the requests of one list are sent together, once all of the last list are answered."""


def flat(size: Size, seed: int) -> Turns:
    rng = np.random.default_rng(seed)
    return [[request(rng.integers(0, ALPHABET, 32), size.tokens, seed * size.rows + i) for i in range(size.rows)]]


def tree(size: Size, seed: int) -> Turns:
    """Build prompts that each extend the last one by an answer and the environment's reply.

    Both are random tokens, not sampled answers, so that all methods get the same requests."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, ALPHABET, size.prompt) for _ in range(size.trees)]
    turns: Turns = []
    for _ in range(size.turns):
        turns.append([request(p, size.answer, int(rng.integers(2**31))) for p in prompts for _ in range(size.siblings)])
        prompts = [np.concatenate([p, rng.integers(0, ALPHABET, size.answer + 16)]) for p in prompts]
    return turns


WORKLOADS = {"flat": flat, "tree": tree}


def request(prompt: np.ndarray, tokens: int, seed: int) -> ModelRequest:
    return ModelRequest(prompt.tolist(), Sampling(temperature=TEMPERATURE, max_tokens=tokens, seed=seed))


def first_token(size: Size, seed: int) -> Turns:
    """Build one request for one token, after a new prompt."""
    return [[request(np.random.default_rng(seed).integers(0, ALPHABET, size.prompt), 1, seed)]]


# ---------------------------------------------------------------------------------------------------------------------
# Clients
# ---------------------------------------------------------------------------------------------------------------------
class PlainGenerate:
    """Calls ``model.generate`` on the whole list at once, with the log-probabilities that training needs. The prompts
    of a list have one length here, so nothing is padded."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model)

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        prompts = torch.tensor([list(r.prompt_token_ids) for r in requests], device=self.model.device)
        with torch.no_grad():
            out = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=requests[0].sampling.max_tokens,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            logprobs = self.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        ids = out.sequences[:, prompts.shape[1] :].tolist()
        return [
            ModelResponse("", row, told, "length", [(len(row), 0)], list(r.prompt_token_ids))
            for r, row, told in zip(requests, ids, logprobs.tolist(), strict=True)
        ]

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.model.load_state_dict(dict(weights), strict=False)  # a tied head comes once

    async def close(self) -> None:
        """Free nothing."""


class WithoutKernel:
    """The client ``transformers`` with PyTorch's attention on a CPU too, in place of the C++ kernel for decoding."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.load_weights, self.close = client.load_weights, client.close

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        with mock.patch.object(decode, "make_decoder", lambda *prefilled: SharedPrefix(*prefilled[:4])):
            return await self.client.generate(requests)


def methods(model: Any, kinds: Sequence[str], kv_cache_gb: float) -> dict[str, Any]:
    """Return the methods that answer requests with ``model``: ``generate`` itself, the clients of ``kinds`` that are
    available, ``transformers`` also without its kernel on a CPU, and ``vllm`` also without its prefix cache. Print a
    line for each one left out."""
    made: dict[str, Any] = {PLAIN: PlainGenerate(model)}
    for kind in kinds:
        _add(made, f"turnwise {kind}", kind, model, {"kv_cache_gb": kv_cache_gb})
    if "turnwise transformers" in made and model.device.type == "cpu":
        made["turnwise transformers, without kernel"] = WithoutKernel(made["turnwise transformers"])
    if "turnwise vllm" in made:
        vllm = {"kv_cache_gb": kv_cache_gb, "engine_args": {"enable_prefix_caching": False}}
        _add(made, "turnwise vllm, no prefix cache", "vllm", model, vllm)
    return made


def _add(made: dict[str, Any], name: str, kind: str, model: nn.Module, vllm: Mapping[str, Any]) -> None:
    rollout = {"client": kind, "max_batch_rows": ROWS, "vllm": vllm}
    config = config_from_dict({"run_dir": tempfile.mkdtemp(prefix="turnwise-bench-"), "rollout": rollout})
    try:
        KINDS[kind].check(config)
        made[name] = KINDS[kind].build(
            config, Endless(), {"default": copy.deepcopy(model)}
        )  # syncs change the client's
    except (ImportError, ValueError) as error:
        print(f"without {name}: {error}")


def make(name: str, device: str) -> Any:
    """Build the model of that name with random weights: float32 on a CPU, bfloat16 on a GPU."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    model: Any = make_model(Case(name, 0, dtype, False)).model.to(device).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # vLLM would end completions there
    return model


def moved(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return two sets of weights to send in turn, with tied tensors once, as the trainer sends them."""
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    plain = {name: tensor.detach() for name, tensor in once.values()}
    generator = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(t.shape, generator=generator).to(t) * 0.02 * t.std() for n, t in plain.items()}
    return [{name: tensor + noise[name] for name, tensor in plain.items()}, plain]


def teacher_forced(model: Any, response: ModelResponse) -> Tensor:
    """Return log-probabilities of the completion's tokens from one forward pass, in float32 ``[C]``."""
    ids = torch.tensor([response.prompt_token_ids + response.completion_token_ids], device=model.device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float() / TEMPERATURE
    start = len(response.prompt_token_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].cpu()


def resident() -> int | None:
    """Return the memory in bytes of this process and its descendants; ``None`` without ``/proc``.

    Returns this process's freed memory to the kernel first, because a leak could hide in it.
    """
    if not Path("/proc/self/status").exists():
        return None
    give_back_freed_memory()
    sizes, parents = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:  # it has ended
            continue
        parents[int(fields["Pid"])] = int(fields["PPid"])
        sizes[int(fields["Pid"])] = int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    own = int(Path("/proc/self").resolve().name)
    return sum(size for pid, size in sizes.items() if own in _line(pid, parents))


def _line(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Return ``pid`` and its ancestors."""
    line = [pid]
    while parents.get(line[-1]):
        line.append(parents[line[-1]])
    return line
