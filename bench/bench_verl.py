"""verl's actor update with its own loss and with turnwise's: tokens per second of ``TrainingWorker.train_batch``.

One process and one optimizer step of two micro-batches, at verl's defaults but for the settings that a CPU needs, which
are those of ``tests/integrations/verl``. Before it times, the bench compares the gradient norms. Needs the environment
of ``make test-verl``:

    .venv-verl/bin/python bench/bench_verl.py --threads 1
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import arguments, finish, medians

TESTS = Path(__file__).resolve().parents[1] / "tests" / "integrations" / "verl"
SIZES = {
    "vocabulary 4k": {"vocab_size": 4_096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4},
    "vocabulary 32k": {"vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4},
}
QUICK = {"vocabulary 512": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}}
ROWS, PROMPT, RESPONSE = 8, 32, 128


def prepare(device: str) -> None:
    """Set what verl reads when it is imported."""
    sys.path[:0] = [str(TESTS), str(TESTS / "modules")]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if device == "cpu":
        os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu"}


def updates(size: dict[str, int], response: int, device: str, folder: Path) -> dict[str, Callable[[], float]]:
    """Return the methods: each makes one optimizer step and returns the norm of its gradient."""
    from helpers import settings, write_inputs
    from omegaconf import open_dict
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine.fsdp import transformer_impl as engine
    from verl.workers.utils.losses import ppo_loss
    from verl_on_cpu.worker import make_worker, rows

    theirs = engine.logprobs_from_logits
    from turnwise.integrations.verl.logprobs import logprobs_from_logits as ours

    write_inputs(folder, **size, max_position_embeddings=PROMPT + response)
    chosen = settings(folder) | {"actor_rollout_ref.actor.optim.lr": 0.0, "trainer.device": device}
    worker, actor = make_worker([f"{key}={value}" for key, value in chosen.items()])

    def method(mode: str, logprobs: Any) -> Callable[[], float]:
        with open_dict(actor):
            actor.policy_loss.loss_mode = mode
        loss = partial(ppo_loss, config=omega_conf_to_dataclass(actor))

        def update() -> float:
            engine.logprobs_from_logits = logprobs
            worker.set_loss_fn(loss)
            batch = rows(0, 1, count=ROWS, prompt=PROMPT, response=response, entropy=False)
            return tu.get(worker.train_batch(batch), "metrics")["grad_norm"]

        return update

    return {
        "verl": method("vanilla", theirs),
        "turnwise_vanilla": method("turnwise_vanilla", theirs),
        "turnwise_vanilla, logprobs": method("turnwise_vanilla", ours),
    }


def main() -> None:
    options = arguments(__doc__, size=list(SIZES))
    if importlib.util.find_spec("transfer_queue") is None:
        print("without verl's trainer: run this bench with the Python of `make test-verl`'s environment")
        return
    prepare(options.device)
    from verl_on_cpu.worker import rows

    sizes, response = (QUICK, 16) if options.quick else ({name: SIZES[name] for name in options.size}, RESPONSE)
    tokens = int(rows(0, 1, count=ROWS, prompt=PROMPT, response=response, entropy=False)["input_ids"].values().numel())
    table: list[dict[str, Any]] = []
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            methods = updates(size, response, options.device, Path(folder))
            norms = {method: update() for method, update in methods.items()}
            for method, norm in norms.items():
                # verl rounds log-probabilities to bfloat16 where flash-attn is missing; turnwise's keep float32.
                most = 3e-2 if "logprobs" in method else 1e-4
                assert abs(norm / norms["verl"] - 1) < most, f"{method}: gradient norm {norm}, verl's {norms['verl']}"
            seconds = medians(methods, options.rounds, device=options.device)
        for method in methods:
            ratio = seconds["verl"] / seconds[method]
            row = {"tokens/s": tokens / seconds[method], "ms": seconds[method] * 1e3, "× verl": ratio}
            table.append({"case": name, "method": method, **row})
    finish("verl", f"actor update of verl, {tokens} tokens", table, options)


if __name__ == "__main__":
    main()
