"""Which architectures of transformers train: each as a tiny random model with its stock config, only smaller.

Each samples, trains two steps, resumes after the first one bit for bit, and is exported and read again: in float32 and
bfloat16, all weights and an adapter.

    python bench/models.py                       # all, into bench/results/models.json and the table of docs/models.md
    python bench/models.py llama mamba           # prints these
    python bench/models.py llama mamba --write   # and replaces their rows
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULT, PAGE = HERE / "results" / "models.json", HERE.parent / "docs" / "models.md"
Row = dict[str, Any]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3": {},
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "stablelm": {},
    "starcoder2": {},
    "smollm3": {"num_hidden_layers": 4},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "granitemoe": {"num_local_experts": 4},
    "cohere": {},
    "cohere2": {"num_hidden_layers": 4},
    "glm4": {},
    "ernie4_5": {},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "head_dim": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "falcon_mamba": {"state_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "rwkv": {"num_hidden_layers": 7, "attention_hidden_size": 32, "context_length": 256},
}  # fmt: skip
"""Sizes of each architecture, by its ``model_type``, beside those that :func:`small_config` shrinks."""

WAYS = [(dtype, lora) for dtype in ("float32", "bfloat16") for lora in (False, True)]
FARTHEST = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest difference of log-probs between sampler and trainer, before the first update."""


def small_config(kind: str, tokenizer: Any) -> Any:
    """The stock config of ``kind`` with small sizes and the ids of ``tokenizer``."""
    from transformers import AutoConfig

    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    stock, heads = AutoConfig.for_model(kind), 4
    if hasattr(stock, "text_config"):
        text = small_config(stock.text_config.model_type, tokenizer)
        eyes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        eyes |= {"image_size": 28, "patch_size": 14}
        return type(stock)(text_config=text, vision_config=stock.vision_config.to_dict() | eyes, **ids)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": heads, "max_position_embeddings": 256,
    }  # fmt: skip
    sizes = {name: size for name, size in sizes.items() if hasattr(stock, name)}
    shared = getattr(stock, "num_key_value_heads", None)
    if shared is not None:
        sizes["num_key_value_heads"] = heads if shared == stock.num_attention_heads else min(shared, 2)
    if stock.to_dict().get("head_dim"):
        sizes["head_dim"] = 8
    return AutoConfig.for_model(kind, **{**sizes, **ids, **ARCHITECTURES[kind]})


