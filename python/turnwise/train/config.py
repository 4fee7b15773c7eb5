"""What a training run can be told: nested pydantic models, one per room.

The defaults are the settings that were vetted; unknown keys are refused with the nearest known name.
:mod:`turnwise.train.config_files` reads them from TOML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from turnwise.train.config_base import Section, Share
from turnwise.train.config_selfplay import HealthConfig, LeagueConfig


# ---------------------------------------------------------------------------------------------------------------------
# Who trains
# ---------------------------------------------------------------------------------------------------------------------
class LoraConfig(Section):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) in place of the weights: ``W + alpha / rank * B A``."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


class OptimizerConfig(Section):
    """AdamW and its schedule: ``warmup`` updates up to ``lr``, then down to ``min_lr_ratio`` of it at the run's end."""

    lr: float = Field(default=1e-6, gt=0)
    schedule: Literal["cosine", "linear"] = "cosine"
    min_lr_ratio: float = Field(default=1.0, ge=0, le=1)
    warmup: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0)


class PolicyConfig(Section):
    """Weights and tokenizer. ``path`` is a folder or a hub name; ``"tiny"`` builds a model of about 1M parameters.

    With ``lora`` the policy is an adapter; the adapters of one ``path`` share one copy of the base. ``optimizer``
    overrides single keys of ``[update]`` for this policy. ``reference`` is what a KL term holds it to: a folder or a
    hub name, by default the weights that it starts from, which for an adapter are the base with adapters off.
    """

    path: str = "tiny"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trainable: bool = True
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None
    reference: str | None = None
    optimizer: dict[str, Any] = Field(default_factory=dict)


class PhaseConfig(Section):
    """For ``steps`` steps only the policies in ``train`` are updated; phases follow one another, then begin anew."""

    train: list[str] = Field(min_length=1)
    steps: int = Field(ge=1)


class WarmStartConfig(Section):
    """Supervised start; ``steps = 0`` skips it.

    Rows are the task's demonstrations, or those of ``data``: a JSONL of ``{"messages": [...], "completion": "..."}``,
    or the ``rollouts.jsonl`` of another run, of which steps rewarded with at least ``min_reward`` are taken.
    """

    steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=128, ge=1)
    lr: float = Field(default=2e-3, gt=0)
    warmup: int = Field(default=20, ge=0)
    data: str | None = None
    min_reward: float | None = None


# ---------------------------------------------------------------------------------------------------------------------
# What a step samples, and what becomes of it
# ---------------------------------------------------------------------------------------------------------------------
class VLLMConfig(Section):
    """For the clients ``vllm`` and ``vllm-process``: the memory for keys and values, in GiB, of each engine, the
    seconds that one completion may take before it is given up, and further fields of vLLM's ``EngineArgs``.
    ``transfer`` is the way that weights take to the processes of ``vllm-process``: ``auto``, ``shared_memory``,
    ``safetensors``, ``gloo``, and on GPUs ``ipc`` and ``nccl``."""

    kv_cache_gb: float = Field(default=1.0, gt=0)
    request_timeout: float | None = Field(default=None, gt=0)
    engine_args: dict[str, Any] = Field(default_factory=dict)
    transfer: str = "auto"


class ServerConfig(Section):
    """For ``rollout.client = "vllm-server"``: servers that ``turnwise serve`` started.

    ``url`` is one, or one for each policy, as policies without a common base need. ``api_key_env`` names the
    environment variable with their key, ``api_key_file`` a file with it; that of a server of this user on this host is
    found by itself. One answer may take ``timeout`` seconds, and a server that starts again is waited for as long; one
    that isn't there at the start of the run for ``wait`` seconds. Other failures are tried ``retries`` times more.
    Weights go through files in ``folder``, which
    the servers of other hosts see too; without one through memory of this host, or by another ``transfer``: ``gloo``
    and ``nccl`` reach other hosts.
    """

    url: str | dict[str, str] = "http://127.0.0.1:8000"
    api_key_env: str | None = None
    api_key_file: str | None = None
    timeout: float = Field(default=600.0, gt=0)
    wait: float = Field(default=0.0, ge=0)
    retries: int = Field(default=5, ge=0)
    folder: str | None = None
    transfer: str = "auto"


