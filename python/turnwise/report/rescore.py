"""Scores a run's recorded episodes with another rubric, offline: rewards, metrics and advantages beside the old ones.

The result is a folder like a run's, with a copy of its config and the changed episodes. ``turnwise view`` and
``turnwise credit`` read it, and ``warm_start.data`` with ``warm_start.min_reward`` learns from the best of it. No
model is loaded.
"""

from __future__ import annotations

import inspect
import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from turnwise.arena.recording.rollouts_jsonl import json_line, nodes_of
from turnwise.arena.rewards.invalid_action import INVALID
from turnwise.arena.rewards.rubric import Rubric, Score
from turnwise.arena.rewards.token_rewards import TOKEN_REWARDS, add_tokens, keep_tokens
from turnwise.report.credit import result_of, rule_of_run
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import advantages_of
from turnwise.train.log.lines import read_rows
from turnwise.types import CreditAssigner, GenerateResult
from turnwise.utils.files import damage_named
from turnwise.utils.registry import import_by_name
from turnwise.utils.threads import run_to_end

RECORDED = "recorded"
"""Key of an episode that was scored again: its ``rewards``, ``metrics`` and ``advantages`` as the run had them."""

KEPT = {
    "failed": "they failed",
    "invalid_action": "an invalid action ended them",
    "several_ends": "a tree with several ends, of which the record has no extras",
    "dropped": "the rubric dropped them",
}
"""Reasons why an episode keeps its rewards."""


@dataclass(slots=True)
class Rescored:
    """``folder`` has the episodes. ``scored`` counts those with new rewards, ``kept`` the others by reason.

    ``means`` maps ``reward/<actor>`` and ``metric/<function>/<actor>`` to their means before and after, over the scored
    episodes that have them.
    """

    folder: Path
    scored: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    means: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    credited: bool = False
    """True if advantages are those of the run's own rule; else they are the recorded ones."""


def rubric_named(name: str) -> Rubric:
    """Import ``"module:name"``: a rubric, a reward function or a list of them. Raises ``ValueError`` for one that asks
    for what no record has: the state of an episode, or the arena, whose judges call a model."""
    found = import_by_name({}, name, "rubric")
    rubric = found if isinstance(found, Rubric) else Rubric(found if isinstance(found, (list, tuple)) else [found])
    for function, func in zip(rubric.names, rubric.funcs, strict=True):
        if missing := {"state", "arena"}.intersection(inspect.signature(func).parameters):
            raise ValueError(
                f"rubric={name!r}: function {function!r} takes {' and '.join(sorted(missing))}, which no record has; "
                "expected functions of rollout, artifact, extras, completion, thought or rollouts"
            )
    return rubric


def rescore(run_dir: Path, rubric: Rubric, out: Path, *, episode_type: str | None = None) -> Rescored:
    """Score the recorded episodes of ``run_dir`` with ``rubric``, and write all of them into the new folder ``out``.

    ``episode_type`` names the episodes to score, by default those at the top, not nested ones. Raises ``ValueError``
    for a folder without records, an unknown type, a folder that exists, and whatever a reward function raises.
    """
    if out.exists():
        raise ValueError(f"out={str(out)!r}: exists already, expected a new folder")
    path = run_dir / "rollouts.jsonl"
    if not path.is_file():
        raise ValueError(f"run_dir={str(run_dir)!r}: no run folder with recorded episodes, expected {path.name} in it")
    done, sums = Rescored(out), defaultdict[str, tuple[list[float], list[float]]](lambda: ([], []))
    rule = rule_of_run(run_dir)
    done.credited = rule is not None
    seen: set[str] = set()
    out.mkdir(parents=True)
    try:
        with damage_named(run_dir), (out / path.name).open("w", encoding="utf-8") as file:
            for row in _scored_rows(path, rubric, rule, episode_type, done, sums, seen):
                file.write(json_line(row) + "\n")
        if episode_type is not None and episode_type not in seen:
            raise ValueError(f"episode_type={episode_type!r}: expected one of the recorded {sorted(seen)}")
        if (config := run_dir / "config.toml").is_file():
            shutil.copy(config, out)
    except BaseException:
        shutil.rmtree(out)
        raise
    done.means = {name: (_mean(old), _mean(new)) for name, (old, new) in sums.items()}
    return done


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _scored_rows(
    path: Path,
    rubric: Rubric,
    rule: CreditAssigner | None,
    episode_type: str | None,
    done: Rescored,
    sums: Mapping[str, tuple[list[float], list[float]]],
    seen: set[str],
) -> Iterator[dict[str, Any]]:
    """Yield the rows step by step, each scored and credited as a whole."""
    for _, group in itertools.groupby(read_rows(path), key=lambda row: int(row["step"])):
        rows: list[dict[str, Any]] = list(group)
        results = [result_of(row) for row in rows]
        pairs = [
            (cast(dict[str, Any], node), result, depth == 0)
            for row, top in zip(rows, results, strict=True)
            for depth, (node, result) in enumerate(zip(nodes_of(row), top.walk(), strict=True))
        ]
        seen.update(node["episode_type"] for node, _, _ in pairs)
        chosen = [
            (node, result)
            for node, result, is_top in pairs
            if (is_top if episode_type is None else node["episode_type"] == episode_type)
        ]
        run_to_end(_score(chosen, rubric, done, sums))
        _credit([(node, result) for node, result, _ in pairs], results, rule)
        yield from rows


