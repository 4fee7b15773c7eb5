"""Curriculum: draws the questions of a batch by the solve rate of each one.

The rule is a store's: :class:`~turnwise.arena.Learnability`, ``p (1 - p)``. A question without attempts has the solve
rate of its level. With a gate, the questions of the next level are drawn once the level below is solved often enough.

The solve rates that batch ``b`` is drawn from include the attempts of the batches before ``b - ahead``, no others.
These are packed before batch ``b`` may start, so the draw does not depend on the clock, nor on a retry or a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

from turnwise.arena.runtime.hashing import derive_seed
from turnwise.arena.stages.stage import RunParts, Stage
from turnwise.arena.stores.contents import UNKNOWN
from turnwise.arena.stores.indexes import IndexedPool
from turnwise.arena.stores.question_rates import QuestionIndex, QuestionRates
from turnwise.arena.stores.sampling import SMALL, AttemptStats, Learnability, WeightedPool
from turnwise.samples.outcomes import metric_value
from turnwise.types import Artifact, EpisodeRequest, GenerateResult, Rollout
from turnwise.types.facts import Question
from turnwise.utils.values import problem

LEVEL_WINDOWS = 8
"""Windows of a question's solve rate in that of a level, which is measured on several questions."""

Attempts = Sequence[tuple[str, float]]
"""Attempts of one batch, in its order: the question's id, and the success from 0 to 1."""


@dataclass(frozen=True, slots=True)
class SolveRates:
    """Statistics of the attempted questions by id, and of the attempted levels; and the number of admitted levels.

    Example: ``SolveRates(QuestionRates({}, {}), {1: AttemptStats(4, success=0.5)}, 1)``
    """

    questions: QuestionRates
    levels: Mapping[int, AttemptStats]
    admitted: int = 1


