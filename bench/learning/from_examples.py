"""Cells that run an example as it is: sub-agents, and SmolLM2-135M."""

from __future__ import annotations

from cells import SEEDS, Cell, Settings, WarmStart, merged
from shared import BASE, EXAMPLES

from turnwise.train.config.toml import raw_settings


# ---------------------------------------------------------------------------------------------------------------------
# Do sub-agents learn from rewards of their own?
# ---------------------------------------------------------------------------------------------------------------------
def sub_agents(seed: int) -> list[Cell]:
    """``examples/sub_agents.toml``, where each sub-agent has its own reward, or takes that of its attempt."""
    if seed not in SEEDS[:2]:
        return []
    example = raw_settings(EXAMPLES / "sub_agents.toml")
    base = merged({key: value for key, value in example.items() if key != "run_dir"}, {"max_sampled_tokens": 20_000})
    contenders: dict[str, Settings] = {
        "untrained": {"steps": 0},
        "own-reward": {"steps": 100_000},
        "inherited": {"steps": 100_000, "task": "gateway:examples.sub_agents:inheriting"},
    }
    return [Cell("sub_agents", "two-parts", name, seed, merged(base, changed)) for name, changed in contenders.items()]


# ---------------------------------------------------------------------------------------------------------------------
# Does a buyer and a seller keep trading?
# ---------------------------------------------------------------------------------------------------------------------
def haggle(seed: int) -> list[Cell]:
    """Self-play of ``examples/smollm2/haggle.py`` with a tiny model, a seat that trains against a frozen one, seats
    that take turns, a league, and a small pay for a deal. All seeds share one start."""
    task, quality = "examples.smollm2.haggle:Haggling", {"quality": 0.5}
    settings = {"steps": 400, "batch_size": 64, "lr": 2.5e-3}
    start = WarmStart(task, quality, settings, SEEDS[0])
    base = merged(
        BASE,
        {"task": task, "task_options": {**quality, "max_tokens": 8}, "max_sampled_tokens": 30_000},
        {"rollout": {"prompts_per_step": 32, "group_size": 8}, "update": {"lr": 3e-4, "num_minibatches": 1}},
        {"eval": {"num_prompts": 170}},
    )
    apart: Settings = {"policy_sharing": "model_per_actor"}
    contenders: dict[str, Settings] = {
        "untrained": {"steps": 0},
        "self-play": {},
        "frozen-seller": {**apart, "phases": [{"train": ["buyer"], "steps": 100_000}]},
        "taking-turns": {**apart, "phases": [{"train": [seat], "steps": 3} for seat in ("buyer", "seller")]},
        "league": {"league": {"share": 0.5, "every": 2}},
        "paid-deals": {"task_options": {"deal": 0.25}},
    }
    return [Cell("haggle", "tiny", name, seed, merged(base, changed), start) for name, changed in contenders.items()]


# ---------------------------------------------------------------------------------------------------------------------
# Does a real model learn?
# ---------------------------------------------------------------------------------------------------------------------
ADAPTERS: Settings = {
    "policy_sharing": "lora_per_actor",
    "policies": {"default": {"lora": {"rank": 16}}},
    "update": {"lr": 2e-4},
}
"""A LoRA for each agent."""


PAIR: Settings = {
    "policy_sharing": "model_per_actor",
    "policies": {
        f"trained_{actor}": {"path": f"runs/smollm2-pair/policies/{actor}"} for actor in ("describer", "guesser")
    },
    "actors": {actor: {"teacher": f"trained_{actor}"} for actor in ("describer", "guesser")},
}
"""Two students, each with a teacher of its own: ``turnwise train examples/smollm2/views.toml --policy_sharing
model_per_actor --run_dir runs/smollm2-pair`` leaves the teachers."""


EXAMPLE_OF = {"calculator": "verifier"}
"""The example of a setting that has another name."""


def real(seed: int) -> list[Cell]:
    """SmolLM2-135M as ``examples/smollm2`` trains it. Needs ``make model``, and the frameworks beside turnwise.

    ``distilled`` also needs the teacher that ``turnwise train examples/smollm2/views.toml`` leaves.
    """
    distill = raw_settings(EXAMPLES / "smollm2" / "distill.toml")
    untrained: Settings = {"steps": 0}
    views: dict[str, Settings] = {
        **{"untrained": untrained, "team": {}, "team-grpo": {"credit": {"rule": "grpo"}}},
        "half-view": {"task_options": {"actors": ["guesser"]}},
        "adapters": ADAPTERS,
    }
    settings = {"frameworks": {"untrained": untrained, "team": {}}, "views": views}
    if seed in SEEDS[:2]:
        changed: dict[str, Settings] = {
            "team": {},
            "team-verdict": {"task_options": {"verdict": 0.5}},
            "solver-alone": {"task_options": {"actors": ["solver"]}},
        }
        # With one thread each, two cells run side by side.
        settings["verifier"] = {
            name: merged({"threads": 1}, more) for name, more in {"untrained": untrained, **changed}.items()
        }
        # The same task with other held-out questions, as a later version splits them.
        with_it: Settings = {"task_options": {"calculator": True}}
        settings["calculator"] = {
            name: merged({"threads": 1}, more)
            for name, more in {
                "untrained": merged(untrained, with_it),
                "team": with_it,
                "team-verdict": merged(with_it, changed["team-verdict"]),
                "solver-alone": changed["solver-alone"],
            }.items()
        }
        settings["kuhn_poker"] = {"rae": {}}
        own = {actor: {"teacher": "default"} for actor in ("describer", "guesser")}
        views["own-teacher"] = {"actors": own, "distill": {"hint": "best", "add_to_reward": True}}
        views["own-teacher-tenth"] = {"actors": own, "distill": {"hint": "best", "add_to_reward": True, "coef": 0.1}}
        distilled = views["distilled"] = {key: value for key, value in distill.items() if key != "run_dir"}
        views["distilled-pair"] = {**distilled, **PAIR}
        views["distilled-pair-top-k"] = {**distilled, **PAIR, "distill": {"top_k": 16}}
    made = []
    for name, contenders in settings.items():
        example = raw_settings(EXAMPLES / "smollm2" / f"{EXAMPLE_OF.get(name, name)}.toml")
        del example["run_dir"]
        made += [Cell("real", name, who, seed, merged(example, more)) for who, more in contenders.items()]
    return made
