"""The trainer: batches, policies, losses, checkpoints, and the loop that ties them to an arena."""

from turnwise.train.config import TrainConfig
from turnwise.train.config_files import ConfigError, load_config
from turnwise.train.evaluate import Evaluation, evaluate
from turnwise.train.loop import EvalSet, Trainer
from turnwise.train.models import attach_adapters, build_policies
from turnwise.train.policy import Policy
from turnwise.train.run_log import RunLog
from turnwise.train.warm_start import Demonstration, warm_start

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
