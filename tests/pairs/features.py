"""The table of features: what each of its values adds to a config. A new feature is a line of :data:`FEATURES`.

The first value of a feature is the one that other tests mostly run. Credit rules, losses, matchmakers and signals come
from their registries. A key that no feature sets joins by itself, with its default and another value of its type
(:func:`by_keys`), or is in :data:`ELSEWHERE`, with the reason.
"""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from turnwise.credit import registry as rules
from turnwise.tasks.tiny import CHAT_TEMPLATE
from turnwise.train.config.schema import TrainConfig
from turnwise.train.health.signals import SIGNALS
from turnwise.train.league.league import MATCHMAKERS
from turnwise.train.terms.loss_types import registry as losses

from ..config_keys import another, choices_of, keys_of
from ..families import save_families

Fragment = dict[str, Any]
"""Dotted config keys and their values."""


@cache
def files() -> dict[str, str]:
    """A folder with a small model of another tokenizer and chat template than the tiny ones, and another template."""
    folder = tempfile.TemporaryDirectory(prefix="family-")
    atexit.register(folder.cleanup)
    template = Path(folder.name, "template.jinja")
    template.write_text("<|system|>Hi<|end|>" + CHAT_TEMPLATE)
    return {"FAMILY": save_families(Path(folder.name))[1], "TEMPLATE": str(template)}


SUMS = {"task": "pair_tasks:Sums", "task_options": {"max_tokens": 6}}
KUHN = {"task": "kuhn_poker", "task_options": {"max_tokens": 6}}
CLUES = {"task": "split_clues", "task_options": {"digits": 2}}
SEVERAL = {
    "tasks": {
        "sums": {"task": "pair_tasks:Sums", "options": {"max_tokens": 4}},
        "words": {"task": "pair_tasks:Words", "options": {"max_tokens": 8}, "weight": 2},
    }
}
AGENT = {
    "task": "gateway:pair_tasks:agent",
    "task_options": {"max_tokens": 4, "replayable": True},
    # Agents ask over HTTP, so a clock decides which calls share a batch, and a batch decides how sums are rounded.
    "rollout.max_concurrency": 1,
}

LAST = {"pair_tasks:Sums": "checker", "kuhn_poker": "player1", "split_clues": "writer", "": "critic"}
FIRST = {"pair_tasks:Sums": "solver", "kuhn_poker": "player0", "split_clues": "reader", "": "writer"}


REWARDS = {"game": "payoff", "clues": "solved", "agent": "reported_reward"}
"""A reward function of tasks, others have ``right``."""


def _kl(**settings: Any) -> Fragment:
    return {f"loss.kl.{key}": value for key, value in {"coef": 0.2, **settings}.items()}


def _rule(rule: str, **options: Any) -> Fragment:
    return {"credit.rule": rule, **({"credit.options": options} if options else {})}


def _tree(**settings: Any) -> Fragment:
    return {"rollout.branches": 2, **{f"rollout.tree.{key}": value for key, value in settings.items()}}


def _teacher(**settings: Any) -> Fragment:
    own = {"policies.big.path": "tiny", "actors.LAST.teacher": "big"}
    return own | {f"distill.{key}": value for key, value in settings.items()}


RULE_OPTIONS: dict[str, Fragment] = {
    "constant": {"value": 0.5},
    "gdpo": {"rewards": {"REWARD": 1.0}},
    "levels": {"edges": []},
    "pass_at_k": {"k": 2},
}
LOSS_OPTIONS: dict[str, Fragment] = {"dro": {"beta": 0.1}}

