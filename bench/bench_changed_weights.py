"""How much of the weights an optimizer step changes, and whether sending only that would pay.

SmolLM2-135M-Instruct (``make model``) takes AdamW steps at the rates of RL on policy gradients of random advantages
over a text. After each step the bench compares what would be sent with what was sent before:

    "float32"            float32 weights as they are
    "bfloat16 copy"      the bfloat16 copy of float32 master weights, which ``dtype = "bfloat16"`` sends
    "pure bfloat16"      weights that are bfloat16 alone, and round each update away or up

"changed" is the share of values whose bits differ, "4 KiB" to "1 MiB" the share of blocks of that many bytes with at
least one. A patch of blocks sends these shares. A patch of values would send a position (2 bytes, the distance to the
last one) and the value. The second table times, on the last bfloat16 copy, what a patch costs beside a plain copy:
the comparison by blocks, that by values with the gathering of the patch, and the receiver's side. Both sides hold a
copy of what was sent last: the sender one of the bytes that it sends (the transfers of turnwise have that block
anyway, but must write the next weights beside it), the receiver one more.

    python bench/bench_changed_weights.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import arguments, finish
from torch import Tensor

MODEL = Path(__file__).parent.parent / "models" / "smollm2-135m"
BLOCKS = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20}
RATES = (1e-6, 1e-5)
ROWS, TOKENS = 4, 32
NETWORKS = (1, 10, 100)
"""Gbit/s."""


def joined(parameters: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the bytes of all ``parameters`` as ``dtype``, one after the other: uint8 ``[bytes]``."""
    return torch.cat([each.detach().to(dtype).reshape(-1) for each in parameters]).view(torch.uint8)


def changed_blocks(new: Tensor, old: Tensor, size: int) -> Tensor:
    """Return which blocks of ``size`` bytes differ: bool ``[blocks]``. The last block may be shorter."""
    whole = len(new) // size * size
    words = (new[:whole].view(torch.int64) != old[:whole].view(torch.int64)).view(-1, size // 8).any(1)
    rest = torch.equal(new[whole:], old[whole:])
    return torch.cat([words, torch.tensor([not rest])]) if whole < len(new) else words


def shares(new: Tensor, old: Tensor, value: torch.dtype) -> dict[str, float]:
    differs = new.view(value) != old.view(value)
    return {
        "changed": differs.float().mean().item(),
        **{name: changed_blocks(new, old, size).float().mean().item() for name, size in BLOCKS.items()},
    }


def loaded(dtype: torch.dtype, quick: bool) -> tuple[Any, Tensor]:
    """Return the model and the tokens of a text; with ``quick`` a small random one, and random tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if quick:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = AutoConfig.for_model("llama", vocab_size=500, num_key_value_heads=1, **sizes)
        return AutoModelForCausalLM.from_config(config).to(dtype), torch.randint(500, (1000,))
    text = (Path(__file__).parent.parent / "docs" / "concepts.md").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(text).input_ids)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype), ids


def train(rate: float, dtype: torch.dtype, steps: int, quick: bool) -> tuple[list[dict[str, Any]], Tensor, Tensor]:
    """Return a row for each step, and the last two sets of bytes in bfloat16."""
    torch.manual_seed(0)
    model, ids = loaded(dtype, quick)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    kinds = {"pure bfloat16": (torch.bfloat16, torch.int16)}
    if dtype == torch.float32:
        kinds = {
            "turnwise, float32": (torch.float32, torch.int32),
            "turnwise, bfloat16 copy": (torch.bfloat16, torch.int16),
        }
    before = {kind: joined(parameters, sent) for kind, (sent, _) in kinds.items()}
    rows, pair = [], (torch.empty(0), torch.empty(0))
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - TOKENS, (ROWS,))
        batch = torch.stack([ids[start : start + TOKENS] for start in starts])
        logprobs = model(batch).logits[:, :-1].float().log_softmax(-1).gather(2, batch[:, 1:, None])[..., 0]
        loss = -(torch.randn(ROWS, 1) * logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        for kind, (sent, value) in kinds.items():
            now = joined(parameters, sent)
            rows.append({"method": kind, "rate": f"{rate:g}", "step": step, **shares(now, before[kind], value)})
            pair = (now, before[kind]) if not kind.endswith("float32") else pair
            before[kind] = now
    return rows, *pair


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the steps of each kind and rate: the first, whose updates are all as large as the rate, and the others."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["method"], row["rate"], "1" if row["step"] == 1 else "later"), []).append(row)
    return [
        {"method": kind, "rate": rate, "steps": steps}
        | {name: f"{statistics.mean(row[name] for row in group):.3%}" for name in ("changed", *BLOCKS)}
        for (kind, rate, steps), group in found.items()
    ]


def timed(call: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def costs(new: Tensor, old: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Time what a patch costs, and compute when it is sent sooner than the whole."""
    values, former, target = new.view(torch.int16), old.view(torch.int16), torch.empty_like(new)
    at = (values != former).nonzero()[:, 0]
    patch = values[at]
    bytes_of_patch = len(at) * 4
    receiver = former.clone()
    receiver[at] = patch
    if not torch.equal(receiver, values):
        raise SystemExit("the patch gives other weights")
    times = {
        "copy of all": timed(lambda: target.copy_(new), rounds),
        "comparison by blocks of 64 KiB": timed(lambda: changed_blocks(new, old, 2**16), rounds),
        "patch of values, sender": timed(lambda: values[(values != former).nonzero()[:, 0]], rounds),
        "patch of values, receiver": timed(lambda: receiver.index_put_((at,), patch), rounds),
    }
    rows = [
        {"method": name, "MB": new.nbytes / 1e6, "ms": seconds * 1e3, "× copy": seconds / times["copy of all"]}
        for name, seconds in times.items()
    ]
    extra = times["patch of values, sender"] + times["patch of values, receiver"]
    for gbit in NETWORKS:
        whole, part = new.nbytes * 8 / gbit / 1e9, bytes_of_patch * 8 / gbit / 1e9 + extra
        rows.append({"method": f"all at {gbit} Gbit/s, by the formula", "MB": new.nbytes / 1e6, "ms": whole * 1e3})
        rows.append({"method": f"patch of values at {gbit} Gbit/s", "MB": bytes_of_patch / 1e6, "ms": part * 1e3})
    return rows


def main() -> None:
    options = arguments(__doc__, {"steps": 5})
    if options.quick:
        options.steps, options.rounds = 2, 2
    elif not MODEL.exists():
        raise SystemExit(f"without {MODEL}: make model")
    rows: list[dict[str, Any]] = []
    pair = (torch.empty(0), torch.empty(0))
    for dtype in (torch.bfloat16, torch.float32):
        for rate in RATES[:1] if options.quick else RATES:
            more, *pair = train(rate, dtype, options.steps, options.quick)  # type: ignore[assignment]
            rows += more
    finish("changed_weights", "What a step changes", means(rows), options)
    finish("changed_weights", f"What a patch costs (rate {RATES[-1]:g})", costs(*pair, options.rounds), options)


if __name__ == "__main__":
    main()
