"""Recomputes the advantages of a run's recorded episodes under another credit rule.

It reads the steps in order and credits each step as a whole, as the run did, so rules with a state (RAE) pass through
the same states. It also recomputes the run's own rule: if that gives the recorded advantages, the record is sufficient.
Every number here comes from ``rollouts.jsonl``; no model is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.credit import build_rule, registry
from turnwise.credit.by_task import CreditByTask
from turnwise.report.read import parse_config, read_config_text
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import advantages_of, penalize
from turnwise.train.log.lines import newest_lines, read_rows
from turnwise.types import CreditAssigner, GenerateResult, Rollout, Sample, Step
from turnwise.types.short_prompts import whole_steps
from turnwise.utils.code_files import import_recorded
from turnwise.utils.files import damage_named
from turnwise.utils.literals import literal
from turnwise.utils.registry import import_by_name, option_types


@dataclass(frozen=True, slots=True)
class ComparedCall:
    """One model call: its place in the run, and its advantage as recorded and by the other rule."""

    step: int
    rollout: str
    index: int
    actor: str
    before: float
    after: float


@dataclass(slots=True)
class Comparison:
    """All compared ``calls``. For ``own_exact`` of them the run's own rule gives exactly the recorded advantage;
    ``None`` if that rule is unknown.

    ``incomplete`` maps a step with missing records to its numbers of recorded and of all episodes.
    """

    rule: str
    own_rule: str | None
    calls: list[ComparedCall] = field(default_factory=list)
    own_exact: int | None = None
    incomplete: dict[int, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    penalized: bool = False
    """True if the record holds what was taken from rewards before the credit rule saw them."""


@dataclass(frozen=True, slots=True)
class ActorDifference:
    """Differences of the other rule for one actor. Shares are of its ``calls``. ``correlation`` is Pearson's, ``None``
    if one side does not vary. ``sign_changes`` is the share of calls whose two advantages have opposite signs."""

    actor: str
    calls: int
    mean: tuple[float, float]
    std: tuple[float, float]
    zero: tuple[float, float]
    sign_changes: float
    correlation: float | None
    biggest: list[ComparedCall]


def compare_credit(
    folder: Path, rule: str | None = None, *, options: Mapping[str, Any] | None = None, step: int | None = None
) -> Comparison:
    """Credit the recorded calls of the run in ``folder`` (of one ``step``, or all) by ``rule``, by default its own.

    ``rule`` and ``options`` are as in a config's ``credit`` section; for the run's own rule, ``options`` override the
    run's options. Text values are parsed by the types of the rule's options (:func:`turnwise.utils.literals.literal`).
    Raises ``ValueError`` for a folder without recorded episodes, and for a step that has none.
    """
    with damage_named(folder):
        return _compare_credit(folder, rule, options or {}, step)


def _compare_credit(folder: Path, rule: str | None, options: Mapping[str, Any], step: int | None) -> Comparison:
    config = parse_config(read_config_text(folder / "config.toml"))
    sections = _own_sections(config)
    _import_rules(config, [*(str(one["rule"]) for one in sections.values()), rule or ""])
    if rule is None and not sections:
        raise ValueError(f"rule=None: {folder} has no config.toml that names its own; name one by --rule")
    if rule is None and options and len(sections) > 1:
        raise ValueError(f"options={sorted(options)}: expected none, as each task has its own rule; name one by --rule")
    # Build both rules.
    own_name, own = _own_rule(sections, folder)
    name, other = own_name, _own_rule(sections, folder)[1]
    if rule is not None or options:
        name = rule or str(own_name)
        types = option_types(import_by_name(registry, name, "rule"))
        given = {
            key: literal(value, types.get(key, Any)) if isinstance(value, str) else value
            for key, value in options.items()
        }
        chosen = {**(sections[""].get("options", {}) if name == own_name else {}), **given}
        other = build_rule(name, chosen, "rule", "options", methods=["compute"])
    assert name is not None and other is not None
    # Credit every step, because rules may have a state; keep the chosen ones.
    comparison = Comparison(name, own_name, own_exact=None if own is None else 0)
    metrics = read_rows(folder / "metrics.jsonl")
    episodes = {int(row["step"]): int(row["episodes"]) for row in metrics if "episodes" in row}
    for number, results in recorded_steps(folder / "rollouts.jsonl"):
        calls, exact = _compare_step(number, results, other, own)
        if step is None or step == number:
            _take_step(comparison, number, results, calls, exact, episodes.get(number, 0))
    if not comparison.calls:
        where = "no step" if step is None else f"step={step!r}: no step of this number"
        raise ValueError(f"{where} of {folder / 'rollouts.jsonl'} holds a call with an advantage")
    actors = config.get("actors", {}).items()
    taught = [name for name, each in actors if isinstance(each, Mapping) and each.get("teacher")]
    if taught and not config.get("distill", {}).get("add_to_reward"):
        comparison.notes.append(f"the run set the advantages of {', '.join(taught)} to 0: they learned from teachers")
    kl = config.get("loss", {}).get("kl", {})
    if kl.get("coef", 0) and kl.get("apply_to") == "reward" and not comparison.penalized:
        comparison.notes.append("the run took a KL penalty from its rewards, which the record does not hold")
    return comparison


def rule_of_run(folder: Path) -> CreditAssigner | None:
    """Build the credit rule of the run in ``folder``, or those of its tasks; ``None`` if no config names them."""
    config = parse_config(read_config_text(folder / "config.toml"))
    sections = _own_sections(config)
    _import_rules(config, [str(one["rule"]) for one in sections.values()])
    return _own_rule(sections, folder)[1]


def _import_rules(config: Mapping[str, Any], rules: Sequence[str]) -> None:
    """Import the files that the run had its own rules from."""
    for each in dict.fromkeys(rules):
        if (module := each.partition(":")[0]) in config.get("code", {}) and ":" in each:
            import_recorded(module, config["code"][module])


def _own_sections(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the ``credit`` sections of a run by task, ``""`` in a run with one task; none if no config names them."""
    tasks = {name: one.get("credit") or {} for name, one in config.get("tasks", {}).items()}
    sections = tasks or {"": config.get("credit") or {}}
    known = all(section.get("rule", "task") != "task" for section in sections.values())  # "task" is a program's own
    return sections if known else {}