FEATURES: dict[str, dict[str, Fragment]] = {
    "task": {"sums": SUMS, "game": KUHN, "clues": CLUES, "several": SEVERAL, "agent": AGENT},
    "tree": {
        "none": {},
        "first": _tree(select="first"),
        "best": _tree(select="best", score_by="return"),
        "mixed": _tree(select="mixed", best_share=0.7, branch_at=["LAST"]),
        "sample": _tree(select="sample", temperature=0.5),
        "all": _tree(select="none"),
        "beam": _tree(beam_width=2),
        "playouts": _tree(select="best", score_by="value", playouts=1),
    },
    "credit": {"task": {}} | {rule: _rule(rule, **RULE_OPTIONS.get(rule, {})) for rule in sorted(rules)},
    "reward": {
        "own": {},
        "mix": {"reward.alpha": 0.5, "reward.mode": "convex"},
        "difference": {"reward.difference": 0.5, "reward.mode": "weighted_sum"},
        "ramp": {"reward.turn_shaping": "ramp"},
        "discount": {"reward.turn_shaping": "discount", "reward.gamma": 0.5},
        "overlong": {"reward.overlong_buffer": 3, "reward.overlong_penalty": 0.5},
        "invalid": {"reward.invalid_cost": 0.5, "reward.turn_shaping": "none"},
        "threshold": {"reward.threshold": 0.5},
    },
    "policies": {
        "shared": {},
        "adapters": {"policy_sharing": "lora_per_actor"},
        "models": {"policy_sharing": "model_per_actor", "policies.default.optimizer": {"lr": 1e-3}},
        "adapter": {
            "policies.default.lora": {
                "rank": 2,
                "alpha": 4.0,
                "dropout": 0.1,
                "target_modules": ["q_proj", "down_proj"],
            },
            "policies.default.dropout": True,
        },
        "linear": {"policies.default.lora": {"rank": 2, "target_modules": "all-linear"}},
        "frozen": {"policies.ice": {"path": "tiny", "trainable": False}, "actors.FIRST.policy": "ice"},
        "families": {"policies.other.path": "FAMILY", "actors.FIRST.policy": "other"},
    },
    "template": {"own": {}, "file": {"policies.default.chat_template": "TEMPLATE"}},
    "teacher": {
        "none": {},
        "model": _teacher(coef=0.5),
        "top_k": _teacher(top_k=3),
        "reward": _teacher(add_to_reward=True),
        "self": {"actors.LAST.teacher": "default", "distill.hint": "best"},
        "hint": _teacher(hint="episode"),
    },
    "loss": {"default": {}}
    | {
        loss: {"loss.type": loss, **({"loss.options": LOSS_OPTIONS[loss]} if loss in LOSS_OPTIONS else {})}
        for loss in losses
        if loss != TrainConfig().loss.type
    },
    "aggregation": {
        "tokens": {},
        "rows": {"loss.aggregation": "seq-mean-token-mean"},
        "sums": {"loss.aggregation": "seq-mean-token-sum"},
        "norm": {"loss.aggregation": "seq-mean-token-sum-norm", "loss.max_length": 16},
        "actors": {"loss.aggregation": "agent-mean"},
    },
    "kl": {
        "none": {},
        "loss": _kl(estimator="k2", importance_weighted=True),
        "reward": _kl(apply_to="reward"),
        "target": _kl(target=0.01, horizon=10),
        "refresh": _kl(refresh_every=1, estimator="abs"),
        "k1": _kl(estimator="k1"),
        "k1+": _kl(estimator="k1+"),
        "k3+": _kl(estimator="k3+"),
        "other": _kl() | {"policies.default.reference": "tiny"},
    },
    "entropy": {
        "none": {},
        "coefficient": {"loss.entropy_coef": 0.01},
        "target": {"loss.entropy_coef": 0.01, "loss.entropy_target": 2.0, "loss.entropy_step": 0.01},
    },
    "baseline": {
        "credit": {},
        "critic": {"loss.critic.lr": 0.01, "loss.critic.lam": 0.9},
        "token": {"loss.baseline": "optimal_token"},
    },
    "masks": {
        "none": {},
        "rejection": {"loss.masks.rejection": {"seq-mean-k1": [0.5, 2.0]}, "update.old_logprobs": "recompute"},
        "drift": {"loss.masks.off_policy": 0.1, "loss.masks.second_moment": 0.001},
        "entropy": {"loss.masks.top_entropy": 0.4},
    },
    "observations": {"no": {}, "yes": {"loss.observation_coef": 0.05}},
    "correction": {
        "none": {},
        "token": {"loss.importance_correction": {"level": "token"}, "update.old_logprobs": "recompute"},
        "row": {
            "loss.importance_correction": {"level": "sequence", "cap": 2.0, "bounds": [0.1, 10.0]},
            "update.old_logprobs": "recompute",
        },
    },
    "updates": {"one": {}, "several": {"update.ppo_epochs": 2, "update.num_minibatches": 2}},
    "layout": {
        "auto": {},
        "trie": {"update.sequence_layout": "trie"},
        "packed": {"update.sequence_layout": "packed"},
        "padded": {"update.sequence_layout": "padded", "update.micro_batch_tokens": 64},
    },
    "dtype": {"float32": {}, "bfloat16": {"policies.default.dtype": "bfloat16"}},
    "memory": {"all": {}, "recomputed": {"policies.default.gradient_checkpointing": True}},
    "dropout": {"off": {}, "on": {"policies.default.dropout": True}},
    "optimizer": {
        "plain": {},
        "schedule": {
            "update.schedule": "linear",
            "update.min_lr_ratio": 0.1,
            "update.warmup": 1,
            "update.weight_decay": 0.1,
            "update.betas": [0.8, 0.9],
            "update.max_grad_norm": 0.5,
        },
    },
    "loop": {
        "sync": {},
        "ahead": {"loop.max_staleness": 1, "loop.deterministic": True},
        "clock": {"loop.max_staleness": 1, "loop.in_flight_updates": True, "rollout.oversample": 1.5},
    },
    "filter": {
        "all": {"filter.drop_zero_advantage": False},
        "zero": {"filter.drop_zero_advantage": True},
        "cut": {"filter.drop_truncated": True},
        "long": {"filter.max_length": 60},
        "draws": {"filter.dynamic_sampling_rounds": 1},
    },
    "curriculum": {
        "task": {},
        "learnability": {
            "curriculum.sampling": "learnability",
            "curriculum.pool": 8,
            "curriculum.uniform": 0.5,
            "curriculum.window": 4,
        },
    },
    "phases": {
        "none": {},
        "two": {"phases": [{"train": ["FIRST_POLICY"], "steps": 1}, {"train": ["LAST_POLICY"], "steps": 1}]},
    },
    "validation": {
        "none": {},
        "every": {"eval.every": 1, "checkpoint.keep_best": True, "eval.patience": 5},
        "parts": {"eval.every": 1, "eval.ablate": True},
        "target": {"eval.every": 1, "eval.target_success": 1.0, "eval.hold": 3, "eval.num_prompts": 2},
        "solved": {"eval.exploitability_every": 1},
    },
    "episodes": {"whole": {}, "saved": {"checkpoint.save_running_episodes": True}},
    "record": {"full": {}, "short": {"log.record_for_replay": False}},
    "limit": {"steps": {}, "tokens": {"max_sampled_tokens": 10_000}, "seconds": {"max_seconds": 600.0}},
    "league": {"none": {}}
    | {
        name: {
            "league": {"share": 0.5, "every": 1, "size": 2, "opponents_per_step": 1},
            "league.matchmaker": name,
            "league.options": {},
        }
        for name in MATCHMAKERS
    },
    "signals": {"none": {}}
    | {
        name: {"health.window": 2, "health.signals": {name: {}, "entropy": {"threshold": 0.01}}}
        for name in SIGNALS
        if name != "entropy"
    },
    "start": {
        "cold": {},
        "warm": {"warm_start": {"steps": 1, "batch_size": 4, "lr": 1e-3}},
        "measured": {
            "warm_start": {
                **{"steps": 3, "batch_size": 80, "warmup": 1, "shuffle": False, "held_out": 32, "check_every": 2},
                **{"target_reproduced": 1.0, "target_loss": 0.0, "min_entropy": 1e-6, "patience": 2},
            }
        },
    },
    "privacy": {"no": {}, "checked": {"rollout.check_private": True}},
    "kept": {
        "all": {},
        "paper": {"rollout.top_p": 0.9, "rollout.top_k": 20, "rollout.temperature": 1.5},
        "likely": {"rollout.min_p": 0.5},
    },
    "sampling": {"plain": {}, "cooler": {"rollout.temperature": 0.8, "rollout.max_concurrency_per_actor": {"LAST": 2}}},
    "sizes": {
        "small": {},
        "odd": {
            **{"rollout.prompts_per_step": 3, "rollout.group_size": 3, "rollout.max_concurrency": 2},
            **{"rollout.max_batch_rows": 3, "update.lr": 5e-3, "log.rollouts_per_step": 200},
        },
    },
    "calls": {"fixed": {}, "auto": {"rollout.max_concurrency": "auto"}},
    "patience": {
        "default": {},
        "short": {
            **{"rollout.timeout": 60.0, "rollout.answer_timeout": 30.0, "rollout.failure_threshold": 0.25},
            **{"update.max_nonfinite_updates": 1, "sharding.timeout": 200.0},
        },
    },
    "shards": {
        "one": {},
        "groups": {"sharding.parallel": True},
        "copies": {"sharding.replicas": 2, "sharding.compute_dtype": "float32"},
        "narrow": {"sharding.compute_dtype": "bfloat16"},
    },
}

