"""Reads a run for its report."""

from __future__ import annotations

import json
import math
import tomllib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any

from turnwise.report.cluster import lanes
from turnwise.report.curves import most_changed, read_shown_metrics, spread
from turnwise.train.log.lines import HELD_OUT, parse_line, read_rows
from turnwise.train.log.secrets import hide_in, secrets_in
from turnwise.utils.files import bounded_lines, damage_named, open_regular, parse_toml, read_json, read_regular

_EXACT = 2**53  # a browser rounds larger integers, and a seed must not be rounded


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits of a page: points per curve, episodes, and bytes of their lines in ``rollouts.jsonl``.

    A third of the episodes are the newest; the rest are spread evenly over the run.
    """

    points: int = 2000
    episodes: int = 60
    episode_bytes: int = 24_000_000

    def __post_init__(self) -> None:
        for name in ("points", "episodes", "episode_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a count >= 1")


def read_run(folder: Path, limits: ReportLimits | None = None) -> dict[str, Any]:
    """Read ``folder`` into values for JSON: ``name``, ``config``, ``curves``, ``contributions``, ``warnings``,
    ``actors``, ``tasks``, ``policies``, and ``episodes`` with their shared ``prompts``. Each of these is the first
    ``kept`` messages of the prompt ``after``, and its own ``messages``. ``recorded`` counts all recorded episodes.
    ``lanes`` has the processes of a run on a cluster (:func:`~turnwise.report.cluster.lanes`), ``None`` for others.
    ``learned`` has the first and last validation and the held-out success, ``cost`` tokens and seconds, ``changed`` two
    places in ``episodes`` (:func:`~turnwise.report.curves.most_changed`).

    Raises ``ValueError`` for a folder that no run wrote to.
    """
    with damage_named(folder):
        return _read_run(folder, limits or ReportLimits())


def _read_run(folder: Path, limits: ReportLimits) -> dict[str, Any]:
    files = [folder / name for name in ("metrics.jsonl", "rollouts.jsonl", "config.toml")]
    if not any(path.is_file() for path in files):
        raise ValueError(
            f"run_dir={str(folder)!r}: no run folder, expected one with metrics.jsonl, rollouts.jsonl or config.toml"
        )
    # Read the files; episodes share prompts by their indices in ``prompts``.
    config = read_config_text(files[2])
    settings = parse_config(config)
    prompts = Prompts()
    recorded, lines = read_episodes(files[1], limits)
    episodes = [episode(line, prompts) for line in lines]
    calls = [step for top in episodes for part in walk(top) for step in part["steps"]]
    policies = names(settings.get("policies", {}), [step["policy"] for step in calls]) or ["default"]
    metrics = read_shown_metrics(files[0], limits.points, policies[0])
    return {
        "name": folder.resolve().name,
        "config": None if config is None else hide_in(config, [*secrets_in(settings), *secrets_in(config)]),
        "planned": settings.get("steps"),
        "curves": metrics.curves,
        "lanes": lanes(folder, metrics.times),
        "contributions": metrics.contributions,
        "learned": {"validations": metrics.validations, "held_out": _held_out(folder / HELD_OUT)},
        "cost": metrics.cost,
        "changed": most_changed(episodes),
        "warnings": list(read_rows(folder / "warnings.jsonl")),
        "actors": names(metrics.actors, [step["actor"] for step in calls]),
        "tasks": list(settings.get("tasks", {})),
        "policies": policies,
        "recorded": recorded,
        "episodes": episodes,
        "prompts": prompts.all,
    }


def _held_out(file: Path) -> dict[str, Any] | None:
    """The held-out success after the last step with its interval, ``None`` before."""
    if not file.is_file():
        return None
    kept = ("step", "success", "low", "high", "episodes", "samples")
    with damage_named(file):
        read = read_json(file)
        return {name: plain(read[name]) for name in kept}


def read_config_text(file: Path) -> str | None:
    """Read a run's ``config.toml``; ``None`` if there is none. Raises ``ValueError`` naming a file that isn't UTF-8."""
    try:
        return read_regular(file).decode("utf-8") if file.exists() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected text in UTF-8 ({error})") from error


def parse_config(text: str | None) -> dict[str, Any]:
    """Parse a config; an unfinished file gives an empty dict."""
    try:
        return parse_toml(text or "")
    except tomllib.TOMLDecodeError:
        return {}


def names(*sources: Any) -> list[str]:
    """Return each name once, in order of appearance."""
    return list(dict.fromkeys(name for source in sources for name in source if name))


# ---------------------------------------------------------------------------------------------------------------------
# Episodes
# ---------------------------------------------------------------------------------------------------------------------
def read_episodes(path: Path, limits: ReportLimits) -> tuple[int, Iterator[dict[str, Any]]]:
    """Return the number of episodes in ``rollouts.jsonl``, and the chosen ones. Other lines are never parsed."""
    if not path.is_file():
        return 0, iter(())
    # Find where each line starts, then parse the chosen lines, one at a time.
    starts = array("Q", [0])
    with open_regular(path) as stream:
        for line in bounded_lines(stream, path):
            if line.endswith(b"\n"):  # else it is still being written
                starts.append(starts[-1] + len(line))
    lengths = array("Q", map(sub, starts[1:], starts))
    chosen = [(index + 1, starts[index], lengths[index]) for index in choose(lengths, limits)]
    return len(lengths), _lines_at(path, chosen)


def _lines_at(path: Path, places: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the lines with these numbers, offsets and lengths."""
    with open_regular(path) as stream:
        for number, start, length in places:
            stream.seek(start)
            yield parse_line(stream.read(length), path, number)


