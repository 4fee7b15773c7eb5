"""Questions, trainers and samplers of ``bench_real_model.py``."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from inference_cases import Endless

from turnwise import Rubric, SingleTurnEpisode
from turnwise.inference.local import client as local_client
from turnwise.run.build import build_run
from turnwise.run.clients import KINDS
from turnwise.tasks import OwnTask
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.validate import config_from_dict
from turnwise.types import ModelRequest, Sampling
from turnwise.utils.threads import run_to_end

SYSTEM = "Write the sum that answers the question."
SOLVED = [
    ("Sam has 31 pens and gets 4 more. How many pens does Sam have now?", "31 + 4 = 35"),
    ("There are 28 cups on the table. Sam takes 7 of them. How many cups remain?", "28 - 7 = 21"),
    ("Tom buys 22 pens on Monday and 5 on Tuesday. How many pens is that in all?", "22 + 5 = 27"),
    ("Eva has 16 cups and loses 9 of them. How many cups are left?", "16 - 9 = 7"),
]
QUESTIONS = [
    f"{who} has {first} {things} and {does} {second} of them. How many {things} does {who} have now?"
    for who, things, does in (("Ann", "apples", "eats"), ("Ben", "cards", "loses"), ("Mia", "red balloons", "sells"))
    for first, second in ((14, 5), (20, 11), (9, 2), (17, 8), (25, 6), (12, 12))
]
LR = 1e-6
MAX_APART = {"float32": 1e-2, "bfloat16": 1.0}
"""Of one token's log-probability, in nats."""


class Case(NamedTuple):
    """The model's folder, the kind of prompt, and the shape of a step."""

    model: str
    prompt: str
    questions: int = 16
    answers: int = 8
    tokens: int = 32
    threads: int = 1

    def chats(self) -> list[list[dict[str, str]]]:
        shown = [text for pair in SOLVED for text in pair] if self.prompt == "examples" else []
        return [chat([*shown, question]) for question in QUESTIONS[: self.questions]]

    @property
    def sampled(self) -> int:
        return self.questions * self.answers * self.tokens


def chat(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return a chat of the system prompt and of ``texts``, from the user and the assistant in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *turns]


def reward_of(text: str) -> float:
    """Return a number that differs between answers, so that all of them train."""
    return zlib.crc32(text.encode()) / 2**32


# ---------------------------------------------------------------------------------------------------------------------
# Training: each function returns the seconds of its steps
# ---------------------------------------------------------------------------------------------------------------------
class Answer(SingleTurnEpisode):
    episode_type = "answer"

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.chats = dict(zip(QUESTIONS, case.chats(), strict=False))
        self.rubric = Rubric([self.reward])

    def get_prompt(self, artifact: Any) -> Any:
        return self.chats[artifact["question"]][1:]  # the arena adds the system prompt

    def reward(self, completion: str) -> float:
        return reward_of(completion)


class Questions(OwnTask):
    """The same questions in every step."""

    name, success_metric, system_prompts = "answer", "reward/solver", {"solver": SYSTEM}
    case = Case("", "question")

    def questions(self) -> list[str]:
        return QUESTIONS

    def draw(self, split: Any, n: int, seed: Any) -> list[str]:
        return QUESTIONS[:n]

    def episodes(self, tree: Any = None) -> dict[str, Any]:
        return {"answer": Answer(self.case)}