BASE: Fragment = {
    "seed": 1,
    "threads": 1,
    "steps": 2,
    "device": "cpu",
    "policies.default.path": "tiny",
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_concurrency": 8,
    "update.lr": 1e-3,
    "eval.num_prompts": 1,
    "log.progress": False,
    "log.rollouts_per_step": 100,
    "health.start_questions": 0,
    "checkpoint.every": 1,
    "checkpoint.minutes": 0,
    "checkpoint.keep_last": 5,
}

ELSEWHERE = {
    "where and with what a run computes": ("run_dir", "code", "resume", "device", "threads", "gateway"),
    "these runs are compared, with those of another seed or other lengths": ("seed", "steps", "checkpoint"),
    "the actors of these tasks have limits of their own": ("rollout.max_tokens",),
    "a GPU or a server": ("rollout.client", "rollout.vllm", "rollout.server", "learner", "cluster", "sharding.offload"),
    "other models": ("rollout.routing_replay", "policies.default.path"),
    "a task with levels": ("curriculum.gate",),
    "a file of rows": ("warm_start.data", "warm_start.min_reward"),
    "random weights solve nothing": ("health.start_questions", "health.start_samples"),
    "a policy that trains": ("policies.default.trainable", "policies.default.dtype = float16"),
    "other programs read them": ("log.tensorboard", "log.wandb", "log.prometheus", "log.progress"),
}
"""Sections, keys and choices that no feature sets, by reason."""