def _share(value: Any) -> float | list[float]:
    pair = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(pair) != 2 or not all(type(share) in (int, float) and 0 <= share <= 1 for share in pair):
        raise ValueError("expected a number from 0 to 1, or a pair of them: at the first and at the last step")
    return [float(share) for share in pair] if isinstance(value, list | tuple) else float(value)


class TreeConfig(Section):
    """How a tree goes on from its branches: the arguments of :class:`turnwise.arena.TreeSampler`.

    ``select`` says which branch does: the ``best``, the ``first``, a ``sample`` (softmax at ``temperature``), or with
    ``none`` all of them, each to an end of its own. ``mixed`` is the best with probability ``best_share``, else any of
    them; a pair such as ``[1.0, 0.0]`` is the share at the first and at the last of the run's steps. ``survivors`` > 1
    is a beam search of that width, in which each survivor gets ``rollout.branches`` anew. ``select_by`` is what they
    are compared by: the action's ``reward``, the ``return`` so far, or the ``value``, which ``playouts`` estimate: so
    many more plays to the end from each state, which never train. ``branch_at`` limits branching to these actors.
    """

    select: Literal["best", "first", "mixed", "sample", "none"] = "best"
    best_share: Annotated[float | list[float], PlainValidator(_share)] = 0.5
    survivors: int = Field(default=1, ge=1)
    select_by: Literal["reward", "return", "value"] = "reward"
    temperature: float = Field(default=1.0, gt=0)
    playouts: int = Field(default=0, ge=0)
    branch_at: list[str] | None = None


class PlayLimits(Section):
    """What bounds the play of a step: ``max_concurrency`` model calls at once, ``quotas`` of them for single actors, by
    their names, ``timeout`` seconds for an episode, and the share of episodes that may fail.
    """

    max_concurrency: int = Field(default=1024, ge=1)
    quotas: dict[str, Annotated[int, Field(ge=1, strict=True)]] = Field(default_factory=dict)
    timeout: float | None = Field(default=None, gt=0)
    failure_threshold: float = Field(default=0.5, ge=0, le=1)


class RolloutConfig(PlayLimits):
    """What one step samples: ``questions`` × ``copies`` episodes, each a tree of ``branches`` where branches > 1.

    ``tree`` says what becomes of the branches.
    ``client`` computes at most ``max_batch_rows`` completions at a time: ``transformers`` runs the models as they are,
    ``vllm`` needs vLLM and is the fast one on a GPU, ``vllm-process`` runs it in processes beside the trainer's, and
    ``vllm-server`` asks servers of it.
    ``check_private`` stops the run when an actor is shown another one's private text, or would train on its tokens.
    """

    questions: int = Field(default=32, ge=1)
    copies: int = Field(default=1, ge=1)
    branches: int = Field(default=1, ge=1)
    tree: TreeConfig = TreeConfig()
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, ge=1)
    client: Literal["transformers", "vllm", "vllm-process", "vllm-server"] = "transformers"
    vllm: VLLMConfig = VLLMConfig()
    server: ServerConfig = ServerConfig()
    max_batch_rows: int = Field(default=512, ge=1)
    check_private: bool = False


class LoopConfig(Section):
    """How far sampling may run ahead of training.

    ``max_staleness`` 0 is synchronous: sample, train, sample. With k > 0 both go on at once, and what trains was
    sampled by weights at most k versions old: the sampler waits rather than fall behind. ``in_flight`` hands new
    weights to the sampler in the middle of its completions. ``deterministic`` makes the order of events that of the
    steps and not of the clock (each batch sampled by weights exactly k versions old), so that a resumed run repeats bit
    for bit.
    """

    max_staleness: int = Field(default=0, ge=0)
    in_flight: bool = False
    deterministic: bool = False

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.in_flight and self.deterministic:
            raise ValueError("in_flight changes weights by the clock, so it can't be deterministic: drop one of them")
        if self.in_flight and not self.max_staleness:
            raise ValueError("in_flight needs max_staleness > 0: nothing is sampled while weights change otherwise")
        return self


