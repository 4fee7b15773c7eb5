"""Every metric of a run: its name, unit, denominator and healthy range. ``docs/metrics.md`` is made of it.

A name has parts in angle brackets: ``<actor>``, ``<policy>``, ``<function>`` (of the rubric), ``<cause>`` and others. A
part stands for text without a slash, ``<function>`` and ``<name>`` for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or those of one pattern: what it measures, in which unit, over what, and what is healthy.

    Example: ``Metric("truncated/<actor>", "share", "calls of the actor", "at most 0.1", "calls at their token limit")``
    """

    name: str
    unit: str
    over: str
    healthy: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics under one heading, with the parts that may stand before each name."""

    title: str
    text: str
    metrics: tuple[Metric, ...]
    before: tuple[str, ...] = field(default=("",))


def _rows(*rows: tuple[str, str, str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(*row) for row in rows)


EPISODES, ACTED = "episodes without an error", "episodes without an error in which the actor acted"
CALLS, TOKENS = "calls", "trained tokens"

OF_POLICY = ("<policy>/", "<policy>/<actor>/")

GROUPS: tuple[Group, ...] = (
    Group(
        "Success and rewards",
        "Sampled, with every branch of a tree. A run of several tasks also has them for each: "
        "`metric/<task>/<name>`.",
        _rows(
            ("success", "share", EPISODES, "rises", "mean of the task's success metric, 0 without it"),
            ("success_selected", "share", EPISODES, "rises", "the same where a tree goes on from the best branches"),
            ("reward", "reward", "calls with a reward of their own", "rises", "mean step reward"),
            ("step_reward/<actor>", "reward", "the actor's calls with one", "rises", "mean step reward"),
            ("reward/<actor>", "reward", ACTED, "rises", "mean reward of the rubric, 0 where it pays nothing; a child "
             "that inherits counts once"),
            ("raw_reward/<actor>", "reward", ACTED, "", "the same before an overlong penalty"),
            ("overlong_penalty/<actor>", "reward", "the actor's calls", "near 0", "what calls near their limit lost"),
            ("metric/<function>", "as returned", ACTED, "", "mean value of a reward function; 0 where an invalid action"
             " ended the episode, or where it pays and left the actor out; none if it never names the actor"),
            ("team_difference/<actor>", "reward", "the actor's actions", "above 0", "change of the team's value"),
            ("teacher_kl/<actor>", "nats per token", "calls with a teacher", "falls", "log-prob minus the teacher's"),
            ("payoffs/none", "share", "episodes that reward several actors", "falls", "none earns more than 0"),
            ("payoffs/general_sum", "share", "episodes that reward several actors", "", "rewards differ and don't add "
             "up to 0"),
        ),
        ("", "metric/<task>/"),
    ),
    Group(
        "Episodes and calls",
        "",
        _rows(
            ("episodes", "count", "step", "", "episodes, nested ones too"),
            ("episodes/failed", "count", "step", "0", "episodes with an error"),
            ("episodes/retried", "count", "step", "0", "repetitions of failed attempts"),
            ("episodes/<cause>", "count", "step", "0", "attempts without a call, or that a process failed"),
            ("sampled_tokens", "tokens", "step", "", "all sampled tokens, trained or not"),
            ("playout_tokens", "tokens", "step", "", "those of a tree's playouts"),
            ("total_sampled_tokens", "tokens", "run", "", "sampled so far"),
            ("completion_tokens/<actor>", "tokens", "calls of the actor", "steady", "mean length of an answer"),
            ("truncated/<actor>", "share", "calls of the actor", "at most 0.1", "calls at their token limit"),
            ("cut_calls/<actor>", "share", "its answers with calls of tools", "at most 0.1", "the limit cut the last "
             "call"),
            ("shortened/<actor>", "count", CALLS, "0", "calls whose chat `on_context` shortened"),
            ("ended/max_turns", "share", "finished multi-turn episodes", "", "ended at `max_turns`"),
            ("ended/context", "share", EPISODES, "0", "outgrew the context"),
            ("ended/thought", "count", CALLS, "0", "calls that ended in their thought"),
            ("tool_errors/<tool>", "count", "step", "0", "calls of a tool that raised"),
            ("reward_errors/<name>", "count", "step", "0", "calls of a reward function that raised"),
            ("hint_errors/<episode>", "count", "step", "0", "calls of `Episode.hint` that raised"),
            ("prompts/rendered_again/<reason>", "count", CALLS, "0", "chats that do not go on from sampled tokens"),
            ("openai/<name>", "count", "step", "", "calls of a model behind another server"),
        ),
        ("", "<task>/"),
    ),
    Group(
        "Answers, groups and samples",
        "",
        _rows(
            ("answers/prompts/<actor>", "count", "step", "", "different prompts"),
            ("answers/distinct/<actor>", "count", "step", "about as many as prompts", "different answers"),
            ("answers/commonest/<actor>", "share", "calls that can train", "below 0.9", "calls with the commonest "
             "answer"),
            ("groups/compared/<actor>", "count", "step", "", "groups of several attempts of the actor"),
            ("groups/tied_failed/<actor>", "share", "compared groups", "below 0.75 in all", "all attempts fail"),
            ("groups/tied_same/<actor>", "share", "compared groups", "below 0.75 in all", "all wrote the same"),
            ("groups/tied_alike/<actor>", "share", "compared groups", "below 0.75 in all", "one reward for different "
             "answers"),
            ("groups/tied_succeeded/<actor>", "share", "compared groups", "low at first", "all attempts succeed"),
            ("groups/mixed_prompts", "share", "groups", "as the task is", "groups that compare different prompts"),
            ("verdicts/base_rate/<function>", "share", "the actor's calls", "0.25 to 0.75", "the commoner of two "
             "answers is right"),
            ("verdicts/skill/<function>", "Youden's J", "the actor's calls", "rises", "0 tells nothing, 1 is always "
             "right"),
            ("samples", "count", "step", "", "calls that train"),
            ("samples/<actor>", "count", "step", "above 0", "calls that train, of an actor whose policy trains now"),
            ("dropped/<cause>", "count", "step", "low", "calls that don't train, by cause"),
            ("without_advantage/<cause>", "count", "step", "", "calls that train beside an advantage of 0"),
            ("extra_batches", "count", "step", "", "draws of dynamic sampling"),
            ("resampled_groups", "count", "step", "", "groups that it drew"),
            ("informative_groups", "count", "step", "as many as asked", "groups with an advantage"),
        ),
        ("", "<task>/"),
    ),
    Group(
        "Updates",
        "Of a policy, over all its updates of the step. Each name begins with the policy's; in those of single actors "
        "the actor's follows: `default/entropy`, `default/solver/entropy`.",
        _rows(
            ("loss", "", "updates", "", "mean loss"),
            ("grad_norm", "", "updates", "steady", "norm of the gradient before clipping"),
            ("updates", "count", "step", "above 0", "optimizer steps"),
            ("skipped_updates", "count", "step", "0", "updates that were not finite"),
            ("learning_rate", "", "step", "", "the rate"),
            ("tokens", "tokens", "step", "", "trained tokens, once for each update"),
            ("unique_token_share", "share", "tokens of all rows", "", "tokens that passed through the model"),
            ("sampler_trainer_logprob_max_diff", "nats", TOKENS, "below 0.1", "difference of their log-probs, before "
             "the first update"),
            ("entropy", "nats per token", TOKENS, "0.05 to 2 at the start", "entropy of the policy"),
            ("entropy_coef", "", "step", "", "the entropy bonus's coefficient"),
            ("approx_kl_k1", "nats per token", TOKENS, "below 0.1", "KL of the step, first-order"),
            ("approx_kl_k3", "nats per token", TOKENS, "below 0.1", "KL of the step; above 0.3 it moves too far"),
            ("clip_fraction_low", "share", TOKENS, "below 0.2", "ratios clipped from below"),
            ("clip_fraction_high", "share", TOKENS, "below 0.2", "ratios clipped from above"),
            ("dual_clip_fraction", "share", TOKENS, "near 0", "capped ratios"),
            ("selected", "share", TOKENS, "", "tokens that the loss selects"),
            ("ratio_mean", "ratio", TOKENS, "near 1", "updated against sampling weights"),
            ("ratio_max", "ratio", TOKENS, "below 20", "the largest of them"),
            ("mismatch_kl", "nats per token", TOKENS, "near 0", "sampler against trainer"),
            ("importance_weight", "ratio", TOKENS, "near 1", "mean weight of the correction"),
            ("ess", "share", TOKENS, "above 0.5", "effective sample size"),
            ("rejected", "share", TOKENS, "near 0", "tokens that the correction rejects"),
            ("kl", "nats per token", TOKENS, "steady", "KL to the reference"),
            ("kl_coef", "", "step", "", "its coefficient"),
            ("kl_penalty", "reward", "rows", "", "what it cost in the reward"),
            ("reference_version", "version", "step", "", "weights of the reference"),
            ("masked/<name>", "share", TOKENS, "low", "tokens that a mask drops"),
            ("top_entropy", "share", TOKENS, "", "tokens of the largest entropies"),
            ("second_moment", "", TOKENS, "", "mean square of the drift"),
            ("off_policy", "share", TOKENS, "low", "tokens of rows that drifted"),
            ("value_loss", "", TOKENS, "falls", "loss of the critic"),
            ("value_mean", "reward", TOKENS, "", "mean value"),
            ("value_clip_fraction", "share", TOKENS, "low", "clipped values"),
            ("explained_variance", "share", TOKENS, "above 0", "variance of the returns that the values explain"),
            ("teacher_forward_kl", "nats per token", TOKENS, "falls", "forward KL to the teacher"),
        ),
        OF_POLICY,
    ),
    Group(
        "Validation",
        "Greedy, on held-out questions, every `eval.every` steps. [Runs](runs.md#what-each-actor-adds) explains them.",
        _rows(
            ("validation", "share", "questions", "rises", "success"),
            ("validation/<task>", "share", "questions of the task", "rises", "its success"),
            ("validation/<actor>/handed", "count", "answers", "", "answers that the actor was handed"),
            ("validation/<actor>/right", "count", "parts", "", "right parts that it was handed"),
            ("validation/<actor>/wrong", "count", "parts", "", "wrong parts that it was handed"),
            ("validation/<actor>/changed", "share", "handed answers", "", "answers that it changed"),
            ("validation/<actor>/fixed", "share", "wrong parts", "above `broken`", "parts that it made right"),
            ("validation/<actor>/broken", "share", "right parts", "near 0", "parts that it made wrong"),
            ("validation/<actor>/without", "share", "questions", "below `validation`", "success without the actor"),
            ("validation/<actor>/alone", "share", "questions", "", "success of the actor alone"),
            ("exploitability", "payoff per game", "the whole game", "falls", "what a best response gains"),
            ("unreadable", "share", "decisions of the game", "near 0", "probability of texts that are no action"),
        ),
    ),
    Group(
        "Curriculum, league and health",
        "Only where the config asks for them.",
        _rows(
            ("curriculum/seen", "count", "pool", "rises", "questions with an attempt"),
            ("curriculum/always", "count", "pool", "", "of these, always solved"),
            ("curriculum/never", "count", "pool", "falls", "of these, never solved"),
            ("curriculum/drawn_p", "share", "drawn questions", "0.2 to 0.8", "their mean solve rate when drawn"),
            ("curriculum/level", "level", "step", "rises", "the highest admitted level"),
            ("league/<name>", "as named", "games with past policies", "", "games, members, scores and ratings"),
            ("health/<signal>/<actor>", "as the signal", "the window", "", "a signal's mean"),
            ("health/unhealthy", "count", "the window", "0", "unhealthy signals"),
            ("pool/<name>", "count", "step", "", "what a store holds"),
        ),
        ("", "<task>/"),
    ),
    Group(
        "Time, sampling and cluster",
        "",
        _rows(
            ("staleness", "versions", "sampled tokens", "at most `loop.max_staleness`", "mean age of the weights"),
            ("staleness_max", "versions", "sampled tokens", "at most `loop.max_staleness`", "the oldest"),
            ("seconds_rollout", "s", "step", "", "sampling"),
            ("seconds_update", "s", "step", "", "updates and weight sync"),
            ("tokens_per_second", "tokens/s", "step", "steady", "sampled tokens by the time of both"),
            ("hook_seconds/<hook>", "s", "step", "below 0.1", "time in which a hook held the event loop"),
            ("user_code/waiting", "count", "step", "0", "calls of user code that waited for a thread"),
            ("user_code/abandoned", "count", "step", "0", "calls that passed their time limit"),
            ("inference/<name>", "as named", "step", "", "rates, growth and peaks of the client and its engines"),
            ("cluster/<name>", "as named", "step", "", "times, bytes, versions and restarts of a cluster"),
            ("carried_groups", "count", "step", "", "groups that an earlier step sampled (`rollout.oversample`)"),
        ),
    ),
)  # fmt: skip
"""The metrics by heading, without those that features describe themselves."""


def groups() -> list[Group]:
    """Return all metrics by heading, those of features too (``Term.described``)."""
    from turnwise.train.config.features import FEATURES, term_classes  # which those who only read names don't need

    rows = [row for term in term_classes(FEATURES) for row in term.described]
    text = "Only where the config asks for them; they begin like those of updates."
    return [*GROUPS, Group("Features", text, _rows(*rows), OF_POLICY)]


_ANY = ("function", "name")


def metrics() -> Iterator[tuple[Group, Metric]]:
    """Yield each metric with its group."""
    for group in groups():
        yield from ((group, metric) for metric in group.metrics)


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """Return a pattern for each metric with each beginning; those with fewer free parts come first."""
    made = [(f"{before}{metric.name}", metric) for group, metric in metrics() for before in group.before]
    return [(re.compile(_regex(name)), metric) for name, metric in sorted(made, key=lambda one: one[0].count("<"))]


def _regex(name: str) -> str:
    parts = re.split(r"<(\w+)>", name)
    literal = [re.escape(part) if index % 2 == 0 else (".+" if part in _ANY else "[^/]+")
               for index, part in enumerate(parts)]  # fmt: skip
    return "".join(literal) + r"\Z"


def metric_of(name: str) -> Metric | None:
    """Return the metric that ``name`` is one of; ``None`` for an unknown name.

    Example: ``metric_of("truncated/solver").unit`` is ``"share"``.
    """
    return next((metric for pattern, metric in _patterns() if pattern.match(name)), None)


def with_policy(row: Mapping[str, Any], policy: str) -> Mapping[str, Any]:
    """Return a step's metrics as they are named now. Runs of one policy once wrote ``loss`` for ``<policy>/loss``.

    Example: ``with_policy({"updates": 1, "step": 3}, "default")`` is ``{"default/updates": 1, "step": 3}``.
    """
    if "updates" not in row:  # which each update wrote
        return row
    actors = {name.partition("/")[2] for name in row if name.startswith("completion_tokens/")}

    def renamed(name: str) -> str:
        actor, _, rest = name.partition("/")
        bare = rest if actor in actors else name
        return f"{policy}/{name}" if _of_updates().match(bare) else name

    return {renamed(name): value for name, value in row.items()}


@cache
def _of_updates() -> re.Pattern[str]:
    """Match the metrics of updates without their policy and actor."""
    return re.compile("|".join(_regex(metric.name) for group, metric in metrics() if group.before == OF_POLICY))