def set_by(fragment: Fragment) -> dict[str, Any]:
    """Return the keys that a fragment sets with their values, also those in tables that it sets as a whole."""
    found = dict(fragment)
    for key, value in fragment.items():
        if isinstance(value, dict):
            found |= set_by({f"{key}.{name}": each for name, each in value.items()})
    return found


def default_of(key: str) -> Any:
    value: Any = TrainConfig()
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def is_elsewhere(key: str) -> bool:
    return any(key == each or key.startswith(each + ".") for keys in ELSEWHERE.values() for each in keys)


def keys_in(features: dict[str, dict[str, Fragment]]) -> set[str]:
    """The keys that the values of ``features`` set, and the sections of these keys."""
    keys = {key for values in features.values() for fragment in values.values() for key in set_by(fragment)}
    return {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2)}


def by_keys(features: dict[str, dict[str, Fragment]]) -> dict[str, dict[str, Fragment]]:
    """Return a feature for each key that none of ``features`` sets: its default, and other values of its type."""
    known = keys_in(features)
    found: dict[str, dict[str, Fragment]] = {}
    for key, kind in keys_of().items():
        if key not in known and not is_elsewhere(key):
            others = [each for each in choices_of(kind) if each != default_of(key)] or [another(kind, default_of(key))]
            found[key] = {"default": {}} | {str(other): {key: other} for other in others}
    return found


