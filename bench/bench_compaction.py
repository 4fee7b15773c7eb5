"""Histories that are rewritten: an agent that compacts its chat three times, asks a sub-agent, and clears old results.

The agent works in four stretches. In each it makes some turns: an answer, and a result of a tool. Once per stretch it
asks a sub-agent, which has a chat of its own. In the middle of a stretch it replaces its first result by a short note,
as context editing does. At the end of the first three stretches it asks itself for a summary, and begins a new chat
with the question and that summary. Attempts share the question. turnwise's arena plays it, with a scripted model.

Every call is a row: its prompt exactly as it was sampled from, and its answer. The first table counts the tokens that a
step computes:

    "calls apart"        each call's prompt and answer
    "row per history"    calls whose prompt begins with an earlier call's tokens join it, as trainers with rows do
    "trie"               what rows share is computed once: also what rewritten histories keep, and the question

The second table times a step. The bench stops if its gradient, in float32, is not the one of each call in plain PyTorch
to 1e-4 of the norm. ``tests/train/test_forward.py`` checks the same in float64.

    python bench/bench_compaction.py
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from common import arguments, finish
from torch import nn
from train_cases import EagerForward, Trained, seconds_per_step, updates

from turnwise.arena import Arena, Episode, Rubric
from turnwise.inference.scripted import ScriptedClient
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.model.forward import Forward
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.types import Actor, EpisodeRequest, EpisodeState, ModelRequest, TrainingBatch

TOLERANCE = 1e-4
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Agent(NamedTuple):
    """An agent's sizes in tokens (characters, here), and its ``attempts`` at one question."""

    question: int
    answer: int
    result: int
    summary: int
    turns: int
    attempts: int
    compactions: int = 3
    """Summaries, each of which begins another chat."""


WHOLE, STEP, TINY = Agent(2_000, 150, 600, 500, 12, 8), Agent(200, 16, 48, 60, 6, 4), Agent(24, 3, 6, 9, 3, 2)
"""The agent whose tokens are counted, the one whose steps are timed, and one for tests."""


class CompactingAgent(Episode):
    """The episode that the module describes. Its reward is a random number, the same for equal seeds."""

    episode_type = "compacting"
    rubric = Rubric([lambda rollout: Random(rollout.id).gauss(0, 1)])

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def rollout(self, arena: Any, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state, agent, turn = EpisodeState() if state is None else state, self.agent, 0
        begin = [{"role": "user", "content": artifact}]
        chat = list(begin)
        for stretch in range(agent.compactions + 1):
            for place in range(agent.turns):
                state.turn, turn = turn, turn + 1
                answer = await self.call_model("agent", chat, arena)
                if place == agent.turns // 3:
                    task = [{"role": "user", "content": f"Look into {answer.text}"}]
                    found = await self.call_model("helper", task, arena)
                    more = [{"role": "assistant", "content": found.text}, {"role": "user", "content": "And?"}]
                    result = (await self.call_model("helper", [*task, *more], arena)).text * (
                        agent.result // agent.answer
                    )
                else:
                    result = text(agent.result, f"{answer.text} {turn}")
                chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": result}]
                if place == agent.turns // 2:  # clear the first result of this stretch
                    chat[len(begin) + 1] = {"role": "user", "content": "(cleared)"}
            if stretch < agent.compactions:
                state.turn, turn = turn, turn + 1
                summary = await self.call_model("agent", [*chat[:-1], {"role": "user", "content": "Sum up."}], arena)
                begin = [
                    {"role": "user", "content": f"{artifact}\nSo far: {summary.text * (agent.summary // agent.answer)}"}
                ]
                chat = list(begin)
        return state


def text(count: int, seed: Any) -> str:
    return "".join(Random(str(seed)).choices(LETTERS, k=count))


def play(agent: Agent) -> TrainingBatch:
    """Return the batch of all attempts at one question."""

    def reply(request: ModelRequest) -> str:
        return text(agent.answer, request.sampling.seed)

    tokenizer: Any = build_tokenizer([LETTERS])
    arena = Arena(ScriptedClient(reply, tokenizer=tokenizer), tokenizer)
    for name in ("agent", "helper"):
        arena.add_actor(Actor(name, system_prompt=f"You are the {name}.", max_tokens=agent.answer + 1))
    arena.add_episode(CompactingAgent(agent))
    arena.source = lambda: (
        [EpisodeRequest("compacting", text(agent.question, "question"), group_id="q")] * agent.attempts
    )
    return asyncio.run(arena.step())


def rows_of(batch: TrainingBatch) -> list[bytes]:
    """Return the tokens of each call, as bytes that compare alike."""
    tokens = batch.token_ids.astype(np.int32)
    return [tokens[start:end].tobytes() for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]


def counts(batch: TrainingBatch) -> dict[str, int]:
    """Return the tokens that a step computes, by method."""
    rows = sorted(rows_of(batch))
    histories = [row for row, after in zip(rows, [*rows[1:], b""], strict=True) if not after.startswith(row)]
    return {
        "calls apart": int(batch.cu_seqlens[-1]),
        "row per history": sum(map(len, histories)) // 4,
        "trie": len(PrefixTree(batch.token_ids, batch.cu_seqlens)),
    }


def make_model() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def trained(batch: TrainingBatch) -> dict[str, Trained]:
    forwards: dict[str, Any] = {
        "plain PyTorch, calls apart": EagerForward,
        "turnwise, sequence_layout packed": lambda model: Forward(model, "packed"),
        "turnwise, sequence_layout trie": lambda model: Forward(model, "trie"),
    }
    longest = int(np.diff(batch.cu_seqlens).max())
    update = UpdateConfig(lr=1e-6, micro_batch_tokens=8 * longest)
    return {name: updates(make_model(), batch, update, forward) for name, forward in forwards.items()}


def main() -> None:
    options = arguments(__doc__)
    options.device = "cpu"
    rows = []
    for name, agent in [("tiny", TINY)] if options.quick else [("whole", WHOLE), ("step", STEP)]:
        found = counts(play(agent))
        rows += [
            {"agent": name, "method": method, "tokens": count, "share": f"{count / found['calls apart']:.1%}"}
            for method, count in found.items()
        ]
    finish("compaction", "Tokens that a step over rewritten histories computes", rows, options)
    batch = play(TINY if options.quick else STEP)
    methods = trained(batch)
    gradients = {name: one.gradient() for name, one in methods.items()}
    expected = next(iter(gradients.values()))
    off = {name: float((one - expected).norm() / expected.norm()) for name, one in gradients.items()}
    if max(off.values()) > TOLERANCE:
        raise SystemExit(f"gradients differ: {off}")
    seconds = seconds_per_step(methods, min(options.rounds, 3))
    first = next(iter(seconds.values()))
    times = [
        {
            "method": name,
            "calls": len(batch),
            "s per step": seconds[name],
            "× plain": first / seconds[name],
            "gradient off by": f"{off[name]:.1e}",
        }
        for name in methods
    ]
    finish("compaction", "A step over rewritten histories", times, options)


if __name__ == "__main__":
    main()
