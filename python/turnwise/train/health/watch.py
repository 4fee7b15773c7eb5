"""Warns about problems that don't stop a run: no sample trains, an actor never trains, ratios explode, and what the
diagnoses find in the metrics.

Each cause is reported once, with any ``[health]`` settings: on the console, in ``warnings.jsonl``, in the report and by
``turnwise status``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from turnwise.train.callbacks import TrainerView
from turnwise.train.eval.evaluate import Evaluation
from turnwise.train.health.diagnose import Diagnoser, begin
from turnwise.train.health.diagnoses import tie_advice
from turnwise.train.health.history import TIES
from turnwise.train.model.policy import Policy
from turnwise.types import TrainingBatch
from turnwise.types.columns import TOKEN_ADVANTAGES

PATIENCE = 5
"""Steps in a row without a training sample until an actor is reported."""

RATIO_BOUND = 20.0
"""Limit of the probability ratio of updated to sampling weights, per token; clipped losses keep it near 1."""

FULL = 0.95
"""Validation success of a start above which a run can't show what it learns."""

REPLACED = ("not_trainable", "over_quota", "resample")
"""Causes that lose no expected sample: seats that don't train, and questions replaced by others."""

DIAGNOSED = ("equal_rewards",)
"""Causes of which a diagnosis says more, once it knows why."""

CAUSES = {
    "truncated": "ran into its token limit: raise rollout.max_tokens or the actor's own limit, or let such calls train "
    "(filter.drop_truncated = false)",
    "equal_rewards": "earned the same as all calls of its group",
    "equal_step_rewards": "earned the same step reward as all calls of its group, while the rubric's rewards of their "
    "attempts differ: a call with a step reward doesn't train on the rubric's, so let step_reward return None, or add "
    "what the rubric pays",
    "untaught": "has no teacher, as there was no hint for it: no attempt at the same prompt earned more, "
    "Episode.hint gave none, or it was too long; set distill.add_to_reward = true to train such calls on their reward",
    "alone": "is alone in its group: raise rollout.group_size or rollout.branches, or give attempts "
    "that belong together one group_id",
    "min_std": "is in a group whose rewards hardly differ: lower credit.options.min_std",
    "zero_advantage": "earned exactly what the credit rule expected: check if the rewards in rollouts.jsonl differ",
    "max_length": "is longer than filter.max_length: raise it, or shorten prompts and completions",
    "stale": "was sampled by weights that are too old: raise loop.max_staleness, or sample fewer questions per step",
    "resample": "is of a question without information, and filter.dynamic_sampling_rounds found no better ones: ask "
    "easier or harder questions, or raise rollout.group_size",
    "unpaid": "was not paid, as another actor's invalid action, or the context, ended the episode before: show that "
    "actor the form of its answers, or pay each step (step_reward)",
    "failed": "failed, or its episode did: the errors are in rollouts.jsonl",
    "reward_error": "is of an episode that its rubric dropped: see meta.dropped in rollouts.jsonl",
    "aborted": "was aborted: see the client's own messages",
    "no_tokens": "has no token: see the prompts in rollouts.jsonl",
    "greedy": "was sampled at temperature 0 or top_k = 1, so its tokens are not drawn from the policy: give its actor "
    'or call a temperature above 0 (Actor.sampling, call_model(temperature=...), gateway.sampling = "actor")',
    "not_trainable": "belongs to an episode or seat that does not train: see EpisodeRequest.is_trainable, "
    "Step.trainable",
}
"""Description and remedy of each cause that is counted in ``dropped/<cause>``."""

RELAY = (
    ". Its actions may never earn a reward: a tree compares branches only by the reward of the step. Reward that "
    "step, play branches to their ends (rollout.tree.select = 'none'), or look ahead (rollout.tree.playouts with "
    "credit.rule = 'vine')"
)
"""Advice for an actor whose branches always tie, such as the reader in a relay of reader and writer."""