DEFAULT_CREDIT = "at_grpo"
"""The rule of a task that names none as its ``credit_rule``."""


class CreditConfig(Section):
    """The rule's name in ``turnwise.credit.registry``, or ``"module:Class"``, and the arguments of its class.

    ``"task"`` is the rule that the task names: ``"rae"`` for games of two in self-play, else ``"at_grpo"``.
    """

    rule: str = "task"
    options: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Section):
    """What is added to rewards before credit.

    A completion that comes within ``overlong_buffer`` tokens of its limit loses up to ``overlong_penalty``, linearly
    (soft overlong punishment, https://arxiv.org/abs/2503.14476, eq. 13).
    """

    overlong_buffer: int = Field(default=0, ge=0)
    overlong_penalty: float = Field(default=1.0, ge=0)


class FilterConfig(Section):
    """Which samples train. ``zero_advantage`` drops those of tied groups, ``truncated`` those cut off by the token
    limit, ``max_length`` those with more tokens in prompt and completion. All of them count in their group's
    statistics.

    ``resample`` draws up to so many more batches of questions in a step until as many questions have an advantage as
    the step asked for (dynamic sampling, https://arxiv.org/abs/2503.14476, section 3.2).
    """

    zero_advantage: bool = True
    truncated: bool = False
    max_length: int | None = Field(default=None, ge=2)
    resample: int = Field(default=0, ge=0)


class KLConfig(Section):
    """A KL term to the reference; ``coef`` 0 builds no reference model.

    ``place`` is the loss, or the reward: then ``coef`` times the k1 estimate of each token is taken from the row's
    reward before credit. With ``target``, in nats per token, the coefficient adapts: it grows by
    ``clip(kl / target - 1, ±0.2)`` per ``horizon`` samples (https://arxiv.org/abs/1909.08593, section 2.2).
    ``importance_weighted`` multiplies a term in the loss by the importance ratio: see ``turnwise.ops.KL``.
    """

    coef: float = Field(default=0.0, ge=0)
    kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    importance_weighted: bool = False
    place: Literal["loss", "reward"] = "loss"
    target: float | None = Field(default=None, gt=0)
    horizon: int = Field(default=10_000, ge=1)


class CorrectionConfig(Section):
    """Truncated importance weights for what other weights sampled: see ``turnwise.ops.ImportanceCorrection``."""

    level: Literal["token", "sequence"] = "token"
    cap: float = Field(default=2.0, gt=0)
    bounds: tuple[float, float] | None = None


class LossConfig(Section):
    """The policy loss: its name in ``turnwise.train.losses``, or ``"module:Class"``, and what goes with it.

    ``options`` are the arguments of its class, such as ``{low = 0.2, high = 0.28}``. ``entropy_coef`` times the mean
    entropy is taken from the loss.
    """

    kind: str = "clip-higher"
    options: dict[str, Any] = Field(default_factory=dict)
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "agent-mean"
    ] = "token-mean"
    max_length: int | None = Field(default=None, ge=1, description="the constant of seq-mean-token-sum-norm")
    kl: KLConfig = KLConfig()
    entropy_coef: float = 0.0
    correction: CorrectionConfig | None = None

    @model_validator(mode="after")
    def _needs_its_constant(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_length is None:
            raise ValueError("aggregation 'seq-mean-token-sum-norm' needs max_length, the constant to divide by")
        return self


class UpdateConfig(OptimizerConfig):
    """How a batch becomes optimizer steps. ``micro_batch_tokens`` bounds the tokens of one forward pass.

    ``old_logprobs`` are what the ratio is taken to: the sampler's own, or the trainer's before its first update of the
    batch, which ``loss.correction`` needs. ``layout`` is how rows pass through the model, which changes no gradient: as
    a ``trie``, in which what they begin with in common is computed once, ``packed`` one after the other, ``padded``, or
    ``auto``: a trie where it saves a tenth of the tokens, else packed, else padded, as the model allows. An update
    whose loss or gradient is not finite is skipped and counted; the run stops at the next after ``max_skipped`` in a
    row, with 0 at the first.
    """

    ppo_epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=16384, ge=1)
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    layout: Literal["auto", "trie", "packed", "padded"] = "auto"
    max_skipped: int = Field(default=3, ge=0)