def choose(lengths: Sequence[int], limits: ReportLimits) -> list[int]:
    """Return the indices of at most ``limits.episodes`` lines, fewer if they are long; at least the newest line."""
    wanted = limits.episodes
    while True:
        newest = min(len(lengths), max(1, wanted // 3))
        older = len(lengths) - newest
        chosen = [*(spread(older, wanted - newest) if wanted > newest else []), *range(older, len(lengths))]
        if wanted == 1 or sum(lengths[index] for index in chosen) <= limits.episode_bytes:
            return chosen
        wanted //= 2


class Prompts:
    """The prompts of a page. Equal ones are there once, and a longer one has its new messages alone."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    def add(self, messages: Sequence[Mapping[str, Any]], after: int | None = None, kept: int = 0) -> int:
        """Return the place of the prompt of the first ``kept`` messages of prompt ``after``, and ``messages``."""
        if after is not None and not messages and kept == self.length(after):
            return after
        made = {"after": after, "kept": kept, "messages": [message(one) for one in messages]}
        place = self._places.setdefault(json.dumps(made), len(self.all))
        if place == len(self.all):
            self.all.append(made)
        return place

    def length(self, place: int) -> int:
        made = self.all[place]
        return int(made["kept"]) + len(made["messages"])


def episode(line: Mapping[str, Any], prompts: Prompts) -> dict[str, Any]:
    """Convert a line of ``rollouts.jsonl`` and its children. Prompts go into ``prompts``, as siblings share theirs."""
    kept = ("step", "id", "episode_type", "rewards", "metrics", "error", "seed", "artifact", "extras", "meta")
    calls: list[dict[str, Any]] = []
    asked: list[tuple[int, str]] = []
    for step in line.get("steps", []):
        calls.append(call(step, prompts, asked))
        asked.append((calls[-1]["prompt"], step["completion"]))
    return {
        **{name: plain(line.get(name)) for name in kept},
        "trainable": line.get("is_trainable", True),
        "steps": calls,
        "children": [episode(child, prompts) for child in line.get("children", [])],
    }


def call(step: Mapping[str, Any], prompts: Prompts, earlier: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Convert one model call. If token texts were not recorded, the page shows the ids.

    ``earlier`` has the prompts and completions of the calls before it.
    """
    ids = step["completion_token_ids"]
    texts = step.get("completion_tokens")
    kept = ("turn", "branch", "selected", "trainable", "reward", "advantage", "finish_reason", "policy")
    messages, tokens = step["prompt"], len(step["prompt_token_ids"])
    if follows := step.get("follows"):
        before, answer = earlier[follows["step"]]
        length = prompts.length(before)
        answered = [{"role": "assistant", "content": answer}] if follows["messages"] > length else []
        place = prompts.add([*answered, *messages], before, min(follows["messages"], length))
        tokens += follows["tokens"]
    else:
        place = prompts.add(messages)
    return {
        **{name: plain(step.get(name)) for name in kept},
        "actor": step["actor_id"],
        "node": None if step.get("tree_node") is None else str(step["tree_node"]),
        "prompt": place,
        "prompt_tokens": tokens,
        "text": "\n\n".join(text for text in (step.get("thought", ""), step["completion"]) if text),
        "ids": ids,
        "tokens": texts if texts is not None and len(texts) == len(ids) else [f"⟨{token}⟩" for token in ids],
        "logprobs": plain([round(float(value), 4) for value in step["completion_logprobs"]]),
        "versions": step["policy_versions"],
        "info": plain(step.get("info", {})),
    }


def message(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return role, text and private parts of a message: ``True`` for the whole text, or a list of parts."""
    content = one.get("content", "")
    private = one.get("private") or one.get("private_to")
    parts = private if isinstance(private, list) else [private] if isinstance(private, str) else bool(private)
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    inside = isinstance(parts, list) and all(part in text for part in parts)
    return {"role": one.get("role", ""), "content": text, "private": parts if inside else bool(private)}


def walk(top: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an episode and all its descendants."""
    return [top, *(part for child in top["children"] for part in walk(child))]


def plain(value: Any) -> Any:
    """Convert ``value`` for a browser: numbers that aren't finite, and integers that it would round, become strings."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > _EXACT:
        return str(value)
    return value
