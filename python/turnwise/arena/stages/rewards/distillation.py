"""On-policy distillation: actors learn from a teacher's log-probabilities of the tokens that they sampled themselves.

The teacher of an actor is a policy: a larger model, one that was trained before, or with hints the actor's own. Each
sampled token gets the advantage ``coef * (teacher's log-prob - sampler's log-prob)``, whose expectation is the negative
reverse KL divergence of the two at this token (https://arxiv.org/abs/2306.13649). A hint is text that the teacher's
prompt alone has: a better answer to the same prompt, or what the episode says about the attempt (self-distillation,
https://arxiv.org/abs/2601.20802).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from turnwise.arena.runtime.user_code import hook
from turnwise.arena.runtime.watch import count_error, count_in_process
from turnwise.arena.stages.stage import BatchNotes, RunParts, Stage
from turnwise.samples.collect import collect_samples, step_of
from turnwise.types import (
    GenerateResult,
    Messages,
    ModelRequest,
    Rollout,
    RoutedClient,
    Sample,
    Sampling,
    ScoringClient,
    Step,
)
from turnwise.types.prompts import prompt_tokens
from turnwise.utils.signals import exits_as_errors

BETTER_ANSWER = "This answer to the task above earned more reward than others:\n{hint}\n\nAnswer the task yourself."
"""Text that a teacher sees after the prompt with ``hint="best"``; ``{hint}`` is the better answer."""

TOKENS = "token_advantages"
"""Key of ``step.info``: the advantages of the step's tokens."""

Hint = Literal["none", "best", "episode"]