FEATURES |= by_keys(FEATURES)


def config_of(row: dict[str, str]) -> dict[str, Any]:
    """Return the config of a row, which maps features to the names of their values; others have their first value."""
    chosen = {name: row.get(name, next(iter(values))) for name, values in FEATURES.items()}
    task = FEATURES["task"][chosen["task"]].get("task", "")
    first, last = FIRST.get(task, "solver"), LAST.get(task, "checker")
    one_each = chosen["policies"] in ("adapters", "models")
    words = {
        "FIRST": first,
        "LAST": last,
        "REWARD": REWARDS.get(chosen["task"], "right"),
        "FIRST_POLICY": first if one_each else "default",
        "LAST_POLICY": last if one_each else "default",
    }
    if chosen["policies"] == "families" or chosen["template"] == "file":
        words |= files()
    config: dict[str, Any] = {}
    for fragment in (BASE, *(FEATURES[name][value] for name, value in chosen.items())):
        for key, value in fragment.items():
            *path, end = (words.get(part, part) for part in key.split("."))
            section = config
            for part in path:
                section = section.setdefault(part, {})
            value = _named(value, words)
            section[end] = {**section.get(end, {}), **value} if isinstance(value, dict) else value
    return config


def _named(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {words.get(key, key): _named(each, words) for key, each in value.items()}
    if isinstance(value, list):
        return (
            list(dict.fromkeys(words.get(v, v) for v in value))
            if all(isinstance(v, str) for v in value)
            else [_named(v, words) for v in value]
        )
    return words.get(value, value) if isinstance(value, str) else value


TASKS = '''
"""Tasks of the pairs: rewards that random weights vary, in two turns."""

from turnwise import MultiTurnEpisode, Rubric
from turnwise.arena import RewardParts
from turnwise.tasks import OwnTask

actors = ["solver", "checker"]
questions = [f"{a} + {b}" for a in range(8) for b in range(8)]


def right(extras):
    return sum(text.count("e") + text.count("1") for text in extras["texts"]) / 8


class Sum(MultiTurnEpisode):
    episode_type, actors, max_turns, rubric = "sums", ("solver", "checker"), 1, Rubric([right])

    def get_prompt(self, artifact):
        return artifact["question"]

    def env_response(self, state, arena, artifact):
        state.data.setdefault("texts", []).append(state.last_completion_text)
        return "Go on."

    def reward_parts(self, state, arena, artifact):
        text = state.last_completion_text
        return RewardParts(text.count("e") / 4, len(text) / 40, 1.0 if len(text) > 6 else 0.0)

    def team_value(self, state, arena, artifact):
        return len("".join(state.data.get("texts", []))) / 40

    def get_extras(self, state):
        return {"texts": list(state.data.get("texts", []))}


class Sums(OwnTask):
    name, success_metric = "sums", "right/solver"
    system_prompts = {"solver": "Answer.", "checker": "Check."}

    def questions(self):
        return [f"{q} = ?" for q in questions]

    def episodes(self, tree=None):
        return {"sums": Sum(sampler=tree)}


class Word(Sum):
    episode_type, actors = "words", ("writer", "critic")


class Words(Sums):
    name, success_metric = "words", "right/writer"
    system_prompts = {"writer": "Write.", "critic": "Judge."}

    def episodes(self, tree=None):
        return {"words": Word(sampler=tree)}


async def agent(question, models):
    said = []
    for name in ("solver", "checker", "solver"):
        create = models[name].async_openai_client().chat.completions.create
        answer = await create(model=name, messages=[{"role": "user", "content": str(question)}])
        said.append(answer.choices[0].message.content or "")
    return sum(map(len, said)) / 40 + said[-1].count("e") / 4
'''
"""A module that rows name, written to a folder on the path."""
