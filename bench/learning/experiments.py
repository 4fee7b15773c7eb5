"""All cells of the learning table, by the question that they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cells import RESULTS, SEEDS, Cell, Settings, WarmStart, merged, read_results

RATES = (1.5e-4, 3e-4, 5e-4, 1e-3)
"""Learning rates of the sweep."""

COPIES: Settings = {"rollout": {"group_size": 8, "branches": 1}}
"""Eight whole episodes of each question."""


def tree(select: str, **more: Any) -> Settings:
    """Eight branches at each action, one of which goes on."""
    return {"rollout": {"group_size": 1, "branches": 8, "tree": {"select": select, **more}}}


def credit(rule: str, **options: Any) -> Settings:
    return {"credit": {"rule": rule, "options": options}}


BASE: Settings = {
    "steps": 100_000,
    "rollout": {"prompts_per_step": 64, "temperature": 1.0},
    "update": {"min_lr_ratio": 0.1, "num_minibatches": 3},
    "eval": {"every": 5, "num_prompts": 300},
}
"""Settings of all cells. ``steps`` never ends a run: ``max_sampled_tokens`` does."""


def swept(setting: str, contender: str) -> float:
    """Return the learning rate with the best mean validation of the sweep; 5e-4 if it was not swept."""
    found: dict[float, list[float]] = {}
    for row in read_results(RESULTS / "sweep.jsonl"):
        _, its_setting, its_contender, _ = row["cell"].split("/")
        if (its_setting, its_contender.partition("@")[0]) == (setting, contender):
            found.setdefault(row["learning_rate"], []).append(row["curve"][-1][1])
    return max(found, key=lambda rate: sum(found[rate]) / len(found[rate])) if found else 5e-4


def cells_of(
    question: str, setting: str, base: Settings, contenders: Mapping[str, Settings], seed: int, warm: WarmStart | None
) -> list[Cell]:
    """Return one cell per contender, each at its own best learning rate."""
    return [
        Cell(question, setting, name, seed, merged(base, {"update": {"lr": swept(setting, name)}}, changed), warm)
        for name, changed in contenders.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# When is a team better than one agent?
# ---------------------------------------------------------------------------------------------------------------------
SPLIT: Settings = merged(BASE, {"task": "split_clues", "max_sampled_tokens": 60_000})
RELAY: Settings = merged(BASE, {"task": "tasks:Relay", "max_sampled_tokens": 60_000})
LOOK_AHEAD = merged(tree("first", playouts=1, score_by="value"), credit("vine", team=True))


def split_start(seed: int) -> WarmStart:
    roles = {"actors": ["reader", "writer", "solver"]}
    return WarmStart("split_clues", roles, {"steps": 300, "batch_size": 128, "lr": 2.5e-3}, seed)


def relay_start(seed: int) -> WarmStart:
    roles = {"actors": ["hop1", "hop2", "solver"]}
    return WarmStart("tasks:Relay", roles, {"steps": 600, "batch_size": 128, "lr": 2.5e-3}, seed)


def views(seed: int) -> list[Cell]:
    """Private views: what a team gains over one agent that sees half, and over one that sees everything."""

    def contenders(half: Settings, whole: Settings) -> dict[str, Settings]:
        return {
            "untrained": {"steps": 0},
            "team-grpo": merged(COPIES, credit("grpo")),
            "team-dr_mas": merged(COPIES, credit("dr_mas")),
            "team-vine": LOOK_AHEAD,
            "one-half": merged(COPIES, credit("grpo"), {"task_options": half}),
            "one-whole": merged(COPIES, credit("grpo"), {"task_options": whole}),
        }

    half, whole = {"actors": ["writer"]}, {"actors": ["solver"]}
    made = cells_of("views", "split_clues", SPLIT, contenders(half, whole), seed, split_start(seed))
    half, whole = {"actors": ["solver"], "seen": 1}, {"actors": ["solver"], "seen": 2}
    return made + cells_of("views", "relay", RELAY, contenders(half, whole), seed, relay_start(seed))


# ---------------------------------------------------------------------------------------------------------------------
# Do role-specialised policies specialise?
# ---------------------------------------------------------------------------------------------------------------------
def roles(seed: int) -> list[Cell]:
    """Train one policy, an adapter or a model for each role, then let two roles play with each other's policy."""
    sharing = {
        "one-policy": {"policy_sharing": "shared"},
        "adapters": {"policy_sharing": "lora_per_actor", "policies": {"default": {"lora": {}}}, "update": {"lr": 2e-3}},
        "models": {"policy_sharing": "model_per_actor"},
    }
    made = []
    for setting, base, start, pair in (
        ("split_clues", SPLIT, split_start(seed), ("reader", "writer")),
        ("relay", RELAY, relay_start(seed), ("hop1", "hop2")),
    ):
        contenders = {name: merged(COPIES, credit("dr_mas"), changed) for name, changed in sharing.items()}
        for cell in cells_of("roles", setting, base, contenders, seed, start):
            made.append(replace(cell, swap=pair))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# When does agent- and turn-wise credit pay?
