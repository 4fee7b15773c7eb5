"""Your own game in 40 lines: a tiny random model learns to write vowels. `python examples/vowels.py [STEPS]`"""

import asyncio
import sys

import turnwise as tw
from turnwise.inference import TransformersClient
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import build_policies
from turnwise.train.log.lines import read_metrics
from turnwise.types import Sampling


def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)


class Vowels(tw.SingleTurnEpisode):
    episode_type = "vowels"
    rubric = tw.Rubric([vowels])

    def get_prompt(self, artifact):
        return f"{artifact}?"


def main(steps=30, run_dir="runs/vowels"):
    config = tw.TrainConfig(run_dir=run_dir, steps=steps, policies={"default": {}}, update={"lr": 3e-3})
    tokenizer = build_tokenizer(["abcdefghijklmnopqrstuvwxyz"])
    models = {"default": build_model(tokenizer, seed=0)}
    arena = tw.Arena(TransformersClient(models, tokenizer), tokenizer, tw.GRPOCredit(), sampling=Sampling(max_tokens=8))
    arena.add_actor(tw.Actor("writer"))
    arena.add_episode(Vowels())
    arena.source = lambda: [tw.EpisodeRequest("vowels", word) for word in ("sing", "hum") for _ in range(16)]
    trainer = tw.Trainer(arena, build_policies(config, models), config)
    asyncio.run(trainer.run())
    return read_metrics(run_dir)[-1]["metric/vowels/writer"]  # also if the run had ended before


if __name__ == "__main__":
    print(f"vowels in the last batch: {main(*map(int, sys.argv[1:])):.0%}")
