"""Constrained decoding: the cost of sampling under a JSON schema beside plain sampling of as many tokens.

Both methods take turns with the same prompts and seeds, on one client, and every row gets all its tokens: the schema's
list is longer than the completion, and plain rows have no end. It verifies before it times: constrained completions are
beginnings of the schema's JSON, and the log-probabilities of forced tokens are 0. The figure is the process's CPU time,
as other programs may share the machine. "tiny" is the model of the shipped tasks, "smollm2" the folder of `make model`.

    python bench/bench_constrained.py
    python bench/bench_constrained.py --model tiny --rows 64
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from common import arguments, finish
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.chat import ChatFormat
from turnwise.chat.grammar import check_grammar, json_grammar
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.types import Grammar, ModelRequest, ModelResponse, Sampling

FOLDER = Path(__file__).parents[1] / "models" / "smollm2-135m"
MOST = {"tiny": 10.0, "smollm2": 3.0}
"""Goals: percent of the plain sampling's time."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 500}


def load(name: str) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    if name == "smollm2":
        return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto"), AutoTokenizer.from_pretrained(FOLDER)
    tokenizer = build_tokenizer(["List persons as JSON."])
    return build_model(tokenizer, max_position_embeddings=1024), tokenizer


async def sampled(
    client: TransformersClient, prompt: list[int], options: argparse.Namespace, seed: int, grammar: Grammar | None
) -> tuple[list[ModelResponse], float]:
    """Return the responses, and the CPU seconds that they took."""
    sampling = Sampling(max_tokens=options.tokens, grammar=grammar)
    requests = [ModelRequest(prompt, sampling.with_(seed=seed + row)) for row in range(options.rows)]
    start = time.process_time()
    responses = await client.generate(requests)
    seconds = time.process_time() - start
    assert [len(response.completion_token_ids) for response in responses] == [options.tokens] * options.rows
    return responses, seconds


async def measure(name: str, options: argparse.Namespace) -> None:
    model, tokenizer = load(name)
    format = ChatFormat(tokenizer)
    prompt = format.prompt_ids([{"role": "user", "content": "List persons as JSON."}])
    grammar = json_grammar(format, SCHEMA)
    start = time.process_time()
    check_grammar(format.tokenizer, grammar)
    compiling = time.process_time() - start
    tokenizer.eos_token, model.generation_config.eos_token_id = None, None  # plain rows must not end
    seconds: dict[str, list[float]] = {"plain": [], "constrained": []}
    async with TransformersClient(model.to(options.device), tokenizer, share=True) as client:
        responses, _ = await sampled(client, prompt, options, 0, grammar)
        begins = '[{"name": "'
        assert all(response.text[: len(begins)] == begins[: len(response.text)] != "" for response in responses)
        assert all(response.logprobs[0] == 0 for response in responses)
        await sampled(client, prompt, options, 0, None)
        for turn in range(1, options.rounds + 1):
            for method, form in (("plain", None), ("constrained", grammar)):
                _, took = await sampled(client, prompt, options, turn * options.rows, form)
                seconds[method].append(took)
    plain, constrained = (statistics.median(seconds[method]) for method in ("plain", "constrained"))
    cost = statistics.median(
        100 * (after / before - 1) for before, after in zip(seconds["plain"], seconds["constrained"], strict=True)
    )
    row = {
        "method": "turnwise", "model": name, "vocabulary": len(tokenizer), "rows": options.rows,
        "tokens": options.tokens,
        "plain s": plain, "constrained s": constrained, "cost %": cost, "wanted": f"<= {MOST[name]:g}",
        "met": "yes" if cost <= MOST[name] else "NO", "first compilation s": compiling,
    }  # fmt: skip
    finish("constrained", f"Constrained decoding, {name}", [row], options)


def main() -> None:
    options = arguments(__doc__, {"rows": 32, "tokens": 64}, model=tuple(MOST))
    if options.quick:
        options.model, options.rows, options.tokens, options.rounds = ["tiny"], 4, 8, 2
    if not FOLDER.exists() and "smollm2" in options.model:
        print(f"smollm2 is left out: `make model` writes {FOLDER}")
        options.model.remove("smollm2")
    for name in options.model:
        asyncio.run(measure(name, options))


if __name__ == "__main__":
    main()