# ---------------------------------------------------------------------------------------------------------------------
DRILL_NOISE = (0.0, 1.0)
DRILL_ROUNDS = (1, 4, 16)


def drill_start(seed: int) -> WarmStart:
    return WarmStart("tasks:Drill", {"rounds": 1}, {"steps": 300, "batch_size": 128, "lr": 2.5e-3}, seed)


def drill(seed: int) -> list[Cell]:
    """Episodes of 2, 8 and 32 calls, each rewarded for itself; the team's reward is exact or noisy."""
    made = []
    for rounds in DRILL_ROUNDS:
        for noise in DRILL_NOISE:
            setting = f"drill-{2 * rounds}-calls-noise-{noise:g}"
            questions = {"prompts_per_step": max(4, 64 // rounds)}  # as many calls in a step, whatever the length
            base = merged(
                BASE,
                {"task": "tasks:Drill", "task_options": {"rounds": rounds, "noise": noise}},
                {"max_sampled_tokens": 80_000, "rollout": questions},
            )
            contenders = {
                "team-grpo": merged(COPIES, credit("grpo"), {"task": "tasks:TeamDrill"}),
                "team-at_grpo-copies": merged(COPIES, credit("at_grpo")),
                "team-at_grpo-best": merged(tree("best"), credit("at_grpo")),
            }
            if noise:  # only the team's reward is noisy
                contenders = {"team-grpo": contenders["team-grpo"]}
            made += cells_of("credit", setting, base, contenders, seed, drill_start(seed))
    return made


def grid(setting: str, base: Settings, alone: Settings, start: WarmStart) -> list[Cell]:
    """Every rule and every selection on one task, at equal tokens and calls. ``alone`` is the lone agent's play."""
    contenders = {
        "untrained": {"steps": 0},
        "one-untrained": merged({"steps": 0}, alone),
        "one-grpo": merged(COPIES, credit("grpo"), alone),
        "team-grpo": merged(COPIES, credit("grpo")),
        "team-dr_mas": merged(COPIES, credit("dr_mas")),
        "team-at_grpo-copies": merged(COPIES, credit("at_grpo")),
        "team-at_grpo-best": merged(tree("best"), credit("at_grpo")),
        "team-at_grpo-first": merged(tree("first"), credit("at_grpo")),
        "team-at_grpo-mixed": merged(tree("mixed"), credit("at_grpo")),
        "team-vine": LOOK_AHEAD,
    }
    return cells_of("credit", setting, base, contenders, start.seed, start)


def sudoku(seed: int) -> list[Cell]:
    play = {"blanks": [4, 6], "quality": 0.4, "answers": 4}
    start = WarmStart(
        "sudoku",
        {**play, "actors": ["proposer", "reviser", "solver"]},
        {"steps": 600, "batch_size": 64, "lr": 2.5e-3, "target_loss": 0.07},
        seed,
    )
    base = merged(BASE, {"task": "sudoku", "task_options": play, "max_sampled_tokens": 400_000})
    return grid("sudoku", base, {"task_options": {"actors": ["solver"], "max_turns": 4}}, start)


def plan_path(seed: int) -> list[Cell]:
    play = {"side": 5, "walls": 0.3, "min_route": 4, "quality": 0.3, "max_turns": 1}
    start = WarmStart(
        "plan_path",
        {**play, "max_turns": 2, "actors": ["tool", "planner", "solver"]},
        {"steps": 500, "batch_size": 128, "lr": 2.5e-3},
        seed,
    )
    base = merged(BASE, {"task": "plan_path", "task_options": play, "max_sampled_tokens": 200_000})
    return grid("plan_path", base, {"task_options": {"actors": ["solver"], "max_turns": 2}}, start)


CELLS = [cell for seed in SEEDS for make in (views, roles, drill, sudoku, plan_path) for cell in make(seed)]

assert len({cell.name for cell in CELLS}) == len(CELLS), "each cell needs another name"
