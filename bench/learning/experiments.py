"""All cells of the learning table, by the question that they answer."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cells import SEEDS, SWEEP_SEEDS, Cell, Settings, SeveralWarmStart, WarmStart, merged
from from_examples import haggle, real, sub_agents
from shared import BASE, COPIES, EXAMPLES, RATES, SHARED_RATES, cells_of, credit, tree

# ---------------------------------------------------------------------------------------------------------------------
# When is a team better than one agent?
# ---------------------------------------------------------------------------------------------------------------------
SPLIT: Settings = merged(BASE, {"task": "split_clues", "max_sampled_tokens": 60_000})
RELAY: Settings = merged(BASE, {"task": "tasks:Relay", "max_sampled_tokens": 60_000})
LOOK_AHEAD = merged(tree("first", playouts=1, score_by="value"), credit("vine", team=True))


def split_start(seed: int) -> WarmStart:
    roles = {"actors": ["reader", "writer", "solver"]}
    return WarmStart("split_clues", roles, {"steps": 600, "batch_size": 128, "lr": 2.5e-3}, seed)


def relay_start(seed: int) -> WarmStart:
    roles = {"actors": ["hop1", "hop2", "hop3", "solver"]}
    return WarmStart("tasks:Relay", roles, {"steps": 800, "batch_size": 128, "lr": 2.5e-3}, seed)


def fog_start() -> WarmStart:
    """The start of all seeds, as it takes minutes."""
    roles = {"actors": ["scout", "walker", "solver"]}
    return WarmStart("fog:Fog", roles, {"steps": 700, "batch_size": 128, "lr": 2.5e-3}, SEEDS[0])


def view_contenders(half: Settings, whole: Settings) -> dict[str, Settings]:
    return {
        "untrained": {"steps": 0},
        "team-grpo": merged(COPIES, credit("grpo")),
        "team-dr_mas": merged(COPIES, credit("dr_mas")),
        "team-vine": LOOK_AHEAD,
        "one-half": merged(COPIES, credit("grpo"), {"task_options": half}),
        "one-whole": merged(COPIES, credit("grpo"), {"task_options": whole}),
    }


SPLIT_CONTENDERS = view_contenders({"actors": ["writer"]}, {"actors": ["solver"]})
RELAY_CONTENDERS = view_contenders({"actors": ["solver"], "seen": 1}, {"actors": ["solver"], "seen": 3})


FOG: Settings = merged(
    BASE, {"task": "fog:Fog", "max_sampled_tokens": 200_000, "eval": {"every": 2, "num_prompts": 120}}
)
FOG_CONTENDERS = view_contenders({"actors": ["solver"], "seen": 1}, {"actors": ["solver"], "seen": 2})


def views(seed: int) -> list[Cell]:
    """Private views: what a team gains over one agent that sees half, and over one that sees everything."""
    made = cells_of("views", "split_clues", SPLIT, SPLIT_CONTENDERS, seed, split_start(seed))
    made += cells_of("views", "relay", RELAY, RELAY_CONTENDERS, seed, relay_start(seed))
    contenders = {name: changed for name, changed in FOG_CONTENDERS.items() if name not in ("team-dr_mas", "team-vine")}
    return made + cells_of("views", "fog", FOG, contenders, seed, fog_start())


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
        ("relay", RELAY, relay_start(seed), ("hop2", "hop3")),
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


def drill_play(rounds: int, noise: float) -> Settings:
    return merged(
        BASE,
        {"task": "tasks:Drill", "task_options": {"rounds": rounds, "noise": noise}, "max_sampled_tokens": 80_000},
        {"rollout": {"prompts_per_step": max(4, 64 // rounds)}},  # as many calls in a step, whatever the length
    )


DRILL_CONTENDERS = {
    "team-grpo": merged(COPIES, credit("grpo"), {"task": "tasks:TeamDrill"}),
    "team-at_grpo-copies": merged(COPIES, credit("at_grpo")),
    "team-at_grpo-best": merged(tree("best"), credit("at_grpo")),
}


def drill(seed: int) -> list[Cell]:
    """Episodes of 2, 8 and 32 calls, each rewarded for itself; the team's reward is exact or noisy."""
    made = []
    for rounds in DRILL_ROUNDS:
        often = {"eval": {"every": 1, "num_prompts": max(50, 200 // rounds)}}  # it is learned within a few steps
        for noise in DRILL_NOISE:
            setting = f"drill-{2 * rounds}-calls-noise-{noise:g}"
            # Only the team's reward is noisy.
            contenders = {"team-grpo": DRILL_CONTENDERS["team-grpo"]} if noise else DRILL_CONTENDERS
            made += cells_of(
                "credit", setting, merged(drill_play(rounds, noise), often), contenders, seed, drill_start(seed)
            )
    return made


def grid_contenders(alone: Settings) -> dict[str, Settings]:
    """Every rule and every selection, at equal tokens and calls. ``alone`` is the lone agent's play."""
    return {
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


SUDOKU_PLAY: Settings = {"blanks": [4, 6], "quality": 0.4, "answers": 4}
SUDOKU = merged(
    BASE,
    {"task": "sudoku", "task_options": SUDOKU_PLAY, "max_sampled_tokens": 100_000},
    {"rollout": {"prompts_per_step": 24}, "eval": {"every": 2}},
)
SUDOKU_CONTENDERS = grid_contenders({"task_options": {"actors": ["solver"], "max_turns": 4}})


def sudoku_start(seed: int) -> WarmStart:
    return WarmStart(
        "sudoku",
        {**SUDOKU_PLAY, "actors": ["proposer", "reviser", "solver"]},
        {"steps": 600, "batch_size": 64, "lr": 2.5e-3, "target_loss": 0.07},
        seed,
    )


def sudoku(seed: int) -> list[Cell]:
    return cells_of("credit", "sudoku", SUDOKU, SUDOKU_CONTENDERS, seed, sudoku_start(seed))


def shipped(
    task: str,
    team: Sequence[str],
    alone: str,
    rounds: int,
    seed: int,
    contenders: Sequence[str],
    tokens: int = 200_000,
    start: Settings | None = None,
) -> list[Cell]:
    """Cells of ``examples/<task>.toml`` with its own learning rate, for some contenders of :func:`grid_contenders`.

    The lone agent makes as many calls as the team does in ``rounds``; so the start knows later rounds too, for which
    ``start`` may replace settings of the example's ``warm_start`` and ``task_options``. It takes minutes, and all seeds
    share it.
    """
    example = tomllib.loads((EXAMPLES / f"{task}.toml").read_text(encoding="utf-8"))
    given = merged({name: example[name] for name in ("task_options", "warm_start")}, start or {})
    play: Settings = {**given["task_options"], "max_turns": rounds}
    calls = rounds * len(team)
    warm = WarmStart(
        task,
        {**play, "max_turns": max(2, rounds), "actors": list(dict.fromkeys([*team, alone]))},
        given["warm_start"],
        SEEDS[0],
    )
    base = merged(
        BASE,
        {"task": task, "task_options": play, "update": example["update"]},
        {"max_sampled_tokens": tokens},
        {"eval": {"num_prompts": example["eval"]["num_prompts"]}},
    )
    found = grid_contenders({"task_options": {"actors": [alone], "max_turns": calls}})
    return [Cell("credit", task, who, seed, merged(base, found[who]), warm) for who in contenders]


FEWER = ("untrained", "one-untrained", "one-grpo", "team-grpo", "team-at_grpo-first")


def plan_path(seed: int) -> list[Cell]:
    return shipped("plan_path", ("tool", "planner"), "solver", 1, seed, [*FEWER, "team-at_grpo-best"])


def sokoban(seed: int) -> list[Cell]:
    return shipped("sokoban", ("tool", "planner"), "solver", 2, seed, FEWER)


def code_duel(seed: int) -> list[Cell]:
    # Demonstrations of the second round double what the start has to learn. Programs are long: with the batches of the
    # other tasks the tokens would do for two updates.
    # The example starts from other demonstrations since these ran.
    start: Settings = {"task_options": {"clean": 0.85}, "warm_start": {"steps": 900, "shuffle": False}}
    found = shipped("code_duel", ("coder", "tester"), "coder", 2, seed, FEWER, tokens=300_000, start=start)
    smaller = {"rollout": {"prompts_per_step": 8}}
    return [replace(cell, config=merged(cell.config, smaller)) for cell in found]


# ---------------------------------------------------------------------------------------------------------------------
# Is Dr. MAS stable where agents' rewards differ?
# ---------------------------------------------------------------------------------------------------------------------
def verify_start(seed: int) -> WarmStart:
    return WarmStart("verify:Verify", {}, {"steps": 400, "batch_size": 128, "lr": 2.5e-3}, seed)


VERIFY: Settings = merged(
    BASE, {"task": "verify:Verify", "max_sampled_tokens": 80_000, "update": {"lr": 5e-4}, "eval": {"every": 2}}
)
NORMALIZERS = {
    "dr_mas": merged(COPIES, credit("dr_mas")),
    "global": merged(COPIES, credit("rules:GlobalCredit")),
}
"""One mean and deviation for each agent, and one for all agents."""


def stability(seed: int) -> list[Cell]:
    """Where one agent's rewards are larger, in a drill and between a solver and a verifier."""
    made = []
    for setting, scales, offsets in (
        ("same-rewards", (1.0, 1.0), (0.0, 0.0)),
        ("other-scale", (1.0, 10.0), (0.0, 5.0)),
    ):
        differing = {"task": "tasks:TeamDrill", "task_options": {"scales": scales, "offsets": offsets}}
        drilled = merged(drill_play(4, 0.0), differing)
        made += cells_of("stability", setting, drilled, NORMALIZERS, seed, drill_start(seed))
        checked = merged(VERIFY, {"task_options": {"scale": scales[1], "offset": offsets[1]}})
        contenders = {"untrained": {"steps": 0}, **NORMALIZERS}
        made += cells_of("stability", f"verify-{setting}", checked, contenders, seed, verify_start(seed))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Does RAE keep self-play learning?
# ---------------------------------------------------------------------------------------------------------------------
GAMES: dict[str, tuple[Settings, Settings, Settings]] = {
    # With batches of 32 the start did not see its card, and then no rule learned to: exploitability stayed above 1/3.
    "kuhn_poker": (
        {"quality": 0.3, "max_tokens": 8},
        {"rollout": {"prompts_per_step": 192}, "loss": {"kl": {"coef": 0.1, "estimator": "k3+"}}},
        {"steps": 400, "batch_size": 256},
    ),
    "tic_tac_toe": ({}, {"rollout": {"prompts_per_step": 64}}, {"steps": 400, "batch_size": 128}),
    "negotiation": ({}, {"rollout": {"prompts_per_step": 64}}, {"steps": 400, "batch_size": 128}),
}
"""Task options, other settings, and the warm start of each game."""
GAME_TOKENS = {"kuhn_poker": 250_000, "tic_tac_toe": 100_000, "negotiation": 100_000}


def rae(seed: int) -> list[Cell]:
    """Self-play with a baseline for each seat, one for both, and none, at one and three times the rate."""
    made = []
    for game, (play, settings, warm) in GAMES.items():
        # All seeds of the slower games share a start.
        start = WarmStart(game, play, {"lr": 2.5e-3, **warm}, seed if game == "kuhn_poker" else SEEDS[0])
        tokens = {"task": game, "task_options": play, "max_sampled_tokens": GAME_TOKENS[game]}
        for times in (1, 3):
            base = merged(BASE, tokens, settings, {"update": {"num_minibatches": 1}})
            if game == "kuhn_poker":
                base = merged(base, {"eval": {"every": 20, "exploitability_every": 20}})
            contenders = {
                "rae": credit("rae"),
                "shared": credit("rules:SharedBaselineCredit"),
                "none": credit("dr_mas", center="none", scale="none"),
            }
            if game != "kuhn_poker":
                # In a zero-sum game one baseline for both seats is 0, but for the costs of illegal answers.
                del contenders["shared"]
            for name, changed in contenders.items():
                config = merged(base, {"update": {"lr": 3e-4 * times}}, changed)
                made.append(Cell("rae", f"{game}-{times}x", name, seed, config, start))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Does nested credit make a curriculum?
# ---------------------------------------------------------------------------------------------------------------------
# At 5e-4 the first steps cost a tenth of the success, which took all tokens to mend.
CURRICULUM: Settings = merged(
    BASE,
    {"task": "tasks:Curriculum", "task_options": {"easy": 0.95}, "max_sampled_tokens": 150_000},
    {"update": {"num_minibatches": 1, "lr": 2e-4, "warmup": 10}},
)
DRAWN = merged({"rollout": {"prompts_per_step": 64, "group_size": 4}, "task_options": {"random": True}}, credit("grpo"))
PROPOSED = merged({"rollout": {"prompts_per_step": 16, "group_size": 4}}, credit("hierarchy"))
CURRICULUM_CONTENDERS: dict[str, Settings] = {
    "untrained": {"steps": 0},
    "random-problems": DRAWN,
    "random-hard-problems": merged(DRAWN, {"task_options": {"easy": 0.0}}),
    "variance": PROPOSED,
    "hard": merged(PROPOSED, {"task_options": {"curve": "hard"}}),
}


def curriculum(seed: int) -> list[Cell]:
    """A proposer that is paid for problems which the solver solves half of the time, against drawn problems."""
    settings = {"steps": 800, "batch_size": 128, "lr": 2.5e-3, "shuffle": False}
    start = WarmStart("tasks:Curriculum", CURRICULUM["task_options"], settings, seed)
    return [
        Cell("curriculum", "sums", name, seed, merged(CURRICULUM, changed), start)
        for name, changed in CURRICULUM_CONTENDERS.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Does drawing questions by their solve rates save tokens?
# ---------------------------------------------------------------------------------------------------------------------
MIXED: Settings = merged(
    BASE,
    {"task": "tasks:Mixed", "max_sampled_tokens": 60_000, "update": {"lr": 5e-4, "num_minibatches": 1}},
    {"rollout": {"prompts_per_step": 24}, "eval": {"every": 4}},
    COPIES,
    credit("grpo"),
)
SIX_QUESTIONS = merged(
    MIXED, {"max_sampled_tokens": 20_000}, {"rollout": {"prompts_per_step": 6}, "eval": {"every": 8}}
)
POOL: Settings = {"sampling": "learnability", "pool": 600}
MIXED_CONTENDERS: dict[str, Settings] = {
    "untrained": {"steps": 0},
    "task": {},
    "uniform": {"curriculum": {**POOL, "uniform": 1.0}},
    "learnability": {"curriculum": POOL},
    "gate": {"curriculum": {**POOL, "gate": 0.6}},
}


def drawn(seed: int) -> list[Cell]:
    """New questions at each step, the questions of a pool equally often, and those of the pool by learnability, of all
    levels or up to the one that a gate admits.

    All seeds share the start of the sweep, as it takes minutes.
    """
    start = WarmStart("tasks:Mixed", {}, {"steps": 300, "batch_size": 128, "lr": 2.5e-3}, SWEEP_SEEDS[0])
    return [
        Cell("drawn", setting, name, seed, merged(base, changed), start)
        for setting, base in (("mixed", MIXED), ("mixed-6", SIX_QUESTIONS))
        for name, changed in MIXED_CONTENDERS.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Does a critic, or a baseline for each token, beat the mean of a group?
# ---------------------------------------------------------------------------------------------------------------------
ALL_ROWS: Settings = {"filter": {"drop_zero_advantage": False}}
CRITIC = merged(credit("episodic"), ALL_ROWS, {"loss": {"critic": {}}})


RAW = credit("grpo", center="none", scale="none")
BASELINES: dict[str, Settings] = {
    "no-baseline": merged(COPIES, RAW),
    "group-mean": merged(COPIES, credit("grpo", scale="none")),
    "optimal-token": merged(COPIES, RAW, ALL_ROWS, {"loss": {"baseline": "optimal_token"}}),
    "critic": merged(COPIES, CRITIC),
}
"""Rewards without a baseline, minus the mean of the group, minus a baseline per token, and with a critic."""
ONE_COPY: Settings = {"rollout": {"prompts_per_step": 512, "group_size": 1, "branches": 1}}
BASELINE_SETTINGS = {
    "split_clues": (SPLIT, {**BASELINES, "critic-one-copy": merged(ONE_COPY, CRITIC)}, split_start),
    # The values of a head that never learns are the mean reward.
    "sudoku": (
        SUDOKU,
        {**BASELINES, "constant-critic": merged(BASELINES["critic"], {"loss": {"critic": {"lr": 1e-12}}})},
        sudoku_start,
    ),
}


def baselines(seed: int) -> list[Cell]:
    """The team's reward, compared in four ways; on split_clues each at the rate of its own sweep."""
    made = []
    for setting, (base, contenders, start) in BASELINE_SETTINGS.items():
        every = {"untrained": {"steps": 0}, **contenders}
        made += cells_of("baselines", setting, base, every, seed, start(seed))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# What do the small rules of the loss do?
# ---------------------------------------------------------------------------------------------------------------------
EPOCHS: Settings = {"update": {"ppo_epochs": 4}}
KL: Settings = {"loss": {"kl": {"coef": 0.05, "estimator": "k3+"}}}


def masks(**settings: Any) -> Settings:
    return {"loss": {"masks": settings}}


RULES: dict[str, Settings] = {
    "untrained": {"steps": 0},
    "plain": credit("grpo"),
    "entropy-target": merged(credit("grpo"), {"loss": {"entropy_target": 0.15}}),
    "entropy-target-fast": merged(credit("grpo"), {"loss": {"entropy_target": 0.15, "entropy_step": 0.05}}),
    "top-entropy": merged(credit("grpo"), masks(top_entropy=0.2)),
    "kl": merged(credit("grpo"), KL),
    "kl-refreshed": merged(credit("grpo"), KL, {"loss": {"kl": {"refresh_every": 3}}}),
    "epochs": merged(credit("grpo"), EPOCHS),
    "epochs-second-moment": merged(credit("grpo"), EPOCHS, masks(second_moment=0.04)),
    "epochs-off-policy": merged(credit("grpo"), EPOCHS, masks(off_policy=0.02)),
}
"""GRPO, and one rule at a time beside it: an adaptive entropy bonus; a fifth of the tokens; a reference that stays, and
one that follows every third step; and four epochs of each batch, alone and with the masks against drift."""
OUTCOME: Settings = {"reward": {"alpha": 1.0, "mode": "convex", "difference": 0.0, "invalid_cost": 0.0}}
SCALES: dict[str, Settings] = {
    "plain": credit("grpo"),
    "mean-scale": credit("grpo", scale="mean"),
    "no-scale": credit("grpo", scale="none"),
}
"""The group's deviation, its mean (MaxRL) or nothing as the divisor of advantages. A mean needs rewards of at least 0,
so all have the team's outcome alone."""


def rules(seed: int) -> list[Cell]:
    made = []
    for setting, base, contenders in (
        ("sudoku", merged(SUDOKU, COPIES), RULES),
        ("sudoku-outcome", merged(SUDOKU, COPIES, OUTCOME), SCALES),
    ):
        made += cells_of("rules", setting, base, contenders, seed, sudoku_start(seed))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Does it help to predict what a tool answers?
# ---------------------------------------------------------------------------------------------------------------------
def observations(seed: int) -> list[Cell]:
    """``examples/lookup.toml`` with and without the cross entropy of the tool's answers. All seeds share a start."""
    example = tomllib.loads((EXAMPLES / "lookup.toml").read_text(encoding="utf-8"))
    start = WarmStart("lookup", example["task_options"], example["warm_start"], SEEDS[0])
    base = merged(
        BASE,
        {"task": "lookup", "task_options": example["task_options"], "update": example["update"]},
        {"rollout": {"prompts_per_step": 12}, "eval": {"num_prompts": 100}, "max_sampled_tokens": 40_000},
        COPIES,
        credit("grpo"),
        ALL_ROWS,
    )
    contenders: dict[str, Settings] = {
        "untrained": {"steps": 0},
        "without": {},
        "observations": {"loss": {"observation_coef": 0.05}},
        "observations-weak": {"loss": {"observation_coef": 0.0005}},
    }
    return [Cell("observations", "lookup", who, seed, merged(base, more), start) for who, more in contenders.items()]


# ---------------------------------------------------------------------------------------------------------------------
# Does one run of two tasks reach what a run of each does?
# ---------------------------------------------------------------------------------------------------------------------
BOTH: dict[str, Settings] = {"sudoku": {"options": SUDOKU_PLAY}, "split_clues": {}}
EACH_ALONE = {"sudoku": 190_000, "split_clues": 50_000}
"""Sampled tokens of each task alone; a run of both has their sum, which a run of another seed divided so."""


def several(seed: int) -> list[Cell]:
    """From one start that has learned both tasks; alone, a task has half of the questions of a step of both."""
    start = SeveralWarmStart("+".join(BOTH), {}, {"steps": 700, "batch_size": 96, "lr": 2.5e-3}, seed, tasks=BOTH)
    base = merged(BASE, tree("first"), credit("at_grpo"), {"update": {"lr": 5e-4}, "eval": {"every": 2}})
    both = merged(
        base, {"tasks": BOTH, "rollout": {"prompts_per_step": 48}, "max_sampled_tokens": sum(EACH_ALONE.values())}
    )
    made = {
        ("both", "untrained"): merged(both, {"steps": 0}),
        ("both", "together"): both,
    }
    for task, tokens in EACH_ALONE.items():
        alone = {"tasks": {task: BOTH[task]}, "rollout": {"prompts_per_step": 24}, "max_sampled_tokens": tokens}
        made[task, "alone"] = merged(base, alone)
    return [Cell("several", *names, seed, config, start) for names, config in made.items()]


# ---------------------------------------------------------------------------------------------------------------------
# The sweeps that chose the settings
# ---------------------------------------------------------------------------------------------------------------------
def sweep(seed: int) -> list[Cell]:
    """Rates of every contender; on validation questions alone."""
    made = []
    for setting, base, contenders, start in (
        ("split_clues", SPLIT, SPLIT_CONTENDERS, split_start(seed)),
        ("relay", RELAY, RELAY_CONTENDERS, relay_start(seed)),
        ("drill", drill_play(4, 0.0), DRILL_CONTENDERS, drill_start(seed)),
        ("sudoku", SUDOKU, SUDOKU_CONTENDERS, sudoku_start(seed)),
    ):
        for name, changed in contenders.items():
            if name.endswith("untrained") or (name.rpartition("-")[2] in SHARED_RATES and setting != "drill"):
                continue
            for rate in RATES:
                config = merged(base, {"update": {"lr": rate}}, changed)
                made.append(Cell("sweep", setting, f"{name}@{rate:g}", seed, config, start))
    return made + (variations(seed) + baseline_sweep(seed) if seed == SWEEP_SEEDS[0] else [])


def baseline_sweep(seed: int) -> list[Cell]:
    """Rates of the contenders of :func:`baselines` on split_clues; those on sudoku take the rate of team + GRPO."""
    base, contenders, start = BASELINE_SETTINGS["split_clues"]
    return [
        Cell(
            "sweep",
            "split_clues",
            f"{name}@{rate:g}",
            seed,
            merged(base, {"update": {"lr": rate}}, changed),
            start(seed),
        )
        for name, changed in contenders.items()
        for rate in RATES
    ]


def variations(seed: int) -> list[Cell]:
    """Other settings than the rate, one at a time, of AT-GRPO with a tree on sudoku."""
    first = SUDOKU_CONTENDERS["team-at_grpo-first"]
    others: dict[str, Settings] = {
        "best": tree("best"),
        "mixed": tree("mixed"),
        "branches-4": {"rollout": {"branches": 4, "prompts_per_step": 48}},
        "branches-16": {"rollout": {"branches": 16, "prompts_per_step": 12}},
        "prompts-12": {"rollout": {"prompts_per_step": 12}},
        "prompts-48": {"rollout": {"prompts_per_step": 48}},
        "temperature-1.4": {"rollout": {"temperature": 1.4}},
        "constant-rate": {"update": {"min_lr_ratio": 1.0}},
        "warmup-5": {"update": {"warmup": 5}},
        "one-minibatch": {"update": {"num_minibatches": 1}},
        "no-scaling": {"credit": {"options": {"scale": "none"}}},
    }
    base, start = merged(SUDOKU, {"update": {"lr": 5e-4}}, first), sudoku_start(seed)
    return [
        Cell("sweep", "sudoku", f"team-at_grpo-first+{name}", seed, merged(base, changed), start)
        for name, changed in others.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The smallest cell, which answers no question: a test runs it again
# ---------------------------------------------------------------------------------------------------------------------
def smallest() -> Cell:
    """A drill of 2 calls that starts below the others, and that is trained for a few steps."""
    start = drill_start(SEEDS[0])
    start = replace(start, settings=merged(start.settings, {"steps": 100, "batch_size": 64}))
    short = {"max_sampled_tokens": 40_000, "update": {"lr": 1e-3}, "eval": {"every": 2, "num_prompts": 100}}
    config = merged(drill_play(1, 0.0), short, DRILL_CONTENDERS["team-grpo"])
    return Cell("smallest", "drill-2-calls", "team-grpo", SEEDS[0], config, start)


CELLS = [smallest(), *(cell for seed in SWEEP_SEEDS for cell in sweep(seed))]
QUESTIONS = (
    views,
    roles,
    drill,
    sudoku,
    plan_path,
    sokoban,
    code_duel,
    stability,
    rae,
    curriculum,
    drawn,
    baselines,
    rules,
    observations,
    several,
    sub_agents,
    haggle,
    real,
)
CELLS += [cell for seed in SEEDS for cells in QUESTIONS for cell in cells(seed)]

assert len({cell.name for cell in CELLS}) == len(CELLS), "each cell needs another name"