class Curriculum:
    """Draws questions of ``pool`` by learnability, and learns the solve rate of each from packed batches.

    ``pool`` has one request for each question. Its ``group_id`` names the question, and its ``meta["level"]`` is the
    level, by default 0. The success of an attempt is the rollout's ``metric``. ``uniform`` is the share of the draws
    that ignores solve rates. A question's solve rate is an average over about ``window`` attempts, a level's over
    ``LEVEL_WINDOWS`` times as many. With ``gate`` a level is admitted once the level below is solved at that rate.
    ``ahead`` is the number of batches that may start before the update of an earlier one.

    Example: ``Curriculum(task.question_pool(100), metric="solved/solver", window=16)``
    """

    def __init__(
        self,
        pool: Sequence[EpisodeRequest],
        *,
        metric: str,
        uniform: float = 0.1,
        window: int = 32,
        gate: float | None = None,
        ahead: int = 0,
        seed: int = 0,
    ) -> None:
        named = {f"{derive_seed(request.episode_type, request.group_id):016x}": request for request in pool}
        self.questions = dict(sorted(named.items()))  # so that the pool's order changes no draw
        self._artifacts = [Artifact(id, request) for id, request in self.questions.items()]
        if not pool or len(self.questions) < len(pool):
            raise ValueError(f"pool: {len(self.questions)} of its {len(pool)} questions differ: expected all, and one")
        self.metric, self.rule, self.window, self.gate = metric, Learnability(uniform), window, gate
        self.ahead, self.seed = ahead, seed
        self.level_of = {id: request.meta.get("level", 0) for id, request in self.questions.items()}
        self.levels = sorted(set(self.level_of.values()))
        if gate is not None and len(self.levels) == 1:
            raise ValueError(f"gate={gate!r}: all questions have level {self.levels[0]}; expected several levels")
        self._numbers = {id: number for number, id in enumerate(self.questions)}
        self._index = QuestionIndex(self._artifacts, list(self.level_of.values()), self.rule)
        self._admitted: dict[int, list[Artifact]] = {}
        """Questions of the lowest levels, by the number of these."""
        rates = SolveRates(QuestionRates(self._numbers, {}), {})
        self._known: tuple[SolveRates, tuple[tuple[int, Attempts], ...]] = rates, ()
        """The rates up to a batch, and the attempts of each packed batch after it. Replaced as a whole, because the
        next batch may draw in another thread."""

    # -- drawing -------------------------------------------------------------------------------------------------------
    def draw(self, batch: int, number: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Draw the requests of ``batch``, ``copies`` of each question. ``number`` tells the run's draws apart.

        The questions are different, unless there are fewer than ``questions``.
        """
        rates = self.rates_for(batch)
        pool = self.weighted(rates)
        again = questions > pool.at_least and questions > len(pool)
        drawn = pool.draw(questions, again, Random(derive_seed("curriculum", self.seed, number)))
        requests = []
        for slot, artifact in enumerate(drawn):
            question: EpisodeRequest = artifact.data
            note: Question = {"question": artifact.id, "batch": batch}
            if artifact.id in rates.questions:
                note["p"] = rates.questions[artifact.id].success
            for copy in range(copies):
                seed = derive_seed("curriculum", question.seed, number, slot, copy)
                facts = replace(question.facts, curriculum=note)
                requests.append(
                    replace(question, group_id=f"{number}-{slot}/{question.group_id}", seed=seed, facts=facts)
                )
        return requests

    def weighted(self, rates: SolveRates) -> WeightedPool | IndexedPool:
        """Return the questions of the admitted levels with their weights."""
        admitted = self.levels if self.gate is None else self.levels[: rates.admitted]
        by_level = {level: rates.levels.get(level, UNKNOWN) for level in admitted}
        artifacts = self._questions_of(admitted)
        if len(artifacts) > SMALL:
            return self._index.pool(rates.questions, admitted, by_level)
        stats = [rates.questions.get(artifact.id) or by_level[self.level_of[artifact.id]] for artifact in artifacts]
        return WeightedPool(artifacts, stats, 0, self.rule)

    def _questions_of(self, levels: Sequence[int]) -> list[Artifact]:
        """Return the questions of these levels, the lowest ones, in the pool's order."""
        found = self._admitted.get(len(levels))
        if found is None:
            among = set(levels)
            found = [artifact for artifact in self._artifacts if self.level_of[artifact.id] in among]
            self._admitted = {len(levels): found}
        return found

    def rates_for(self, batch: int) -> SolveRates:
        """Return the solve rates after the attempts of all batches before ``batch - ahead``."""
        rates, recent = self._known
        for number, attempts in recent:
            if number < batch - self.ahead:
                rates = self._after(rates, attempts)
        return rates

    def _after(self, rates: SolveRates, attempts: Attempts) -> SolveRates:
        """Return ``rates`` after the ``attempts`` of one more batch."""
        questions: dict[str, AttemptStats] = {}
        levels = dict(rates.levels)
        for id, success in attempts:
            if id not in self.questions:  # the pool has changed since
                continue
            before, level = questions.get(id) or rates.questions.get(id, UNKNOWN), self.level_of[id]
            questions[id] = before.after(success, success, None, plays=0, window=self.window)
            wide = LEVEL_WINDOWS * self.window
            levels[level] = levels.get(level, UNKNOWN).after(success, success, None, plays=0, window=wide)
        admitted = rates.admitted
        if self.gate is not None and admitted < len(self.levels):
            highest = levels.get(self.levels[admitted - 1])
            if highest is not None and highest.success >= self.gate:
                admitted += 1
        return SolveRates(rates.questions.updated(questions), levels, admitted)

    # -- learning ------------------------------------------------------------------------------------------------------
    def record(
        self, results: Sequence[GenerateResult], judge: Callable[[Rollout], tuple[float, float]]
    ) -> dict[str, float]:
        """Learn from the attempts of a packed batch, and return its metrics.

        ``judge`` returns the reward and the success of a rollout without the metric. Failed attempts are ignored. A
        batch that is packed again, because its update failed, replaces its attempts.
        """
        notes = [note for top in results if (note := top.rollout.facts.curriculum) is not None]
        if notes:
            attempts = [
                (note["question"], self._success(rollout, judge))
                for rollout in (top.rollout for top in results)
                if (note := rollout.facts.curriculum) and rollout.error is None and rollout.facts.dropped is None
            ]
            batch = notes[0]["batch"]
            rates, recent = self.rates_for(batch), self._known[1]
            kept = tuple(entry for entry in recent if batch - self.ahead <= entry[0] < batch)
            self._known = rates, (*kept, (batch, attempts))
        drawn = {top.group_id: note["p"] for top in results if (note := top.rollout.facts.curriculum) and "p" in note}
        return self._describe(list(drawn.values()))

    def _success(self, rollout: Rollout, judge: Callable[[Rollout], tuple[float, float]]) -> float:
        value = metric_value(rollout.metrics, self.metric)
        return min(max(float(judge(rollout)[1] if value is None else value), 0.0), 1.0)

    def _describe(self, drawn: Sequence[float]) -> dict[str, float]:
        """Count the questions by what is known of them. ``drawn`` are the solve rates when the batch was drawn."""
        rates, recent = self._known
        for _, attempts in recent:
            rates = self._after(rates, attempts)
        metrics: dict[str, float] = {
            "curriculum/seen": rates.questions.seen,
            "curriculum/always": rates.questions.always,
            "curriculum/never": rates.questions.never,
        }
        if drawn:
            metrics["curriculum/drawn_p"] = sum(drawn) / len(drawn)
        if self.gate is not None:
            metrics["curriculum/level"] = self.levels[min(rates.admitted, len(self.levels)) - 1]
        return metrics

    # -- saving --------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-ready state. Only packed batches change it, so drawing again draws the same."""
        rates, recent = self._known
        return {
            "questions": [[id, stat.attempts, stat.success] for id, stat in rates.questions.rows()],
            "levels": [[level, stat.attempts, stat.success] for level, stat in rates.levels.items()],
            "admitted": rates.admitted,
            "recent": [[batch, [list(attempt) for attempt in attempts]] for batch, attempts in recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rates, levels = (
            {key: AttemptStats(attempts=n, reward=p, success=p) for key, n, p in state[name]}
            for name in ("questions", "levels")
        )
        questions = QuestionRates(self._numbers, rates)
        recent = tuple((batch, [(id, success) for id, success in attempts]) for batch, attempts in state["recent"])
        self._known = SolveRates(questions, levels, state["admitted"]), recent


class Curricula:
    """A curriculum for each task of a run with several; ``counts(number, questions)`` gives the questions of each.

    ``adapt(task, requests)`` makes requests of the run from those of a task.

    Example: ``Curricula({"sudoku": Curriculum(...), "gsm8k": Curriculum(...)}, several.counts, several.labelled)``
    """

    def __init__(
        self,
        curricula: Mapping[str, Curriculum],
        counts: Callable[[int, int], Mapping[str, int]],
        adapt: Callable[[str, Sequence[EpisodeRequest]], list[EpisodeRequest]],
    ) -> None:
        self.curricula, self.counts, self.adapt = dict(curricula), counts, adapt

    def draw(self, batch: int, number: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Draw the requests of ``batch``, see :meth:`Curriculum.draw`."""
        requests: list[EpisodeRequest] = []
        for task, count in self.counts(number, questions).items():
            if count:
                requests += self.adapt(task, self.curricula[task].draw(batch, number, count, copies))
        return requests

    def record(
        self, results: Sequence[GenerateResult], judge: Callable[[Rollout], tuple[float, float]]
    ) -> dict[str, float]:
        """Learn from a packed batch, and return the metrics of each task under its name."""
        metrics: dict[str, float] = {}
        for task, curriculum in self.curricula.items():
            own = curriculum.record([top for top in results if top.rollout.facts.task == task], judge)
            metrics |= {f"{task}/{name}": value for name, value in own.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-ready state of each curriculum, by task."""
        return {task: curriculum.state_dict() for task, curriculum in self.curricula.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for task, each in state.items():
            if task in self.curricula:
                self.curricula[task].load_state_dict(each)


class CurriculumStage(Stage):
    """Draws the questions of each batch from a curriculum, and lets it learn from those that are packed.

    Example: ``arena.add_stage(CurriculumStage(Curriculum(task.question_pool(100), metric="solved/solver")))``
    """

    name = "curriculum"
    rewinds = False

    def __init__(self, curriculum: Curriculum | Curricula) -> None:
        self.curriculum = curriculum

    @classmethod
    def build(cls, run: RunParts) -> Self | None:
        """Build the curriculum over the questions of each task."""
        if run.config.curriculum.sampling == "task":
            return None
        parts = getattr(run.task, "parts", None)
        if parts is None:
            return cls(_curriculum_of(run.config, run.task))
        each = {name: _curriculum_of(run.config, part.task) for name, part in parts.items()}
        return cls(Curricula(each, run.task.counts, run.task.labelled))

    def questions(self, arena: Any, number: int, questions: int, copies: int) -> list[EpisodeRequest] | None:
        return self.curriculum.draw(arena.batches - 1, number, questions, copies)

    def packed(self, arena: Any, results: Sequence[GenerateResult]) -> Mapping[str, float]:
        return self.curriculum.record(results, arena.attempt_result)

    def state_dict(self) -> dict[str, Any] | None:
        return self.curriculum.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curriculum.load_state_dict(state)


def _curriculum_of(config: Any, task: Any) -> Curriculum:
    settings = config.curriculum
    if not callable(getattr(task, "question_pool", None)):
        reason = (
            f"task {task.name!r} has no method question_pool(n), which returns one request for each training question: "
            "see turnwise.tasks.base.PooledTask"
        )
        raise ValueError(problem("curriculum.sampling", reason, settings.sampling))
    try:
        pool = task.question_pool(settings.pool)
    except ValueError as error:
        raise ValueError(problem("curriculum.pool", str(error), *([settings.pool] if settings.pool else []))) from error
    try:
        return Curriculum(
            pool,
            metric=task.success_metric,
            uniform=settings.uniform,
            window=settings.window,
            gate=settings.gate,
            ahead=config.loop.max_staleness,
            seed=config.seed,
        )
    except ValueError as error:
        raise ValueError(problem("curriculum", f"task {task.name!r}: {error}")) from error