def _own_rule(sections: Mapping[str, Mapping[str, Any]], folder: Path) -> tuple[str | None, CreditAssigner | None]:
    """Return the name of the run's own rule, or of those of its tasks, and build it."""
    rules = {
        name: build_rule(section["rule"], section.get("options", {}), methods=["compute"])
        for name, section in sections.items()
    }
    if not rules or "" in rules:
        return (sections[""]["rule"], rules[""]) if rules else (None, None)
    task_of_type = {row["episode_type"]: row["meta"]["task"] for row in read_rows(folder / "rollouts.jsonl")}
    return ", ".join(f"{name}: {sections[name]['rule']}" for name in sections), CreditByTask(rules, task_of_type)


def differences(comparison: Comparison, biggest: int = 3) -> list[ActorDifference]:
    """Summarize ``comparison`` by actor, in order of appearance, each with its ``biggest`` largest changes."""
    rows = []
    for actor in dict.fromkeys(call.actor for call in comparison.calls):
        calls = [call for call in comparison.calls if call.actor == actor]
        before, after = (np.array([getattr(call, side) for call in calls]) for side in ("before", "after"))
        varies = before.std() > 0 and after.std() > 0
        changed = sorted(calls, key=lambda call: -abs(call.after - call.before))[:biggest]
        rows.append(
            ActorDifference(
                actor,
                len(calls),
                mean=(float(before.mean()), float(after.mean())),
                std=(float(before.std()), float(after.std())),
                zero=(float((before == 0).mean()), float((after == 0).mean())),
                sign_changes=float((before * after < 0).mean()),
                correlation=float(np.corrcoef(before, after)[0, 1]) if varies else None,
                biggest=[call for call in changed if call.after != call.before],
            )
        )
    return rows


def render(comparison: Comparison) -> str:
    """Format the comparison as text: its basis, a line per actor, and each actor's biggest changes."""
    # The basis of the comparison, with notes on missing records.
    calls, steps = comparison.calls, {call.step for call in comparison.calls}
    lines = [f"{len(calls)} model calls of {len(steps)} steps, rule {comparison.rule!r}"]
    if comparison.own_exact is not None:
        lines.append(f"the run's own rule {comparison.own_rule!r} gives {comparison.own_exact} of them back exactly")
    if comparison.incomplete:
        held, whole = (sum(counts) for counts in zip(*comparison.incomplete.values(), strict=True))
        lines.append(
            f"note: {len(comparison.incomplete)} steps hold {held} of {whole} episodes (log.rollouts_per_step): groups "
            "and baselines lack the others"
        )
    lines += [f"note: {note}" for note in comparison.notes]
    # One line per actor.
    lines += [
        "",
        f"{'actor':<16}{'calls':>7}{'mean':>18}{'std':>18}{'zero':>16}{'sign changed':>14}{'correlation':>13}",
    ]
    rows = differences(comparison)
    for row in rows:
        lines.append(
            f"{row.actor:<16}{row.calls:>7}{_pair(row.mean, '.3f'):>18}{_pair(row.std, '.3f'):>18}"
            f"{_pair(row.zero, '.0%'):>16}{row.sign_changes:>14.1%}"
            f"{'-' if row.correlation is None else format(row.correlation, '.3f'):>13}"
        )
    # The biggest changes of each actor.
    changes = [call for row in rows for call in row.biggest]
    if changes:
        lines += ["", "the biggest changes"]
    for call in changes:
        where = f"step {call.step}, episode {call.rollout}, call {call.index}"
        lines.append(f"{call.actor:<16}{_pair((call.before, call.after), '+.3f'):>18}  {where}")
    return "\n".join(lines) + "\n"


