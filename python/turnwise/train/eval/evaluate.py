"""Evaluates policies on a view of the arena that trains nothing, greedily by default, with confidence intervals."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from turnwise.arena import Arena
from turnwise.arena.answers import Contribution
from turnwise.samples.outcomes import COUNTS, Outcomes, Rubrics, measuring, metric_value
from turnwise.samples.step_metrics import with_zero_counts
from turnwise.train.eval.show import invalid_reasons, texts_of
from turnwise.train.eval.statistics import Bounds, Estimate, PairedDifference, estimate, paired_difference, pass_at_k
from turnwise.types import EpisodeRequest, GenerateResult, Sampling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation. ``success`` is the mean of the success metric over all ``episodes``; ``failed`` ones
    count as 0. ``low`` and ``high`` are its 95% interval.

    ``metrics`` holds the mean of every rubric metric over the finished episodes in which its actor acted. ``estimates``
    holds the same metrics and ``reward/<actor>`` (in a two-player game of each seat) with their intervals. ``pass_at``
    has pass@k by ``k`` for ``samples`` attempts at each question, if success goes from 0 to 1. ``values`` and
    ``clusters`` hold the success and the question of every episode, in the order of the requests. ``contributions``
    counts by actor how often it changed, fixed and broke the answers that it was handed, over the finished episodes;
    only actors that were handed an answer (``MultiTurnEpisode.team_answer``) are in it. ``by_task`` has the success of
    each task of a run with several.

    ``unmeasured`` counts the finished episodes without the metric: they count as 0 beside others that have it. If none
    has it, ``gap`` says so, ``success`` and ``values`` are NaN, and there is no interval.

    ``bounds`` are the least and the largest success, 0 and 1 unless the rubric declares others; ``None``: any number.

    ``invalid`` counts invalid actions by their reason. ``shown`` has the first episodes as text, if asked for.
    """

    success: float
    low: float
    high: float
    episodes: int
    failed: int
    sampled_tokens: int
    metrics: dict[str, float]
    estimates: dict[str, Estimate] = field(default_factory=dict)
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    samples: int = 1
    values: list[float] = field(default_factory=list, repr=False)
    clusters: list[Hashable] = field(default_factory=list, repr=False)
    contributions: dict[str, Contribution] = field(default_factory=dict)
    by_task: dict[str, Estimate] = field(default_factory=dict)
    unmeasured: int = 0
    gap: str = ""
    bounds: Bounds | None = (0.0, 1.0)
    invalid: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list, repr=False)


def describe(result: Evaluation) -> str:
    """Return a line such as ``success 91.0% (95% interval 86.2–94.3%, 200 questions)``."""
    failed = f", {result.failed} failed" if result.failed else ""
    failed += f", {result.unmeasured} without the metric" if result.unmeasured and not result.gap else ""
    each = f", {result.samples} samples of each" if result.samples > 1 else ""
    count = result.episodes // result.samples
    questions = f"{count} question{'s' * (count != 1)}{each}{failed}"
    if result.gap:
        return f"success unknown ({questions}): {result.gap}"
    if not math.isfinite(result.low + result.high):
        return f"success {result.success:.1%} ({questions}: no 95% interval)"
    return f"success {result.success:.1%} (95% interval {result.low:.1%}–{result.high:.1%}, {questions})"


def plain_evaluation(result: Evaluation) -> dict[str, Any]:
    """Convert to plain JSON data, without the questions; an infinite bound becomes ``None``."""
    plain = asdict(result)
    del plain["clusters"], plain["metrics"]
    plain["pass_at"] = {str(k): at for k, at in plain["pass_at"].items()}
    return dict(finite(plain))


