"""What a training run can be told: nested pydantic models, one per room, read from TOML with dotted overrides.

The defaults are the settings that were vetted; unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from turnwise.naming import nearest


class ConfigError(ValueError):
    """A configuration that can't be used: the message names the key, its value and what was expected."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ModelConfig(_Section):
    """Weights and tokenizer. ``path`` is a folder or a hub name; ``"tiny"`` builds a model of about 1M parameters."""

    path: str = "tiny"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trainable: bool = True
    gradient_checkpointing: bool = False


class WarmStartConfig(_Section):
    """Supervised start on a task's demonstrations; ``steps = 0`` skips it."""

    steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=128, ge=1)
    lr: float = Field(default=2e-3, gt=0)
    warmup: int = Field(default=20, ge=0)


class RolloutConfig(_Section):
    """What one step samples: ``questions`` × ``copies`` episodes, each a tree of ``branches`` where branches > 1."""

    questions: int = Field(default=32, ge=1)
    copies: int = Field(default=1, ge=1)
    branches: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, ge=1)
    max_concurrency: int = Field(default=1024, ge=1)
    max_batch_rows: int = Field(default=512, ge=1)
    timeout: float | None = Field(default=None, gt=0)
    failure_threshold: float = Field(default=0.5, ge=0, le=1)


class CreditConfig(_Section):
    """The rule's name in ``turnwise.credit.registry`` and the arguments of its class."""

    rule: str = "at_grpo"
    options: dict[str, Any] = Field(default_factory=dict)


class LossConfig(_Section):
    """Arguments of ``turnwise.ops.policy_loss``; ``kl_coef`` 0 builds no reference model."""

    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    kl_coef: float = Field(default=0.0, ge=0)
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "agent-mean"
    ] = "token-mean"
    max_length: int | None = Field(default=None, ge=1, description="the constant of seq-mean-token-sum-norm")

    @model_validator(mode="after")
    def _needs_its_constant(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_length is None:
            raise ValueError("aggregation 'seq-mean-token-sum-norm' needs max_length, the constant to divide by")
        return self


class UpdateConfig(_Section):
    """How a batch becomes optimizer steps. ``micro_batch_tokens`` bounds the padded tokens of one forward pass."""

    ppo_epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=16384, ge=1)
    lr: float = Field(default=1e-6, gt=0)
    min_lr_ratio: float = Field(default=1.0, ge=0, le=1)
    warmup: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0)
    old_logprobs: Literal["rollout", "recompute"] = "rollout"


class EvalConfig(_Section):
    """Validation every ``every`` steps (0: never); held-out questions are for the end of the run."""

    every: int = Field(default=0, ge=0)
    questions: int = Field(default=200, ge=1)
    stop_at: float | None = Field(default=None, gt=0, le=1, description="end training at this validation success")

    @model_validator(mode="after")
    def _stops_at_what_it_measures(self) -> Self:
        if self.stop_at is not None and not self.every:
            raise ValueError("stop_at needs every > 0: without validation nothing is ever reached")
        return self


class CheckpointConfig(_Section):
    """A checkpoint every ``every`` steps (0: only at the end and on Ctrl-C); the newest ``keep`` stay.

    With ``episodes`` every multi-turn episode is kept after each turn, under ``episodes/`` of the run folder: a run
    that ends in the middle of a batch goes on in the middle of its trees. For long episodes; it writes a file per turn.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    episodes: bool = False


class TrainConfig(_Section):
    """One run. ``TrainConfig(task="sudoku", steps=10)``, or :func:`load_config` from TOML."""

    task: str = "sudoku"
    task_options: dict[str, Any] = Field(default_factory=dict)
    run_dir: Annotated[Path, BeforeValidator(str)] = Path("runs/default")
    seed: int = 0
    steps: int = Field(default=100, ge=0)
    max_seconds: float | None = Field(default=None, gt=0, description="stop after the step that crosses it")
    max_sampled_tokens: int | None = Field(default=None, gt=0, description="stop after the step that crosses it")
    threads: int | None = Field(default=None, ge=1, description="torch threads; default: torch's own choice")
    resume: bool = True
    policies: dict[str, ModelConfig] = Field(default_factory=lambda: {"default": ModelConfig()}, min_length=1)
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    credit: CreditConfig = CreditConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> TrainConfig:
    """Read a TOML file (``None``: defaults only) and apply dotted overrides such as ``("update.lr", "1e-4")``.

    Override values given as text are read as Python literals where they can be, else kept as text.
    Raises :class:`ConfigError` naming the file or key.
    """
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"config file {str(file)!r} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {str(file)!r} can't be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"config file {str(file)!r} is not valid TOML: {error}") from None
    items = overrides.items() if isinstance(overrides, Mapping) else overrides
    for key, value in items:
        _put(data, key, _literal(value))
    return config_from_dict(data)


def config_from_dict(data: Mapping[str, Any]) -> TrainConfig:
    """Validate plain data; every problem becomes one line of a :class:`ConfigError`."""
    try:
        return TrainConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    special = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in special:
        return special[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _put(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``data[...][leaf]``. ``warm-start.steps`` is ``warm_start.steps``, but a policy's name is the user's own."""
    *parents, leaf = dotted.split(".") if dotted.startswith("policies.") else dotted.replace("-", "_").split(".")
    for name in parents:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {dotted!r}: {name!r} is not a section")
    data[leaf] = value


def _explain(problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return f"unknown config key {'.'.join(path)!r}; {nearest(path[-1], _known_keys(path[:-1]))}"
    return f"config key {'.'.join(path)!r} = {problem['input']!r}: {problem['msg']}"


def _known_keys(parents: list[str]) -> list[str]:
    if parents[:1] == ["policies"]:  # a table with names of the user's choice
        return list(ModelConfig.model_fields)
    section: type[BaseModel] = TrainConfig
    for name in parents:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel), f"{name} is no section"
        section = annotation
    return list(section.model_fields)


def to_toml(config: TrainConfig) -> str:
    """The resolved configuration as TOML, which :func:`load_config` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
