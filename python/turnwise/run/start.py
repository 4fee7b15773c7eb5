"""The start of a run: the warm start of its models, and the questions on which its starting policy is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from turnwise.inference.common.hf_model import context_length
from turnwise.tasks import Task
from turnwise.tasks.several import SeveralTasks
from turnwise.train.checkpoint.warm_start import WarmStartSaver
from turnwise.train.config.policies import sharing
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.log.run_log import RunLog
from turnwise.train.update.held_out import HeldOutCheck
from turnwise.train.update.sft import WarmStart, grouped, warm_start
from turnwise.train.update.sft_data import Demonstration, fitting
from turnwise.train.update.sft_rows import SFTRow, SFTRows
from turnwise.types import Actor, ByPolicy, EpisodeRequest, Tokenizers
from turnwise.utils.memory import kept_memory
from turnwise.utils.signals import deferred_signals


def starting_questions(config: TrainConfig, task: Task) -> list[EpisodeRequest]:
    """Return the training questions of the check before the first step; none if ``health.start_questions`` is 0.

    Training draws its questions for step 1 and later, so those of step 0 are separate.
    """
    count = config.health.start_questions
    if not count:
        return []
    try:
        questions = task.requests(0, count, 1)
    except ValueError:  # the task has fewer questions, but at least those of one step
        questions = task.requests(0, min(count, config.rollout.prompts_per_step), 1)
    return [replace(request, timeout=config.rollout.timeout) for request in questions]


def run_warm_start(
    config: TrainConfig,
    rows: SFTRows,
    actors: Sequence[Actor],
    tokenizer: Tokenizers,
    models: dict[str, Any],
    log: RunLog,
    folder: Path | None = None,
) -> None:
    """Train each model on the rows of its actors; a shared base learns the rows of all policies that share it.

    ``tokenizer`` is that of all policies, or each policy's. Of several tasks, ``actors`` has the actors of each. With a
    ``folder`` it is saved there (:class:`WarmStartSaver`): a signal then ends the process after the step, and the next
    start goes on.
    """
    log.note(f"warm start on {rows.source}")
    with deferred_signals() if folder is not None else nullcontext(lambda: None) as asked:
        tokenizers = ByPolicy.of(tokenizer, "tokenizer")
        _warm_start_each(config, rows, actors, tokenizers, models, log, folder, asked)


def players_of(task: Task, actors: Sequence[Actor]) -> Sequence[Actor]:
    """Return the actors that demonstrations are of; of several tasks those of each."""
    if not isinstance(task, SeveralTasks):
        return actors
    return [actor for team in task.teams(actors).values() for actor in team.values()]


def _rows_of_models(
    config: TrainConfig, rows: SFTRows, actors: Sequence[Actor]
) -> Iterator[tuple[list[str], list[SFTRow]]]:
    """Yield the policies that share each model to be trained, with the rows that it learns."""
    policy_of = {actor.id: actor.policy for actor in actors}
    for names in sharing(config.policies, share_frozen=False):
        if any(config.policies[name].trainable for name in names):
            yield names, [row for row in rows.rows if row.actor is None or policy_of[row.actor] in names]


def check_targets(config: TrainConfig, rows: SFTRows, actors: Sequence[Actor]) -> None:
    """Raise :class:`ConfigError` for a target that is measured on held-out rows, where a model has too few."""
    for kept in filter(None, (kept for _, kept in _rows_of_models(config, rows, actors))):  # one without rows is noted
        prompts = [(row.actor, repr(row.prompt)) for row in kept]
        try:
            grouped(prompts, config.warm_start, np.random.default_rng(config.seed))
        except ValueError as error:
            raise ConfigError(f"config section 'warm_start': {error}") from None


def _warm_start_each(
    config: TrainConfig,
    rows: SFTRows,
    actors: Sequence[Actor],
    tokenizers: ByPolicy[Any],
    models: dict[str, Any],
    log: RunLog,
    folder: Path | None,
    asked: Callable[[], int | None],
) -> None:
    records: list[dict[str, Any]] = []
    for names, kept in _rows_of_models(config, rows, actors):
        warmed = f"policy {names[0]!r}" if len(names) == 1 else f"the base of policies {', '.join(map(repr, names))}"
        if not kept:
            log.note(f"warm start of {warmed}: no row is of its actors, so nothing is trained")
            continue
        model = models[names[0]]
        players = [actor for actor in actors if actor.policy in names]
        fit = fitting(tokenizers[names[0]], kept, context_length(model.config), log.note, players)
        notes = WarmStartNotes(log, config.warm_start.steps, names, records)
        saver = None
        if folder is not None:
            key = _key_of(config, fit)
            saver = WarmStartSaver(folder / names[0], key, config.checkpoint.minutes, asked, log.note)
        calls: dict[str, Any] = {"on_step": notes.step, "on_check": notes.check, "saver": saver}
        with kept_memory([model]):
            done = warm_start(model, fit, config.warm_start, seed=config.seed, **calls)
        log.note(f"warm start of {warmed}: {describe(done)}")


def _key_of(config: TrainConfig, rows: Sequence[Demonstration]) -> str:
    """Return a hash of all that a warm start on ``rows`` depends on, but the model."""
    digest = blake2b(repr((config.seed, config.warm_start.model_dump(exclude={"data"}))).encode(), digest_size=16)
    for row in rows:
        digest.update(repr((list(row.prompt_token_ids), list(row.completion_token_ids))).encode())
    return digest.hexdigest()


def describe(done: WarmStart) -> str:
    """Return a line such as ``260 steps, last loss 0.083; warm_start.target_reproduced = 0.8 is reached``, and then the
    measurement of the held-out prompts."""
    loss = f", last loss {done.loss:.3f}" if done.steps else ""
    held_out = f"; {done.prompts} held-out prompts: {_measured(done.checks[-1])}" if done.checks else ""
    return f"{done.steps} steps{loss}; {done.ended}{held_out}"


def _measured(check: HeldOutCheck) -> str:
    return (
        f"{check.reproduced:.0%} reproduced ({check.tokens_reproduced:.1%} of the tokens), loss {check.loss:.3f}, "
        f"entropy {check.entropy:.3f}"
    )


@dataclass(slots=True)
class WarmStartNotes:
    """Notes about a step after each eighth of a warm start of the policies ``names``, and each ``pause`` seconds.

    Also records its checks.
    """

    log: RunLog
    steps: int
    names: Sequence[str]
    records: list[dict[str, Any]]
    pause: float = 10.0
    latest: HeldOutCheck | None = field(default=None, init=False)
    noted: float = field(default_factory=monotonic, init=False)

    def step(self, step: int, loss: float) -> None:
        if (step % max(1, self.steps // 8) == 0 or monotonic() - self.noted > self.pause) and step < self.steps:
            self.noted = monotonic()
            check = "" if self.latest is None else f"; held out at step {self.latest.step}: {_measured(self.latest)}"
            self.log.note(f"  step {step} of at most {self.steps}, loss {loss:.3f}{check}")

    def check(self, check: HeldOutCheck) -> None:
        self.latest = check
        self.records.append({"policies": list(self.names), **asdict(check)})
        self.log.warm_start(self.records)