def finite(value: Any) -> Any:
    """Return plain data with ``None`` in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def evaluate(
    arena: Arena,
    requests: Sequence[EpisodeRequest],
    metric: str,
    sampling: Sampling | None = None,
    *,
    samples: int = 1,
    concurrency: int | None = None,
    show: int = 0,
) -> Evaluation:
    """Run ``requests`` without trees, filters or updates, and average ``metric`` (a name in ``rollout.metrics``).

    Each request runs ``samples`` times, at most ``concurrency`` at once. Seeds come from the requests, so two policies
    are compared with equal seeds. Episodes with the same ``group_id`` are not independent, so intervals are over
    groups. A ``metric`` without an actor is the mean over the actors that have it. The result has ``show`` episodes
    as text. Raises ``ValueError`` without requests, or if no episode finishes.
    """
    if not requests:
        raise ValueError("requests is empty: expected at least one question")
    if samples < 1:
        raise ValueError(f"samples={samples!r}: expected at least 1")
    # Play the requests, and check that there is something to measure.
    view = arena.evaluation(sampling=sampling or arena.sampling.with_(temperature=0.0))
    limit: Mapping[str, Any] = {} if concurrency is None else {"concurrency": concurrency}  # an override may have none
    results = await view.generate_rollouts([request for request in requests for _ in range(samples)], **limit)
    done = [result.rollout for result in results if result.rollout.error is None]
    if not done:
        first = next((r.rollout.error for r in results if r.rollout.error), "no requests")
        raise ValueError(f"evaluation of {len(results)} episodes: none finished; first error:\n{first}")
    # A failed episode counts as 0, and so does one without the metric, unless none has it. Episodes of one question
    # form a cluster.
    measured = [metric_value(rollout.metrics, metric) for rollout in done]
    unmeasured, gap = measured.count(None), ""
    if not measuring(done, metric, view.reward_functions):
        own = sorted({name for rollout in done for name in rollout.metrics if not name.startswith(COUNTS)})
        gap = f"metric={metric!r}: no finished episode has it, expected one of {', '.join(own) or 'none'}"
    found = iter(measured)
    values = [float((None if r.rollout.error is not None else next(found)) or 0.0) for r in results]
    clusters = [result.group_id for result in results]
    bounds = _success_bounds(metric, values, view.reward_functions)
    success = estimate(values, clusters, bounds)
    if gap:
        values, success = [math.nan] * len(values), Estimate(math.nan, math.nan, math.nan, 0, "none")
    estimates = _estimates(results, view.reward_functions, metric, bounds)
    return Evaluation(
        success.mean,
        success.low,
        success.high,
        episodes=len(results),
        failed=len(results) - len(done),
        sampled_tokens=sum(len(s.completion_token_ids) for r in results for w in r.walk() for s in w.rollout.steps),
        metrics={name: at.mean for name, at in estimates.items() if not name.startswith("reward/")},
        estimates=estimates,
        pass_at=_pass_at(values, clusters, samples) if bounds == (0.0, 1.0) and not gap else {},
        samples=samples,
        values=values,
        clusters=clusters,
        contributions=_contributions(results),
        by_task={} if gap else _by_task(results, values, clusters, bounds),
        unmeasured=unmeasured,
        gap=gap,
        bounds=bounds,
        invalid=invalid_reasons(results),
        shown=texts_of(results, values, show),
    )


def _estimates(
    results: Sequence[GenerateResult], rubrics: Rubrics, metric: str, bounds: Bounds | None
) -> dict[str, Estimate]:
    """Estimate every metric and every actor's reward, over the finished episodes in which the actor acted.

    ``bounds`` are those of the success ``metric``, and of its function.
    """
    samples: defaultdict[str, tuple[list[float], list[Hashable]]] = defaultdict(lambda: ([], []))
    finished = [result for result in results if result.rollout.error is None]
    outcomes = Outcomes([result.rollout for result in finished], rubrics)
    earned = [outcomes.of(result.rollout) for result in finished]
    measured = with_zero_counts([metrics for _, metrics in earned])
    for result, (paid, _), metrics in zip(finished, earned, measured, strict=True):
        rewards = {f"reward/{actor}": reward for actor, reward in paid.items()}
        for name, value in {**metrics, **rewards}.items():
            samples[name][0].append(float(value))
            samples[name][1].append(result.group_id)
    function, estimates = metric.partition("/")[0], {}
    for name, (values, clusters) in sorted(samples.items()):
        own = bounds if name.partition("/")[0] == function else _declared(name, rubrics)
        within = own is not None and own[0] <= min(values) and max(values) <= own[1]  # of other actors, too
        estimates[name] = estimate(values, clusters, own if within else None)
    return estimates


def _declared(name: str, rubrics: Rubrics) -> Bounds | None:
    """Return the bounds that all rubrics declare of the function of a metric, with 0, which counts where it pays
    nothing; ``None`` if they declare none, or different ones."""
    own, _, rest = name.partition("/")
    functions = own, rest.partition("/")[0]  # behind the name of a task, in a run of several
    found = {of[function].bounds for of in rubrics.values() for function in functions if function in of}
    bounds = found.pop() if len(found) == 1 else None
    if bounds is None or not math.isfinite(bounds[1] - bounds[0]):
        return None
    return min(bounds[0], 0.0), max(bounds[1], 0.0)


def _success_bounds(metric: str, values: Sequence[float], rubrics: Rubrics) -> Bounds | None:
    """Return the bounds of success: those that the rubric declares, else 0 and 1. Warn of values beyond these."""
    function = metric.partition("/")[0]
    if any(of[function].bounds is not None for of in rubrics.values() if function in of):
        return _declared(metric, rubrics)
    if min(values) >= 0 and max(values) <= 1:
        return 0.0, 1.0
    warnings.warn(
        f"metric={metric!r}: got {min(values):g} to {max(values):g}, expected a success of 0 to 1. Its interval is that"
        f" of an unbounded number: declare the range, as in Rubric(..., ranges={{{function}: (0, 10)}})",
        stacklevel=3,
    )
    return None


def _contributions(results: Sequence[GenerateResult]) -> dict[str, Contribution]:
    """Add up what every actor did to the answers that it was handed in finished episodes, in the order of acting."""
    finished = [node.rollout for result in results for node in result.walk() if node.rollout.error is None]
    contributions: defaultdict[str, Contribution] = defaultdict(Contribution)
    for step in (step for rollout in finished for step in rollout.steps):
        contributions[str(step.actor_id)] += Contribution(**step.info.get("handed", {}))
    return {actor: contribution for actor, contribution in contributions.items() if contribution.handed}


def _by_task(
    results: Sequence[GenerateResult], values: Sequence[float], clusters: Sequence[Hashable], bounds: Bounds | None
) -> dict[str, Estimate]:
    of_task: defaultdict[str, tuple[list[float], list[Hashable]]] = defaultdict(lambda: ([], []))
    for result, value, cluster in zip(results, values, clusters, strict=True):
        if (task := result.rollout.facts.task) is not None:
            own = of_task[task]
            own[0].append(value)
            own[1].append(cluster)
    return {task: estimate(*own, bounds) for task, own in of_task.items()}


def _pass_at(values: Sequence[float], clusters: Sequence[Hashable], samples: int) -> dict[int, Estimate]:
    """Return pass@k for the powers of 2 up to ``samples`` and for ``samples``. An attempt passes with success 1."""
    if samples == 1:
        return {}
    counts = (np.array(values).reshape(-1, samples) == 1).sum(axis=1)
    ks = sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
    rates = {k: [pass_at_k(samples, int(count), k) for count in counts] for k in ks}
    return {k: estimate(of_k, clusters[::samples], (0.0, 1.0)) for k, of_k in rates.items()}


def compare(first: Evaluation, second: Evaluation) -> PairedDifference | None:
    """Compare the success of ``first`` and ``second`` question by question; ``None`` if one of them is a gap.

    Raises ``ValueError`` if their questions differ.
    """
    if first.clusters != second.clusters or first.samples != second.samples:
        raise ValueError("first and second have different questions: evaluate both with the same requests")
    if first.gap or second.gap:
        return None
    bounds = first.bounds if first.bounds == second.bounds else None
    return paired_difference(first.values, second.values, first.clusters, bounds)
