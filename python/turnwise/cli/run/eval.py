"""``turnwise eval``: measure a checkpoint on held-out questions, what each actor adds, or compare two checkpoints."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise.arena.answers import Contribution
from turnwise.cli.options import EXIT_OK
from turnwise.run.checks import task_of
from turnwise.run.load import load_run
from turnwise.run.parts import ablations_of
from turnwise.tasks import task_type
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import CONFIG_FILE, raw_settings
from turnwise.train.eval.ablate import Addition
from turnwise.train.eval.evaluate import Evaluation, compare, describe, finite, plain_evaluation
from turnwise.train.eval.statistics import Estimate, PairedDifference
from turnwise.train.log.run_log import RunLog
from turnwise.train.validate import read_config
from turnwise.utils.output import console, say
from turnwise.utils.registry import announce_code


def run(options: argparse.Namespace) -> int:
    if options.base_url is not None:
        measured = measure_remotely(options)
        say(json.dumps(to_json(measured), indent=1) if options.json else render(measured))
        return EXIT_OK
    if options.config is None:
        raise ValueError("expected a config file or a run folder (without one only with --base-url)")
    if options.model is not None or options.api_key_env is not None:
        raise ValueError("--model, --api-key-env: expected --base-url with them")
    path = options.config / CONFIG_FILE if options.config.is_dir() else options.config
    announce_code(raw_settings(path, options.overrides))
    config = read_config(path, options.overrides, task_type=task_type)
    if options.config.is_dir():
        config = config.model_copy(update={"run_dir": options.config})
    measured = measure(
        config,
        options.checkpoint,
        options.against,
        ablate=[name for given in options.ablate for name in given.split(",")],
        samples=options.samples,
        temperature=options.temperature,
        show=options.show,
    )
    say(json.dumps(to_json(measured), indent=1) if options.json else render(measured))
    return EXIT_OK


def measure_remotely(options: argparse.Namespace) -> MeasuredCheckpoint:
    """Play the agent of ``--task gateway:...`` with the models of another server."""
    from turnwise.integrations.gateway.remote import RemoteGateway, evaluate_remotely
    from turnwise.integrations.gateway.task import GatewayTask

    path = options.config
    path = path / CONFIG_FILE if path is not None and path.is_dir() else path
    announce_code(raw_settings(path, options.overrides))
    config = read_config(path, options.overrides, task_type=task_type)
    task = task_of(config)
    if not isinstance(task, GatewayTask):
        raise ValueError(f"task={config.task!r}: --base-url plays agents: expected --task gateway:module:function")
    if options.model is None:
        raise ValueError("--base-url: expected --model with the model's name there")
    gateway = RemoteGateway(options.base_url, options.model, key_variable=options.api_key_env)
    evaluation = evaluate_remotely(
        task, gateway, questions=config.eval.num_prompts, samples=options.samples, show=options.show
    )
    return MeasuredCheckpoint(f"{options.model} at {options.base_url}", evaluation)


def evaluate_from_config(
    config: TrainConfig,
    checkpoint: str | Path | None = None,
    *,
    samples: int = 1,
    temperature: float | None = None,
    verbose: bool = True,
) -> Evaluation:
    """Measure the held-out success of a checkpoint: the given one, else the newest, else the starting weights.

    ``checkpoint`` is ``"newest"``, ``"best"`` (of the validations so far), ``"start"``, the name of a checkpoint of the
    run, or a folder. Each question gets ``samples`` answers at ``temperature``; by default one answer is greedy, and
    several use ``rollout.temperature``. Raises ``ValueError`` for several greedy samples, which would be equal. With
    ``verbose`` the log shows the result in a line; otherwise notes go to stderr.
    """
    return _evaluated(config, checkpoint, samples=samples, temperature=temperature, verbose=verbose).evaluation


def _evaluated(
    config: TrainConfig,
    checkpoint: str | Path | None,
    *,
    samples: int,
    temperature: float | None,
    ablate: Sequence[str] = (),
    verbose: bool = False,
    show: int = 0,
) -> MeasuredCheckpoint:
    """Evaluate one checkpoint, and what the actors named in ``ablate`` add."""
    if temperature is None:
        temperature = config.rollout.temperature if samples > 1 else 0.0
    if samples > 1 and not temperature > 0:
        raise ValueError(
            f"samples={samples!r}, temperature={temperature!r}: greedy samples are all equal. Set a temperature > 0"
        )
    try:
        ablations = ablations_of(task_of(config), ablate) if ablate else []
    except ValueError as error:
        raise ValueError(f"--ablate {','.join(ablate)}: {error}") from None
    quiet = RunLog(config.run_dir, 0, writers=[], console=console("stderr"), progress=False)
    unserved = config.log.model_copy(update={"prometheus": None})  # the run itself may hold the port
    run, chosen = load_run(config.model_copy(update={"log": unserved}), checkpoint, None if verbose else quiet)
    with closing(run):
        sampling = run.arena.sampling.with_(temperature=temperature)
        result, additions = run.ablate(ablations, sampling, samples=samples, show=show)
    name = "starting weights" if chosen is None else str(chosen)
    if verbose:
        run.trainer.log.note(f"{name}: {describe(result)}")
    return MeasuredCheckpoint(name, result, additions)


@dataclass(frozen=True, slots=True)
class MeasuredCheckpoint:
    """A checkpoint's evaluation, and success without the ablated actors (``additions``).

    A comparison also has the other checkpoint's evaluation, and the paired difference.
    """

    checkpoint: str
    evaluation: Evaluation
    additions: list[Addition] = field(default_factory=list)
    against: str | None = None
    other: Evaluation | None = None
    difference: PairedDifference | None = None


def measure(
    config: TrainConfig,
    checkpoint: str | None = None,
    against: str | None = None,
    *,
    ablate: Sequence[str] = (),
    samples: int = 1,
    temperature: float | None = None,
    show: int = 0,
) -> MeasuredCheckpoint:
    """Evaluate ``checkpoint``; also ``against``, or the team without each actor of ``ablate`` (``"all"``: of all).

    All of them play the same questions with the same seeds. ``show`` episodes of each are kept as text.
    """
    if against is not None and ablate:
        raise ValueError(f"--against {against}, --ablate {','.join(ablate)}: expected one of them")
    first = _evaluated(config, checkpoint, samples=samples, temperature=temperature, ablate=ablate, show=show)
    if against is None:
        return first
    second = _evaluated(config, against, samples=samples, temperature=temperature, show=show)
    return replace(
        first,
        against=second.checkpoint,
        other=second.evaluation,
        difference=compare(first.evaluation, second.evaluation),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------
def render(measured: MeasuredCheckpoint) -> str:
    """Show each checkpoint with its pass@k, metrics, rewards and contributions; then the difference of two."""
    lines = _lines(measured.checkpoint, measured.evaluation)
    lines += contribution_table(measured.evaluation, measured.additions)
    if measured.other is not None:
        lines += _lines(str(measured.against), measured.other)
    if (paired := measured.difference) is not None:
        lines.append(
            f"{measured.checkpoint} against {measured.against}: success {paired.difference.mean:+.1%} "
            f"({_interval(paired.difference, percent=True)}, {paired.difference.method}; "
            f"p = {paired.p:.3g}, {paired.test}; better in {paired.better}, worse in {paired.worse} groups)"
        )
    return "\n".join(lines)


def _lines(name: str, result: Evaluation) -> list[str]:
    lines = [f"{name}: {describe(result)}"]
    lines += [f"  pass@{k}  {at.mean:.1%} ({_interval(at, percent=True)})" for k, at in result.pass_at.items()]
    width = max((len(metric) for metric in result.estimates), default=0)
    lines += [f"  {metric:<{width}}  {at.mean:.4g} ({_interval(at)})" for metric, at in result.estimates.items()]
    lines += [f"  {count} invalid action{'s' * (count != 1)}: {reason}" for reason, count in result.invalid.items()]
    return lines + result.shown


def contribution_table(team: Evaluation, additions: Sequence[Addition]) -> list[str]:
    """Return lines with a row per actor: what it did to the answers that it received, and success without it."""
    if not additions and not team.contributions:
        return []
    measured = {addition.actor: addition for addition in additions}
    rows = [["actor", "changed", "fixed", "broken"] + ["without it", "team adds", "alone"] * bool(additions)]
    for actor in measured or team.contributions:
        made = team.contributions.get(actor, Contribution())
        counts = ((made.changed, made.handed), (made.fixed, made.wrong), (made.broken, made.right))
        rows.append([actor, *(f"{part / whole:.1%} ({part}/{whole})" if whole else "-" for part, whole in counts)])
        if additions:
            rows[-1] += _ablated(measured[actor])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [f"what each actor adds{' (same questions, same seeds)' if additions else ''}:", *shown]


def _ablated(addition: Addition) -> list[str]:
    without, alone = (
        "-" if played is None or played.gap else f"{played.success:.1%} ({played.low:.1%} to {played.high:.1%})"
        for played in (addition.without, addition.alone)
    )
    if addition.difference is None:
        return [without, "-", alone]
    at = addition.difference.difference
    return [without, f"{at.mean:+.1%} ({at.low:+.1%} to {at.high:+.1%}, p = {addition.difference.p:.3g})", alone]


def _interval(at: Estimate, *, percent: bool = False) -> str:
    if not math.isfinite(at.low + at.high):
        return "no 95% interval"
    form = "{:.1%}" if percent else "{:.4g}"
    return f"95% interval {form.format(at.low)} to {form.format(at.high)}"


def to_json(measured: MeasuredCheckpoint) -> dict[str, Any]:
    """Convert to plain JSON data; an infinite bound becomes ``None``."""
    plain: dict[str, Any] = {"checkpoint": measured.checkpoint, **plain_evaluation(measured.evaluation)}
    if measured.additions:
        plain["ablations"] = [_addition_to_json(addition) for addition in measured.additions]
    if measured.other is not None:
        plain["against"] = {"checkpoint": measured.against, **plain_evaluation(measured.other)}
    if measured.difference is not None:
        plain["difference"] = finite(asdict(measured.difference))
    return plain


def _addition_to_json(addition: Addition) -> dict[str, Any]:
    return {
        "actor": addition.actor,
        "without": None if addition.without is None else plain_evaluation(addition.without),
        "difference": None if addition.difference is None else finite(asdict(addition.difference)),
        "alone": None if addition.alone is None else plain_evaluation(addition.alone),
    }