async def _score(
    chosen: list[tuple[dict[str, Any], GenerateResult]],
    rubric: Rubric,
    done: Rescored,
    sums: Mapping[str, tuple[list[float], list[float]]],
) -> None:
    """Write new rewards and metrics into the rows, and into the results."""
    alone: list[tuple[dict[str, Any], GenerateResult, Score]] = []
    for node, result in chosen:
        reason, score = _why_kept(result), Score()
        if not reason:
            for step in result.rollout.steps:
                if step.reward is None:  # else they are the step's own
                    step.info.pop(TOKEN_REWARDS, None)
            score = await rubric.score(result.rollout)
            reason = "dropped" if score.dropped is not None else ""
        if reason:
            done.kept[reason] += 1
        else:
            alone.append((node, result, score))
    groups = defaultdict(list)
    for number, (node, result, _) in enumerate(alone):
        groups[node["episode_type"], node["group_id"] or result.rollout.id].append(number)
    for members in groups.values() if rubric.is_grouped else ():
        added = await rubric.score_group([alone[number][1].rollout for number in members])
        for number, more in zip(members, added, strict=True):
            score = alone[number][2]
            score.metrics |= more.metrics
            for actor, reward in more.rewards.items():
                score.rewards[actor] = score.rewards.get(actor, 0.0) + reward
            for actor, tokens in more.token_rewards.items():
                score.token_rewards[actor] = add_tokens(score.token_rewards.get(actor), tokens)
    for node, result, score in alone:
        keep_tokens(result.rollout, score.token_rewards)
        before = {"rewards": node["rewards"], "metrics": node["metrics"]}
        result.rollout.rewards, result.rollout.metrics = score.rewards, score.metrics
        node.update({RECORDED: node.get(RECORDED, before), "rewards": score.rewards, "metrics": score.metrics})
        done.scored += 1
        for kind, place in (("reward", "rewards"), ("metric", "metrics")):
            for old_or_new, values in enumerate((before[place], node[place])):
                for name, value in values.items():
                    sums[f"{kind}/{name}"][old_or_new].append(value)


def _why_kept(result: GenerateResult) -> str:
    rollout = result.rollout
    if rollout.error is not None:
        return "failed"
    if any(INVALID in step.info for step in rollout.steps):
        return "invalid_action"
    return "several_ends" if len(rollout.meta.get("ends", ())) > 1 else ""


def _credit(
    pairs: list[tuple[dict[str, Any], GenerateResult]], results: list[GenerateResult], rule: CreditAssigner | None
) -> None:
    """Write the steps' rewards by token and their advantages into the rows; without a rule the recorded ones stay."""
    rows = {result.rollout.id: node for node, result in pairs}
    for node, result in pairs:
        if RECORDED in node:
            node[RECORDED].setdefault("advantages", [step.get("advantage") for step in node["steps"]])
        for row, step in zip(node["steps"], result.rollout.steps, strict=True):
            row["info"].pop(TOKEN_REWARDS, None)
            if TOKEN_REWARDS in step.info:
                row["info"][TOKEN_REWARDS] = step.info[TOKEN_REWARDS]
    if rule is None or not (samples := collect_samples(results)):
        return
    for sample, advantage in zip(samples, advantages_of(samples, rule, results).tolist(), strict=True):
        rows[sample.rollout_id]["steps"][sample.step_index]["advantage"] = advantage


def render(done: Rescored) -> str:
    """Format the result as text: what was scored, the means before and after, and where it lies."""
    lines = [f"{done.scored} episodes scored again, {sum(done.kept.values())} as recorded"]
    lines += [f"note: {count} keep their rewards: {KEPT[reason]}" for reason, count in done.kept.items()]
    if not done.credited:
        lines.append("note: the run's credit rule is unknown, so the advantages are the recorded ones")
    width = max([len("mean of"), *map(len, done.means)]) + 2
    lines += ["", f"{'mean of':<{width}}{'recorded':>12}{'now':>12}"]
    for name, values in done.means.items():
        shown = ["-" if value is None else f"{value:.4g}" for value in values]
        lines.append(f"{name:<{width}}{shown[0]:>12}{shown[1]:>12}")
    return "\n".join([*lines, "", f"written to {done.folder}"]) + "\n"