def recorded_steps(path: Path) -> Iterator[tuple[int, list[GenerateResult]]]:
    """Yield ``(step, results)`` of ``rollouts.jsonl``, step by step, without an unfinished last line."""
    _check_records(path)
    for step, group in itertools.groupby(read_rows(path), key=lambda row: int(row["step"])):
        yield step, [result_of(row) for row in group]


def newest_results(path: Path) -> Iterator[tuple[int, GenerateResult]]:
    """Yield ``(step, result)`` of ``rollouts.jsonl`` as :func:`recorded_steps`, but the newest one first."""
    _check_records(path)
    for line in newest_lines(path):
        yield int(line.row["step"]), result_of(line.row)


def _check_records(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path.parent}: no run folder with recorded episodes, expected {path.name} in it")


def result_of(row: Mapping[str, Any], parent: str | None = None) -> GenerateResult:
    """Convert a line of ``rollouts.jsonl`` into a result, with all parts that credit rules use."""
    known = {name: row[name] for name in Rollout.__dataclass_fields__ if name in row}
    steps = [_step_of(step) for step in whole_steps(row["steps"])]
    rollout = Rollout.of_record({"artifact": None, **known, "steps": steps})
    children = [result_of(child, rollout.id) for child in row["children"]]
    return GenerateResult(
        rollout,
        children,
        is_trainable=row["is_trainable"],
        group_id=row["group_id"],
        parent_id=row.get("parent_id", parent),
    )


def _step_of(row: Mapping[str, Any]) -> Step:
    known = {name: row[name] for name in Step.__dataclass_fields__ if name in row}
    known["policy_versions"] = [(count, version) for count, version in row["policy_versions"]]
    known["group"] = _hashable(row["group"])
    known["from_branch"] = _hashable(row.get("from_branch"))
    if "state" in row["info"]:  # GiGPO's anchor
        known["info"] = {**row["info"], "state": _hashable(row["info"]["state"])}
    return Step.of_record(known)


def _hashable(value: Any) -> Any:
    """Convert the lists that JSON made back into tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _compare_step(
    number: int,
    results: Sequence[GenerateResult],
    other: CreditAssigner,
    own: CreditAssigner | None,
) -> tuple[list[ComparedCall], int]:
    """Return the calls of one step, and the number of calls whose advantage the run's own rule reproduces."""
    samples = collect_samples(results)
    penalize(samples, [_collected_penalty(sample) for sample in samples])
    after = advantages_of(samples, other, results).tolist()
    again = advantages_of(samples, own, results).tolist() if own is not None else after
    rows = [
        (ComparedCall(number, s.rollout_id, s.step_index, s.actor, s.advantage, new), old == s.advantage)
        for s, new, old in zip(samples, after, again, strict=True)
        if s.advantage is not None
    ]
    return [call for call, _ in rows], sum(exact for _, exact in rows)


def _collected_penalty(sample: Sample) -> float:
    """Return what the run took from a sample's reward before the credit rule saw it."""
    changes = [after for what, _, _, after in sample.facts.ledger or () if what == "reward"]
    return sample.reward - changes[-1] if changes and changes[-1] is not None else 0.0


def _take_step(
    comparison: Comparison,
    number: int,
    results: Sequence[GenerateResult],
    calls: list[ComparedCall],
    exact: int,
    episodes: int,
) -> None:
    comparison.calls += calls
    if comparison.own_exact is not None:
        comparison.own_exact += exact
    nodes = [node for top in results for node in top.walk()]
    changes = (change for node in nodes for step in node.rollout.steps for change in step.facts.ledger or ())
    comparison.penalized |= any(name == "kl" for _, name, _, _ in changes)
    held = len(nodes)
    if held < episodes:
        comparison.incomplete[number] = (held, episodes)


def _pair(values: tuple[float, float], how: str) -> str:
    return " -> ".join(format(value, how) for value in values)
