"""A rollout of verl that samples with transformers in a Ray actor, and records what it sampled.

``VERL_ON_CPU_FOLDER`` names a folder. What is sampled goes to its ``sampled.json``, and the weights after each step to
``weights-<step>.pt``. If ``VERL_ON_CPU_REPLAYED`` names the folder of another run, the server waits for the end of that
run, and replays what it sampled.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

NAME = "transformers_server_0"
LAST = "weights-2.pt"
"""Written after the last step."""
MAX_TOKENS = 8


@ray.remote(num_cpus=0, num_gpus=0)
class Server:
    def __init__(self, path: str, folder: str, replayed: str | None) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.step, self.file = 0, Path(folder) / "sampled.json"
        self.replayed = replayed and Path(replayed)
        self.samples: dict[str, list[Any]] = defaultdict(list)

    def address(self) -> str:
        return "transformers:0"

    def load(self, weights: dict[str, torch.Tensor], step: int) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.step = step
        torch.save(weights, self.file.with_name(f"weights-{step}.pt"))

    async def wake_up(self) -> None: ...
    async def sleep(self) -> None: ...
    async def abort_all_requests(self, reject_request: bool = False) -> None: ...
    async def resume_generation(self) -> None: ...
    async def clear_kv_cache(self) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        key = f"{self.step} {list(prompt_ids)}"
        if self.replayed:
            while not (self.replayed / LAST).exists():
                await asyncio.sleep(0.1)
            if not self.samples:
                self.samples.update(json.loads((self.replayed / "sampled.json").read_text()))
            tokens, logprobs = self.samples[key].pop(0)
        else:
            tokens, logprobs = self.sample(list(prompt_ids))
            self.samples[key].append((tokens, logprobs))
            self.file.write_text(json.dumps(self.samples))
        return TokenOutput(
            token_ids=tokens, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self.step}
        )

    @torch.no_grad()
    def sample(self, ids: list[int]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < MAX_TOKENS:
            scores = self.model(torch.tensor([ids + tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(torch.multinomial(scores.exp(), 1)))
            logprobs.append(float(scores[tokens[-1]]))
            if tokens[-1] == self.model.config.eos_token_id:
                break
        return tokens, logprobs


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        server = Server.options(name=NAME, max_concurrency=64).remote(
            self.model_config.path, os.environ["VERL_ON_CPU_FOLDER"], os.environ.get("VERL_ON_CPU_REPLAYED")
        )
        self.servers, self._server_handle = [server], server
        self._server_address = await server.address.remote()


class Adapter(BaseRollout):
    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, **options: Any) -> None:
        whole = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().float().cpu().clone()
            for name, value in weights
        }
        await ray.get_actor(NAME).load.remote(whole, options.get("global_steps") or 0)
