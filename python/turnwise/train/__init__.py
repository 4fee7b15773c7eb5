"""The training loop and its rooms: config, model, update, checkpoints, evaluation, logs, league, health.

Read in this order: loop, last_step, loss_terms, group_queue, callbacks, validate, run_folder, run_lock,
resume, resume_queue, resume_stores.
May import: types, utils, settings, samples, credit, arena, train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.utils.registry import names_on_use, require

require("turnwise.train", "numpy", "torch", "transformers", "tokenizers", "safetensors", "pydantic", "rich")

if TYPE_CHECKING:
    from turnwise.train.config.schema import TrainConfig as TrainConfig
    from turnwise.train.config.toml import ConfigError as ConfigError
    from turnwise.train.eval.ablate import EvalSet as EvalSet
    from turnwise.train.eval.evaluate import Evaluation as Evaluation
    from turnwise.train.eval.evaluate import evaluate as evaluate
    from turnwise.train.log.run_log import RunLog as RunLog
    from turnwise.train.loop import Trainer as Trainer
    from turnwise.train.model.loading import attach_adapters as attach_adapters
    from turnwise.train.model.loading import build_policies as build_policies
    from turnwise.train.model.policy import Policy as Policy
    from turnwise.train.update.sft import Demonstration as Demonstration
    from turnwise.train.update.sft import warm_start as warm_start
    from turnwise.train.validate import load_config as load_config

_HOMES = {
    "TrainConfig": "turnwise.train.config.schema",
    "ConfigError": "turnwise.train.config.toml",
    "EvalSet": "turnwise.train.eval.ablate",
    "Evaluation": "turnwise.train.eval.evaluate",
    "evaluate": "turnwise.train.eval.evaluate",
    "RunLog": "turnwise.train.log.run_log",
    "Trainer": "turnwise.train.loop",
    "attach_adapters": "turnwise.train.model.loading",
    "build_policies": "turnwise.train.model.loading",
    "Policy": "turnwise.train.model.policy",
    "Demonstration": "turnwise.train.update.sft",
    "warm_start": "turnwise.train.update.sft",
    "load_config": "turnwise.train.validate",
}

__all__ = [*sorted(_HOMES)]

__getattr__ = names_on_use(__name__, _HOMES)
