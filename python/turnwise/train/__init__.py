"""The training loop and its rooms: config, model, update, checkpoints, evaluation, logs, league, health.

Read in this order: loop, last_step, loss_terms, group_queue, callbacks, validate, run_folder,
resume, resume_queue, resume_stores.
May import: types, utils, settings, samples, credit, arena, train.
"""

from turnwise.utils.registry import require

require("turnwise.train", "numpy", "torch", "transformers", "tokenizers", "safetensors", "pydantic", "rich")

from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.eval.ablate import EvalSet
from turnwise.train.eval.evaluate import Evaluation, evaluate
from turnwise.train.log.run_log import RunLog
from turnwise.train.loop import Trainer
from turnwise.train.model.loading import attach_adapters, build_policies
from turnwise.train.model.policy import Policy
from turnwise.train.update.sft import Demonstration, warm_start
from turnwise.train.validate import load_config

__all__ = [
    "ConfigError",
    "Demonstration",
    "EvalSet",
    "Evaluation",
    "Policy",
    "RunLog",
    "TrainConfig",
    "Trainer",
    "attach_adapters",
    "build_policies",
    "evaluate",
    "load_config",
    "warm_start",
]