@dataclass(frozen=True, kw_only=True)
class Distillation(Stage):
    """Teachers of actors, for ``arena.add_stage``.

    ``teachers`` maps actors to the policies that teach them, which the arena's client must serve and score with.
    ``coef`` scales the advantages of the tokens. With ``add_to_reward`` they are added to the credit rule's; without it
    a taught actor learns from its teacher alone, whatever reward it earns. ``hint`` is what the teacher sees besides
    the prompt: with ``"best"`` the best answer that an attempt at the same prompt gave, if it earned more; with
    ``"episode"`` the text of :meth:`~turnwise.arena.Episode.hint`. A call without a hint then has no teacher. Without
    ``scores`` no teacher is asked here, as the trainer's loss has its KL.

    Example: ``arena.add_stage(Distillation(teachers={"reviser": "big"}, coef=1.0))``
    """

    name = "distillation"
    changes, effect = "advantages", "replaces"
    teachers: Mapping[str, str]
    coef: float = 1.0
    add_to_reward: bool = False
    hint: Hint = "none"
    scores: bool = True

    def __post_init__(self) -> None:
        if not self.coef > 0:
            raise ValueError(f"coef={self.coef!r}: expected a number > 0")
        if self.hint not in ("none", "best", "episode"):
            raise ValueError(f"hint={self.hint!r}: expected 'none', 'best' or 'episode'")

    @classmethod
    def build(cls, run: RunParts) -> Self | None:
        settings, teachers = run.config.distill, run.config.teachers()
        if not teachers:
            return None
        return cls(teachers=teachers, **settings.model_dump(exclude={"top_k"}), scores=not settings.top_k)

    @property
    def unrewarded(self) -> frozenset[str]:  # type: ignore[override]
        """The actors whose rewards their teachers replace."""
        return frozenset() if self.add_to_reward else frozenset(self.teachers)

    def attach(self, arena: Any, learner: Any) -> None:
        """Raise ``ValueError`` unless the arena's client can score with each teacher."""
        policies, client = {actor.id: actor.policy for actor in arena.actors.values()}, arena.client
        for actor, teacher in self.teachers.items():
            if actor not in policies:
                raise ValueError(f"teachers={dict(self.teachers)}: expected actors, {sorted(policies)}, got {actor!r}")
            if teacher == policies[actor] and self.hint == "none":
                raise ValueError(
                    f"actor {actor!r} is taught by its own policy {teacher!r}, which agrees with itself: expected "
                    "another policy, or a hint for the teacher ('best' or 'episode')"
                )
            if not self.scores:
                continue
            scoring = client.clients.get(teacher) if isinstance(client, RoutedClient) else client
            if not isinstance(scoring, ScoringClient):
                raise ValueError(
                    f"teacher {teacher!r} of actor {actor!r}: {type(scoring).__name__} can't score tokens: expected "
                    "a client with score(requests, completions), such as those of rollout.client"
                )

    async def sampled(self, arena: Any, results: Sequence[GenerateResult]) -> None:
        """Let the teachers score all calls of ``results`` that may train, and keep the advantages in ``step.info``."""
        # Log-probs over some tokens alone can't be compared with a teacher's.
        free = [sample for sample in collect_samples(results) if sample.facts.sampled_from_all]
        samples = [sample for sample in free if sample.actor in self.teachers]
        if not self.scores:
            for sample in samples:
                step_of(sample).info[TOKENS] = [0.0] * len(sample.completion_token_ids)
            return
        hints = await self._hints(arena, results, samples)
        taught: list[tuple[Sample, Step]] = []
        requests: list[ModelRequest] = []
        completions: list[list[int]] = []
        for sample, hint in zip(samples, hints, strict=True):
            step, ids = step_of(sample), sample.completion_token_ids
            prompt = prompt_tokens(sample) if self.hint == "none" else hinted_prompt(arena, step, hint)
            if prompt is None:
                continue
            # Servers need room for one more token, so they can't score one in the context's last place.
            context = arena.context_of(self.teachers[sample.actor])
            room = len(ids) if context is None else context - 1 - len(prompt)
            if room < max(1, len(ids) - 1):
                continue
            taught.append((sample, step))
            completions.append(ids[:room])
            sampling = Sampling(temperature=sample.temperature, max_tokens=1)
            requests.append(ModelRequest(prompt, sampling, self.teachers[sample.actor]))
        scores = await arena.client.score(requests, completions)
        for (sample, step), teacher_logprobs in zip(taught, scores, strict=True):
            gains = [t - s for t, s in zip(teacher_logprobs, sample.rollout_logprobs, strict=False)]
            unscored = len(sample.completion_token_ids) - len(gains)
            step.info[TOKENS] = [self.coef * gain for gain in gains] + [0.0] * unscored
            step.facts.teacher_kl = -sum(gains) / len(gains)

    async def _hints(
        self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]
    ) -> list[str | None]:
        if self.hint == "none":
            return [None] * len(samples)
        rollouts = {result.rollout.id: result.rollout for top in results for result in top.walk()}
        if self.hint == "episode":
            asked = [(rollouts[sample.rollout_id], sample.step_index) for sample in samples]
            return [await _hint_of(arena, rollout, rollout.steps[index]) for rollout, index in asked]
        groups: defaultdict[Any, list[Sample]] = defaultdict(list)
        for sample in samples:
            groups[_question(sample)].append(sample)
        best = {key: max(group, key=lambda sample: sample.reward) for key, group in groups.items()}
        better = [best[_question(sample)] for sample in samples]
        answers = [rollouts[one.rollout_id].steps[one.step_index].completion for one in better]
        return [
            BETTER_ANSWER.replace("{hint}", answer) if one.reward > sample.reward and answer else None
            for sample, one, answer in zip(samples, better, answers, strict=True)
        ]

    def credited(
        self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample], notes: BatchNotes
    ) -> None:
        """Set the advantages of actors that learn from their teachers alone to 0: their tokens have their own."""
        for sample in samples:
            if sample.actor in self.unrewarded:
                step_of(sample).advantage = 0.0
                if TOKENS not in sample.info:
                    notes.causes[sample.rollout_id, sample.step_index] = "untaught"


async def _hint_of(arena: Any, rollout: Rollout, step: Step) -> str | None:
    try:
        with exits_as_errors(f"hint of episode {rollout.episode_type!r}"):
            hint = await hook(arena.episodes[rollout.episode_type].hint, rollout, step)
            if hint is not None and not isinstance(hint, str):
                raise TypeError(f"{hint!r:.80}: expected a text or None")
            return hint
    except Exception as error:
        count_error("hint", rollout.episode_type, error)
        count_in_process(f"hint_errors/{rollout.episode_type}")  # no episode is running that could count it
        return None


def _question(sample: Sample) -> tuple[Any, ...]:
    return sample.group_id, sample.actor, tuple(prompt_tokens(sample))


def hinted_prompt(arena: Any, step: Step, hint: str | None) -> list[int] | None:
    """Return the tokens of the step's prompt with ``hint`` after its last message.

    ``None`` without a hint, and for a prompt that the arena's own format doesn't write, such as one with tools.
    """
    if not hint or step.actor_id is None:
        return None
    format = arena.plain_format(arena.actors[step.actor_id], step.policy)
    if list(format.prompt_ids(step.prompt)) != list(prompt_tokens(step)):
        return None
    messages: Messages = [dict(message) for message in step.prompt]
    if messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        messages[-1]["content"] += f"\n\n{hint}"
    else:
        messages.append({"role": "user", "content": hint})
    return list(format.prompt_ids(messages))
