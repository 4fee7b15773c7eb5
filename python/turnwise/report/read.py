"""Reads a run and writes its report: one HTML file with its style, scripts and data inside, which needs no network."""

from __future__ import annotations

import html
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from turnwise.arena.recording.short_prompts import FOLLOWS
from turnwise.report.cluster import lanes
from turnwise.train.log.metrics import TIME
from turnwise.train.log.run_log import read_metrics
from turnwise.train.log.secrets import hide_in, secrets_in
from turnwise.train.log.writers import parse_line
from turnwise.utils.files import bounded_lines, damage_named, open_regular, parse_toml, read_regular, replace_text

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
    ``actors``, ``tasks``, ``policies``, and ``episodes`` with their shared ``prompts``: each is the first ``kept``
    messages of the prompt ``after``, and its ``messages``. ``recorded`` counts all recorded episodes. ``lanes`` has the processes of a run on a cluster (:func:`~turnwise.report.cluster.lanes`),
    ``None`` for others.

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
    rows = read_metrics(folder)
    prompts = Prompts()
    recorded, lines = read_episodes(files[1], limits)
    episodes = [episode(line, prompts) for line in lines]
    calls = [step for top in episodes for part in walk(top) for step in part["steps"]]
    return {
        "name": folder.resolve().name,
        "config": None if config is None else hide_in(config, [*secrets_in(settings), *secrets_in(config)]),
        "planned": settings.get("steps"),
        "curves": curves(rows, limits.points),
        "lanes": lanes(folder, rows, limits.points),
        "contributions": contributions(rows),
        "warnings": read_metrics(folder, "warnings.jsonl"),
        "actors": names([actor_of(name) for row in rows for name in row], [step["actor"] for step in calls]),
        "tasks": list(settings.get("tasks", {})),
        "policies": names(settings.get("policies", {}), [step["policy"] for step in calls]),
        "recorded": recorded,
        "episodes": episodes,
        "prompts": prompts.all,
    }


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


def actor_of(metric: str) -> str:
    """Return the actor in the metric ``completion_tokens/<actor>``, which every step has; empty for other metrics."""
    return metric.partition("completion_tokens/")[2]


# ---------------------------------------------------------------------------------------------------------------------
# Curves
# ---------------------------------------------------------------------------------------------------------------------
def curves(rows: Sequence[Mapping[str, Any]], points: int) -> dict[str, Any]:
    """Return ``{"rows": n, "step": [...], "series": {metric: [value or None]}}``, thinned to about ``points`` rows.

    Rows with a rare metric, such as validation, are always kept.
    """
    kept = [rows[index] for index in thin(rows, points)] if len(rows) > points else list(rows)
    series: dict[str, list[float | None]] = {}
    for index, row in enumerate(kept):
        for name, value in row.items():
            if name not in ("step", TIME) and isinstance(value, (int, float)):
                series.setdefault(name, [None] * len(kept))[index] = float(value) if math.isfinite(value) else None
    return {"rows": len(rows), "step": [row["step"] for row in kept], "series": series}


def contributions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what each actor added at the last validation that measured it; ``None`` if none did.

    Example: ``{"step": 20, "actors": {"reviser": {"handed": 40.0, "changed": 0.25, "without": 0.55}}}`` from the
    metrics ``validation/<actor>/<measure>``.
    """
    for row in reversed(rows):
        actors: dict[str, dict[str, float]] = {}
        for name, value in row.items():
            actor, _, measure = name.removeprefix("validation/").rpartition("/")
            if name.startswith("validation/") and actor and math.isfinite(value):
                actors.setdefault(actor, {})[measure] = float(value)
        if actors:
            return {"step": row["step"], "actors": actors}
    return None


def thin(rows: Sequence[Mapping[str, Any]], points: int) -> list[int]:
    """Return the indices of ``points`` evenly spread rows, and of all rows with a rare metric."""
    counts: dict[str, int] = {}
    for row in rows:
        for name in row:
            counts[name] = counts.get(name, 0) + 1
    rare = {name for name, count in counts.items() if count <= points / 4}
    chosen = set(spread(len(rows), points))
    return [index for index, row in enumerate(rows) if index in chosen or not rare.isdisjoint(row)]


def spread(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` evenly spread indices below ``count``, with the first and the last; all if they are few."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count - 1]
    return sorted({round(index * (count - 1) / (wanted - 1)) for index in range(wanted)})


# ---------------------------------------------------------------------------------------------------------------------
# Episodes
# ---------------------------------------------------------------------------------------------------------------------
def read_episodes(path: Path, limits: ReportLimits) -> tuple[int, Iterator[dict[str, Any]]]:
    """Return the number of episodes in ``rollouts.jsonl``, and the chosen ones. Other lines are never parsed."""
    if not path.is_file():
        return 0, iter(())
    # Find each line's offset, length and number, then parse the chosen lines, one at a time.
    places: list[tuple[int, int, int]] = []
    with open_regular(path) as stream:
        at = 0
        for number, line in enumerate(bounded_lines(stream, path), 1):
            if line.endswith(b"\n"):  # else it is still being written
                places.append((at, len(line), number))
            at += len(line)
    chosen = [places[index] for index in choose([length for _, length, _ in places], limits)]
    return len(places), _lines_at(path, chosen)


def _lines_at(path: Path, places: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    with open_regular(path) as stream:
        for at, length, number in places:
            stream.seek(at)
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
    if follows := step.get(FOLLOWS):
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


SCRIPTS = ("dom.js", "chart.js", "curves.js", "tokens.js", "episodes.js", "lanes.js", "main.js")
"""Scripts in page order: each uses those before it."""


def write_report(run_dir: str | Path, out: str | Path | None = None, limits: ReportLimits | None = None) -> Path:
    """Write the report of ``run_dir`` to ``out`` (default: ``run_dir/report.html``) and return its path.

    It also works during the run, and shows the steps so far. Raises ``ValueError`` for a folder without a run. Missing
    parent folders of ``out`` are created; if writing fails, they are removed, and no partial file stays.
    """
    folder = Path(run_dir)
    path = Path(out) if out is not None else folder / "report.html"
    if path.is_dir():
        raise ValueError(f"out={str(path)!r}: expected the name of a file to write, got a folder")
    page = render(read_run(folder, limits))
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, page)
    except BaseException:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    return path


def render(data: Mapping[str, Any]) -> str:
    """Build the page for ``data``, a result of :func:`~turnwise.report.read.read_run`."""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = {
        "title": html.escape(f"{data['name']} · turnwise"),
        "style": asset("style.css"),
        "script": "\n".join(asset(name) for name in SCRIPTS),
        "data": embed({**data, "written": written, "version": metadata.version("turnwise")}),
    }
    # Replace all parts in one pass, because the run's own text may contain the name of a part.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def embed(data: Mapping[str, Any]) -> str:
    """Return JSON for a ``<script>`` element, without any ``<``, so it can't end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half of a surrogate pair has no UTF-8 encoding; a completion cut in the middle of a character may contain one.
    return text.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")


def asset(name: str) -> str:
    return (resources.files("turnwise.report") / "assets" / name).read_text(encoding="utf-8")