def save_small(kind: str, folder: Path) -> None:
    """Write a random model of ``kind``, and a tokenizer, to ``folder``."""
    from transformers import AutoModelForCausalLM

    from turnwise.tasks.tiny import build_tokenizer

    tokenizer = build_tokenizer(["hello world 0123456789"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config(kind, tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def try_architecture(kind: str, folder: Path, ways: Iterable[tuple[str, bool]] = WAYS) -> Row:
    """Try a model of ``kind`` in all ``ways``, and return its row of the table."""
    save_small(kind, folder / "model")
    row: Row = {"model_type": kind}
    for dtype, lora in ways:
        how = f"{dtype}, {'adapter' if lora else 'full'}"
        row |= {"ways": {**row.get("ways", {}), how: "trains"}}
        try:
            row |= _facts(folder / "model") if "rows" not in row else {}
            _try(folder, dtype, lora)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip().splitlines()
            refused = type(error).__name__ == "ConfigError"
            row["ways"][how] = f"refused: {str(error).splitlines()[0]}" if refused else text[0]
            logging.debug("%s", traceback.format_exc())
    return row


def _facts(path: Path) -> Row:
    """What a model of ``path`` is, in float32."""
    import turnwise as tw
    from turnwise.run.models import ask_models

    config = tw.TrainConfig(policies={"solver": {"path": str(path)}})
    [asked] = ask_models(config, lambda: (None, None))
    facts = asked.facts
    return {
        "kind": facts.kind,
        "rows": "padded" if facts.reason_padded else "packed" if facts.reason_unshared else "packed, shared prefixes",
        "logprobs": "logits" if facts.reason_unfused else "hidden states",
        "sampled": "whole passes" if asked.why_uncached else "with a cache",
        "context": facts.context_length,
        "drops": dict(facts.drops),
        "why": {"padded": facts.reason_padded, "logits": facts.reason_unfused, "uncached": asked.why_uncached},
    }


def _try(folder: Path, dtype: str, lora: bool) -> None:
    import turnwise as tw
    from turnwise.inference import TransformersClient
    from turnwise.run.models import ask_models
    from turnwise.train import attach_adapters, build_policies
    from turnwise.train.model.export import export_policies
    from turnwise.train.model.loading import load_models

    policies = {"solver": {"path": str(folder / "model"), "dtype": dtype, **({"lora": {"rank": 4}} if lora else {})}}
    place = folder / f"{dtype} {lora}"

    def trained(name: str, *steps: int) -> tuple[Any, Any, Any]:
        for count in steps:
            settings = {"policies": policies, "steps": count, "update": {"lr": 1e-2}, "checkpoint": {"every": 1}}
            config = tw.TrainConfig(run_dir=place / name, **settings)
            ask_models(config, lambda: (None, None))
            models = attach_adapters(load_models(config.policies, lambda: (None, None)), config.policies, seed=0)
            tokenizer = _tokenizer(folder / "model")
            arena = tw.Arena(TransformersClient(models, tokenizer), tokenizer, credit=tw.GRPOCredit())
            arena.add_actor(tw.Actor("solver", policy="solver", max_tokens=8))
            arena.add_episode(_digits())
            arena.source = lambda: [
                tw.EpisodeRequest("digits", "hello" * n, group_id=n) for n in (1, 2) for _ in "four"
            ]
            built = build_policies(config, models)
            asyncio.run(tw.Trainer(arena, built, config).run())
            asyncio.run(arena.client.close())
        return config, built, tokenizer

    config, built, tokenizer = trained("whole", 2)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    off = lines[0]["solver/sampler_trainer_logprob_max_diff"]
    assert off < FARTHEST[dtype], f"sampler and trainer differ by {off:.2g}"
    assert all(line["solver/grad_norm"] > 0 for line in lines), "no gradient"
    _, resumed, _ = trained("parts", 1, 2)
    assert resumed["solver"].fingerprint() == built["solver"].fingerprint(), "a resumed run has other bits"
    export_policies(built, tokenizer, config.run_dir, own_bases=False)
    _compare_export(built["solver"].model, config.run_dir / "policies" / "solver", dtype, lora)


def _compare_export(model: Any, folder: Path, dtype: str, lora: bool) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(7)[None] * 31 % 250
    kind = getattr(torch, dtype)
    read = AutoModelForCausalLM.from_pretrained(folder / "merged" if lora else folder, dtype=kind).eval()
    with torch.no_grad():
        got, want = (each.eval()(input_ids=ids, use_cache=False).logits.float() for each in (read, model))
    off = float((got - want).norm() / want.norm())
    assert off < (1e-4 if dtype == "float32" else 5e-2), f"the exported model computes something else, by {off:.2g}"


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _digits() -> Any:
    import turnwise as tw

    class Digits(tw.SingleTurnEpisode):
        episode_type = "digits"
        rubric = tw.Rubric([lambda completion: float(sum(map(ord, completion)) % 7)])

        def get_prompt(self, artifact: str) -> str:
            return artifact

    return Digits()


def text_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table of docs/models.md: model types that behave alike share a line."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        ways = row["ways"]
        good = [way for way, told in ways.items() if told == "trains"]
        told = "all" if len(good) == len(ways) else "; ".join(dict.fromkeys(t for t in ways.values() if t != "trains"))
        cells = (row.get("rows", ""), row.get("logprobs", ""), row.get("sampled", ""), told)
        alike.setdefault(cells, []).append(f"`{row['model_type']}`")
    lines = ["| `model_type` | rows | log-probs from | sampled here | trains |", "|---|---|---|---|---|"]
    lines += [f"| {', '.join(types)} | {' | '.join(cells)} |" for cells, types in alike.items()]
    return "\n".join(lines) + "\n"


MARKS = "<!-- bench/models.py writes this table -->\n", "<!-- end of the table -->\n"


def write_page(page: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return ``page`` with the table of ``rows`` between its marks."""
    first, last = MARKS
    before, _, rest = page.partition(first)
    assert rest, f"expected {first!r} in the page"
    return f"{before}{first}\n{text_of(rows)}\n{last}{rest.partition(last)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="by default all, whose table is written")
    parser.add_argument("--write", action="store_true", help="replace the rows of these model_types")
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    rows: dict[str, Row] = {}
    if options.model_types and RESULT.is_file():
        rows = {row["model_type"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))}
    for kind in options.model_types or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            rows[kind] = try_architecture(kind, Path(folder))
        print(json.dumps(rows[kind]), flush=True)
    if options.write or not options.model_types:
        ordered = [rows[kind] for kind in ARCHITECTURES if kind in rows]
        RESULT.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), ordered), encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE)]
    main()