# ---------------------------------------------------------------------------------------------------------------------
# Around training
# ---------------------------------------------------------------------------------------------------------------------
class EvalConfig(Section):
    """Validation every ``every`` steps (0: never); held-out questions are for the end of the run.

    ``questions`` of each are asked, by default 200, or all that the task has of them where these are fewer.
    Training ends early at a validation success of ``stop_at``, or after ``patience`` validations without a new best.
    Every ``exploitability`` steps (0: never) the exact exploitability is measured, in games that are small enough.
    """

    every: int = Field(default=0, ge=0)
    questions: int | None = Field(default=None, ge=1)
    stop_at: float | None = Field(default=None, gt=0, le=1, description="end training at this validation success")
    patience: int | None = Field(default=None, ge=1)
    exploitability: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _stops_at_what_it_measures(self) -> Self:
        for name in ("stop_at", "patience"):
            if getattr(self, name) is not None and not self.every:
                raise ValueError(f"{name} needs every > 0: without validation nothing is ever reached")
        return self


class CheckpointConfig(Section):
    """A checkpoint every ``every`` steps (0: only at the end and on Ctrl-C); the newest ``keep`` stay.

    With ``best`` that of the best validation stays as well. With ``episodes`` every multi-turn episode is kept after
    each turn, under ``episodes/`` of the run folder: a run that ends in the middle of a batch goes on in the middle of
    its trees. For long episodes; it writes a file per turn.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    best: bool = False
    episodes: bool = False


class LogConfig(Section):
    """Where metrics go besides ``metrics.jsonl``; ``wandb`` is the name of a project at Weights & Biases.

    ``rollouts_per_step`` episodes of each step are written to ``rollouts.jsonl``, with ``replay`` so that ``turnwise
    replay`` can run them again.
    """

    tensorboard: bool = False
    wandb: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    rollouts_per_step: int = Field(default=1, ge=0)
    replay: bool = True
    progress: bool = True


class TrainConfig(Section):
    """One run. ``TrainConfig(task="sudoku", steps=10)``, or :func:`~turnwise.train.config_files.load_config` from TOML.

    ``specialization`` says whose weights the actors of the task play with: ``"prompt"`` as the task has it (all of them
    ``policies.default``, unless it says otherwise); ``"lora"`` each with an adapter of its own over
    ``policies.default``; ``"full"`` each with a copy of its own. ``actors`` names the policy of single actors, and goes
    before both.
    """

    task: str = "sudoku"
    task_options: dict[str, Any] = Field(default_factory=dict)
    run_dir: Annotated[Path, BeforeValidator(str)] = Path("runs/default")
    seed: int = Field(default=0, ge=0, lt=2**63, description="below 2**63: TOML and torch hold no larger one")
    steps: int = Field(default=100, ge=0)
    max_seconds: float | None = Field(default=None, gt=0, description="stop after the step that crosses it")
    max_sampled_tokens: int | None = Field(default=None, gt=0, description="stop after the step that crosses it")
    device: str = Field(default="auto", description="cpu, cuda, cuda:1; auto: cuda where there is a GPU")
    threads: int | None = Field(default=None, ge=1, description="torch threads; default: torch's own choice")
    resume: bool = True
    specialization: Literal["prompt", "lora", "full"] = "prompt"
    actors: dict[str, str] = Field(default_factory=dict)
    policies: dict[str, PolicyConfig] = Field(default_factory=lambda: {"default": PolicyConfig()}, min_length=1)
    phases: list[PhaseConfig] = Field(default_factory=list)
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    loop: LoopConfig = LoopConfig()
    credit: CreditConfig = CreditConfig()
    reward: RewardConfig = RewardConfig()
    filter: FilterConfig = FilterConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    league: LeagueConfig = LeagueConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()

    def optimizer_of(self, policy: str) -> OptimizerConfig:
        """``[update]`` with the overrides of ``policies.<policy>.optimizer``."""
        names = OptimizerConfig.model_fields
        shared = {name: getattr(self.update, name) for name in names}
        return OptimizerConfig.model_validate({**shared, **self.policies[policy].optimizer})