class Watch:
    """Checks each step's samples and updates, and warns once per problem, and once more after a resume."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._reported: set[tuple[str, ...]] = set()
        self._idle: dict[str, Counter[str]] = {}
        self._steps_idle: Counter[str] = Counter()
        self._diagnoser: Diagnoser | None = None
        self._without_gradient: set[str] = set()

    def samples(self, batch: TrainingBatch, in_phase: Collection[str]) -> None:
        """Check which samples of ``batch`` train in a step that updates the policies ``in_phase``."""
        training = {name for name in in_phase if self._trainer.policies[name].trainable}
        policy_of = {actor.id: actor.policy for actor in self._trainer.arena.actors.values()}
        trained = Counter(
            batch.actors[actor]
            for actor, policy in zip(batch.actor_index.tolist(), batch.policy_index.tolist(), strict=True)
            if batch.policies[policy] in training
        )
        drops = {key: count for key, count in batch.drops.items() if policy_of.get(key[0]) in training}
        ties = {kind: sum(_of_kind(batch.metrics, kind, trained.keys() | {key[0] for key in drops})) for kind in TIES}
        self._step(trained.total(), drops, ties)
        self._advantages(batch, trained.total())
        acted = {*trained, *(actor for actor, cause in drops if cause != "not_trainable")}
        for actor in sorted(acted):
            self._actor(actor, trained[actor], drops, alone=len(acted) == 1)

    def updates(self, policy: Policy, measured: Mapping[str, float]) -> None:
        """Check the metrics of the updates of ``policy``."""
        self._without_gradient.discard(policy.name)
        if measured.get("grad_norm") == 0:
            self._without_gradient.add(policy.name)
        if (ratio := measured.get("ratio_max", 0.0)) <= RATIO_BOUND:
            return
        advice = "lower update.lr, update.num_minibatches or update.ppo_epochs"
        if measured["updates"] == 1:
            advice = (
                "there was one update, so the samples are stale, or sampler and trainer disagree "
                "(sampler_trainer_logprob_max_diff); see update.old_logprobs and loss.importance_correction"
            )
        self._warn(
            ("ratio", policy.name),
            f"policy {policy.name!r}: a token is {ratio:.3g} times as likely as when it was sampled (ratio_max, bound "
            f"{RATIO_BOUND:g}) at learning rate {policy.learning_rate:g}: {advice}",
        )

    def weights(self, trained: Collection[str], moved: Collection[str]) -> None:
        """Check that the weights of all ``trained`` policies have ``moved``."""
        for name in sorted(set(trained) - set(moved)):
            flat = name in self._without_gradient
            cause = "its gradient is 0; are all advantages 0?" if flat else "is update.lr too small for its dtype?"
            self._warn(("moved", name, cause), f"policy {name!r}: an update changed no weight; {cause}")

    def logged(self, metrics: Mapping[str, float]) -> None:
        """Diagnose the run by the metrics of the step that was logged now; a resumed run knows the earlier ones."""
        step = self._trainer.progress.step
        if self._diagnoser is None:
            self._diagnoser = begin(self._trainer, step - 1)
        for found in self._diagnoser.add({**metrics, "step": step}):
            self._trainer.log.warn(step, found.line, diagnosis=found.name, actor=found.actor)

    def validation(self, measured: Evaluation) -> None:
        """Check that no actor breaks more than it fixes, that success is known, and that a start leaves some to gain.

        Before any training no actor is judged.
        """
        step = self._trainer.progress.step
        decided = all(value in (0.0, 1.0) for value in measured.values)  # no reward without an upper bound
        if not step and self._trainer.config.steps and decided and measured.success >= FULL:
            self._warn(
                ("full",),
                f"the start already succeeds in {measured.success:.0%} of the validation, which is greedy, so that "
                "can't show what the run learns: ask harder questions, or shorten the warm start (warm_start.steps)",
                step=step,
            )
        if measured.gap:
            text = f"the validation has no success, so its curve has a gap: {measured.gap}"
            self._warn(("validation", measured.gap.partition(":")[0]), text, step=step)
        for actor, made in measured.contributions.items():
            if step and made.fixed < made.broken:
                self._warn(
                    ("contribution", actor),
                    f"actor {actor!r} fixes less than it breaks: it was handed {made.handed} answers and changed "
                    f"{made.changed}; it fixed {made.fixed} of {made.wrong} wrong parts and broke {made.broken} of "
                    f"{made.right} right ones. Measure the team without it (turnwise eval RUN --ablate {actor}), and "
                    "reward it for the difference that it makes",
                    step=step,
                )

    def _step(self, trained: int, drops: Mapping[tuple[str, str], int], ties: dict[str, float]) -> None:
        counts: Counter[str] = Counter()
        for (_, cause), count in drops.items():
            counts[cause] += count
        lost = Counter({cause: count for cause, count in counts.items() if cause not in REPLACED})
        if not trained:
            main = next(iter([*lost.most_common(1), *counts.most_common(1)]), ("", 0))[0]
            text = f"{counts.total()} calls were dropped, {_listed(counts)}" if counts else "no actor that trains acted"
            why = f": {said}" if main in DIAGNOSED and (said := tie_advice(ties)) else ""
            self._warn(("nothing", main), f"no sample trains: {text}{_advice(main)}{why}")
            self._reported.add(("half", main))
        elif lost.total() > trained:
            main = lost.most_common(1)[0][0]
            if main in DIAGNOSED:
                return
            text = f"{lost.total()} of {lost.total() + trained} samples were dropped, {_listed(lost)}"
            self._warn(("half", main), text + _advice(main))

    def _advantages(self, batch: TrainingBatch, trained: int) -> None:
        """Check that some of the samples that train have an advantage, as other terms of the loss train them too."""
        if trained and not batch.advantages.any() and TOKEN_ADVANTAGES not in batch.columns:
            parts = ((name.partition("without_advantage/")[2], int(count)) for name, count in batch.metrics.items())
            counts = Counter({cause: count for cause, count in parts if cause})
            main = next(iter(counts.most_common(1)), ("", 0))[0]
            text = f"no sample has an advantage, so none trains on its reward: {_listed(counts)}"
            self._warn(("advantages", main), text + _advice(main))

    def _actor(self, actor: str, trained: int, drops: Mapping[tuple[str, str], int], *, alone: bool) -> None:
        if trained:
            self._steps_idle[actor] = 0
            self._idle.pop(actor, None)
            return
        causes = self._idle.setdefault(actor, Counter())
        causes.update({cause: count for (name, cause), count in drops.items() if name == actor})
        self._steps_idle[actor] += 1
        if self._steps_idle[actor] == PATIENCE and not alone:  # with one actor, the warning about the step is enough
            main = causes.most_common(1)[0][0]
            advice = RELAY if main == "equal_rewards" else _advice(main)
            self._warn(
                ("actor", actor),
                f"no sample of actor {actor!r} trained in the last {PATIENCE} steps in which it acted: "
                f"{causes.total()} calls were dropped, {_listed(causes)}{advice}",
            )

    def _warn(self, key: tuple[str, ...], text: str, step: int | None = None) -> None:
        """Warn about ``step``, by default the present one, which is not counted yet."""
        if key not in self._reported:
            self._reported.add(key)
            self._trainer.log.warn(self._trainer.progress.step + 1 if step is None else step, text)


def _of_kind(metrics: Mapping[str, float], kind: str, actors: Iterable[str]) -> Iterator[float]:
    """Yield the number of groups of each of ``actors`` that tied for this reason."""
    for actor in actors:
        yield metrics.get(f"groups/compared/{actor}", 0.0) * metrics.get(f"groups/{kind}/{actor}", 0.0)


def _listed(counts: Counter[str]) -> str:
    """Return ``12 equal_rewards, 4 truncated``, the most frequent first."""
    return ", ".join(f"{count} {cause}" for cause, count in counts.most_common())


def _advice(cause: str) -> str:
    return f". {cause}: the call {CAUSES[cause]}" if cause in CAUSES else ""