def turnwise_steps(case: Case, steps: int, folder: str, micro_batch_tokens: int, dtype: str) -> list[float]:
    """Train with the whole loop, but without an end token and without the checkpoint at the end."""
    Questions.case = case
    settings = {
        "task": f"{Questions.__module__}:Questions",
        "run_dir": folder,
        "steps": steps,
        "threads": case.threads,
        "task_options": {"max_tokens": case.tokens},
        "policies": {"default": {"path": case.model, "dtype": dtype}},
        "rollout": {"prompts_per_step": case.questions, "group_size": case.answers},
        "update": {"lr": LR, "micro_batch_tokens": micro_batch_tokens},
        "eval": {"every": 0, "num_prompts": 1},
        "health": {"start_questions": 0},
    }
    with mock.patch.object(local_client, "stop_token_ids", lambda *_: ()):
        trainer: Any = build_run(config_from_dict(settings)).trainer
        trainer.save = lambda: None
        run_to_end(trainer.run())
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["sampled_tokens"] == row["default/tokens"] == case.sampled, f"{row}: other numbers of tokens"
        assert row["default/sampler_trainer_logprob_max_diff"] < MAX_APART[dtype], f"sampler and trainer differ: {row}"
    return [row["seconds_rollout"] + row["seconds_update"] for row in rows]


def trl_steps(case: Case, steps: int, folder: str, rows: int, bf16: bool) -> list[float]:
    """Train with ``GRPOTrainer.train``, with an end token that is never sampled; ``bf16`` is its autocast."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    counts, seconds = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds[-1] += time.perf_counter()

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        counts.append(sum(map(len, completion_ids)))
        return [reward_of(turns[0]["content"]) for turns in completions]

    total = case.questions * case.answers
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=bf16, max_steps=steps, learning_rate=LR, num_generations=case.answers,
        per_device_train_batch_size=min(rows, total), gradient_accumulation_steps=max(1, total // rows),
        gradient_checkpointing=False, max_completion_length=case.tokens, temperature=1.0,
        generation_kwargs={"min_new_tokens": case.tokens}, save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": each} for each in case.chats()]),
        processing_class=AutoTokenizer.from_pretrained(case.model),
        callbacks=[Clock()],
    ).train()
    assert counts == [case.sampled] * steps, f"{counts}: expected {case.sampled} tokens in each step"
    return seconds


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: each function returns the seconds of its rounds, after one that doesn't count
# ---------------------------------------------------------------------------------------------------------------------
def load(case: Case) -> tuple[Any, list[list[int]]]:
    """Return the model, without an end token, and the prompt of each answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.model)
    model: Any = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    options = {"add_generation_prompt": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(each, **options) for each in case.chats()]
    return model, [prompt for prompt in prompts for _ in range(case.answers)]


def timed(case: Case, rounds: int, sample: Callable[[int], int]) -> list[float]:
    seconds = []
    for number in range(1 + rounds):
        start = time.perf_counter()
        assert sample(number) == case.sampled, "other numbers of tokens"
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def generate(case: Case, rounds: int, folder: str, rows: int) -> list[float]:
    model, prompts = load(case)

    @torch.no_grad()
    def sample(number: int) -> int:
        count = 0
        for part in (prompts[start : start + rows] for start in range(0, len(prompts), rows)):
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in part])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part])
            options = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": case.tokens}
            count += model.generate(ids, attention_mask=mask, **options)[:, width:].numel()
        return count

    return timed(case, rounds, sample)


def client(case: Case, rounds: int, folder: str, kind: str) -> list[float]:
    model, prompts = load(case)
    config = config_from_dict({"run_dir": folder, "threads": case.threads, "rollout": {"client": kind}})
    sampler, loop = KINDS[kind].build(config, Endless(), {"default": model}), asyncio.new_event_loop()
    del model

    def sample(number: int) -> int:
        settings = [Sampling(max_tokens=case.tokens, seed=number * len(prompts) + i) for i in range(len(prompts))]
        requests = [ModelRequest(*each) for each in zip(prompts, settings, strict=True)]
        return sum(len(each.completion_token_ids) for each in loop.run_until_complete(sampler.generate(requests)))

    try:
        return timed(case, rounds, sample)
    finally:
        loop.run_until_complete(sampler.close())


def save_tiny(folder: str) -> str:
    tokenizer = build_tokenizer(QUESTIONS)
    build_model(tokenizer, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
