"""Rejects a starting policy that never succeeds, because RL then has nothing to reinforce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from turnwise.samples.outcomes import Rubrics, measuring, metric_value
from turnwise.samples.step_metrics import describe
from turnwise.train.callbacks import TrainerView
from turnwise.train.checkpoint.run_state import generator_states, random_state, set_generator_states, set_random_state
from turnwise.train.config.toml import ConfigError
from turnwise.types import EpisodeRequest, GenerateResult
from turnwise.utils.values import problem

MEASURED = ("metric/", "reward/")


@dataclass(slots=True)
class Attempts:
    """Episodes of the starting policy: their successes by ``metric``, and the means of all metrics and rewards.

    ``rewards`` has the different rewards that the samples of each question earned, ``rubrics`` the reward functions of
    each type of episode.
    """

    metric: str
    rubrics: Rubrics = field(default_factory=dict)
    episodes: int = 0
    successes: int = 0
    measured: bool = False
    results: list[GenerateResult] = field(default_factory=list)
    rewards: defaultdict[Hashable, set[tuple[tuple[str, float], ...]]] = field(default_factory=lambda: defaultdict(set))

    def add(self, result: GenerateResult) -> None:
        """Count one episode. It succeeds if its metric, or that of an episode inside it, is above 0."""
        rollouts = [node.rollout for node in result.walk() if node.rollout.error is None]
        self.episodes += 1
        values = [value for rollout in rollouts if (value := metric_value(rollout.metrics, self.metric)) is not None]
        self.measured |= bool(measuring(rollouts, self.metric, self.rubrics))
        self.successes += any(value > 0 for value in values)
        self.results.append(result)
        earned = result.rollout.rewards.items()
        self.rewards[result.group_id].add(tuple(sorted((actor, round(reward, 6)) for actor, reward in earned)))

    def means(self) -> str:
        """Return ``format/solver 0.25, reward/solver -0.1``."""
        numbers = describe(self.results, self.rubrics)
        measured = {name: value for name, value in numbers.items() if name.startswith(MEASURED)}
        return ", ".join(sorted(f"{name.removeprefix('metric/')} {value:.3g}" for name, value in measured.items()))


async def check_start(trainer: TrainerView, questions: Sequence[EpisodeRequest], metric: str) -> None:
    """Play ``questions`` until the first success, and raise :class:`ConfigError` if there is none.

    Each question is sampled once, then 1, 2, 4, ... more times, up to ``health.start_samples``, as in training but
    without trees. The round with the first success is the last. It records nothing and restores all random generators,
    so training is the same with and without it. It passes if no episode has ``metric``.
    """
    before, torch_before = random_state(trainer.rng), generator_states()
    await trainer.sync_weights()
    view, most = trainer.arena.evaluation(), trainer.config.health.start_samples
    attempts, copies = Attempts(metric, trainer.arena.reward_functions), 0
    while copies < most and not attempts.successes and (attempts.measured or not copies):
        more = min(max(1, copies), most - copies)
        # Without seeds of their own, all samples of a question differ, also those of different rounds.
        requests = [replace(request, seed=None) for request in questions for _ in range(more)]
        for result in await view.generate_rollouts(requests):
            attempts.add(result)
        copies += more
    trainer.client_metrics.take()  # the check doesn't count as the first step's sampling
    set_random_state(trainer.rng, before)
    set_generator_states(torch_before)
    if attempts.successes:
        succeeded = f"{attempts.successes} of {attempts.episodes}"
        trainer.log.note(f"the starting policy succeeds in {succeeded} samples ({metric})")
    elif attempts.measured:
        config, differ = trainer.config.health, sum(len(earned) > 1 for earned in attempts.rewards.values())
        why = (
            f"expected the starting policy to succeed at least once, but {metric} was 0 in all {attempts.episodes} "
            f"({config.start_samples} samples of each of {len(attempts.rewards)} questions), so there is nothing to "
            f"reinforce. Means: {attempts.means()}. Train a longer warm start or use better demonstrations "
            "(warm_start.steps, warm_start.target_reproduced), or ask easier questions (task_options). "
            "health.start_questions = 0 skips this check: rewards differ between the samples of "
            f"{differ} questions, and only these train"
        )
        raise ConfigError(problem("health.start_questions", why, config.start_questions))
