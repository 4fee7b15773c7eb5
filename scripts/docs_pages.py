"""Writes docs/api.md, configuration.md, metrics.md; as MkDocs hook, replaces the site's API page by whole docstrings.

`make docs` runs it. Without building the site: `PYTHONPATH=python .venv/bin/python scripts/docs_pages.py`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import turnwise
from turnwise.cli.look.config import list_sections
from turnwise.train.log.names import groups

ROOT = Path(__file__).parents[1]
NOTE = "<!-- Written by scripts/docs_pages.py; `make docs` writes it again. -->"

GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Episodes", "arena", ("Arena", "Episode", "SingleTurnEpisode", "MultiTurnEpisode", "TreeSampler")),
    ("Rewards", "arena", ("Rubric", "Judge", "RewardMix", "RewardParts", "OverlongPenalty", "Score", "read_choice",
                          "read_number", "parsing", "InvalidActionError")),
    ("Stores, privacy, filters", "arena", ()),
    ("What rooms exchange", "types", ()),
    ("Credit rules", "credit", ()),
    ("Training", "train", ()),
    ("Clients that sample", "inference", ()),
    ("Chat formats", "chat", ()),
    ("Tasks", "tasks", ()),
    ("Fused ops", "ops", ("factorize", "group_advantage", "token_reward_sum", "token_returns", "gae", "logprob",
                          "linear_logprob", "policy_loss", "grouped_policy_loss", "linear_policy_loss", "value_loss")),
    ("Options, masks and parallel ops", "ops", ()),
    ("Forkable state", "state", ()),
    ("Untrusted programs", "sandbox", ()),
    ("Reports", "report", ()),
)  # fmt: skip
"""Heading, room, and its names under this heading; without names, those that no other heading has."""


def public_names() -> Iterator[tuple[str, str, list[str]]]:
    """Yield each heading with its room and names. What two rooms export is under the first heading alone."""
    listed = {(room, name) for _, room, names in GROUPS for name in names}
    seen: set[tuple[str, int]] = set()
    for title, room, names in GROUPS:
        module = importlib.import_module(f"turnwise.{room}")
        rest = [name for name in module.__all__ if (room, name) not in listed]
        fresh = [name for name in names or rest if (name, id(getattr(module, name))) not in seen]
        seen |= {(name, id(getattr(module, name))) for name in fresh}
        yield title, room, fresh


def pages() -> dict[Path, str]:
    """Write the pages; returns their texts by path."""
    texts = {"api": api(), "configuration": configuration(), "metrics": metrics()}
    return {ROOT / "docs" / f"{name}.md": text for name, text in texts.items()}


def api(site: bool = False) -> str:
    """Write every public name with its signature and the first sentence of its docstring; on the site, all of it."""
    lines = [
        "# API",
        "",
        NOTE,
        "",
        "The public names by room, with their defaults. `help(name)` prints shapes, types, units and errors. The names",
        "below a class are its own methods. `import turnwise as tw` has the most used names:",
        ", ".join(f"`tw.{name}`" for name in turnwise.__all__) + ".",
    ]
    for title, room, names in public_names():
        lines += ["", f"## {title}", "", f"`turnwise.{room}`", ""]
        for name in names:
            value = getattr(importlib.import_module(f"turnwise.{room}"), name)
            directive = [f"::: turnwise.{room}.{name}", ""] if callable(value) else []
            lines += directive if site else entry(room, name, value)
    lines += [
        "",
        "## Other projects",
        "",
        "`turnwise.integrations` has pages: [agents](agents.md), [environments](environments.md),",
    ]
    lines += ["[verifiers](verifiers.md), [TRL](trl.md), [verl](verl.md), [rLLM, SkyRL, prime-rl](other_trainers.md)."]
    return "\n".join(lines) + "\n"


def entry(room: str, name: str, value: Any) -> list[str]:
    """Write one name; below a class the methods that it defines itself."""
    text = COMPILED.get(name) or first_sentence(value.__doc__ if is_python(value) else docstring_below(room, name))
    lines = [f"- `{name}{signature(value) if is_python(value) else ''}`: {text}"]
    members = vars(value).items() if inspect.isclass(value) and is_python(value) else ()
    methods = [f"`{each}`" for each, member in members if not each.startswith("_") and inspect.isroutine(member)]
    if name in COMPILED:  # Python adds methods to these, in any order
        methods.sort()
    return lines + ([f"  <br>{', '.join(methods)}"] if methods else [])


def is_python(value: Any) -> bool:
    """Tell a function or class of a Python module from constants, aliases and compiled classes."""
    return inspect.isfunction(value) or (
        inspect.isclass(value) and value.__module__ != "turnwise._C" and value.__module__.startswith("turnwise.")
    )


def signature(value: Any) -> str:
    """Format the parameters with their defaults, without types. Protocols and plain exceptions have none."""
    made_in_python = any(inspect.isfunction(getattr(value, each)) for each in ("__init__", "__new__"))
    if inspect.isclass(value) and (getattr(value, "_is_protocol", False) or not made_in_python):
        return ""
    if hasattr(value, "model_fields"):
        return "(...)"
    words, keyword_only = [], False
    for each in inspect.signature(value).parameters.values():
        if each.name.startswith("_"):
            continue
        if each.kind is each.KEYWORD_ONLY and not keyword_only and not any(word.startswith("*") for word in words):
            words.append("*")
        keyword_only |= each.kind is each.KEYWORD_ONLY
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(star + each.name + ("" if each.default is each.empty else f"={default(each.default)}"))
    return f"({', '.join(words)})"


def default(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    if plain or inspect.isfunction(value):
        return repr(value) if plain else value.__name__.replace("<lambda>", "...")
    return "..." if "factory" in repr(value) else f"{type(value).__name__}()"


COMPILED = {
    "State": "A version of data: `state.data` is its dict or list, `state.fork(n)` copies it in constant time.",
    "StateDict": "A dict of a State; its methods are those of `dict`.",
    "StateList": "A list of a State; its methods are those of `list`.",
    "TokenArray": "A list of token ids that forks share: 4 bytes each.",
}
"""Descriptions of the compiled classes, which have no docstring."""


def docstring_below(room: str, name: str) -> str:
    """Find the text below the assignment of a constant or an alias."""
    for path in sorted((ROOT / "python" / "turnwise" / room).rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in itertools.pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(getattr(target, "id", "") == name for target in targets) and isinstance(after, ast.Expr):
                return str(getattr(after.value, "value", ""))
    raise ValueError(f"turnwise.{room}.{name}: no docstring below it")


def first_sentence(text: str) -> str:
    """Take the first sentence of a docstring, without its markup."""
    text = " ".join(text.strip().partition("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", text).replace("``", "`").removesuffix("Example::")
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text, maxsplit=1)[0].rstrip(": ").removesuffix(".") + "."


def configuration() -> str:
    """Write every section and key of the config."""
    lines = [
        "# Configuration",
        "",
        NOTE,
        "",
        "Every key of a config file. `turnwise config KEY` prints the same. `NAME` stands",
    ]
    lines += ["for a name of your choice. [Training](training.md#from-the-command-line) explains config files."]
    for section in list_sections():
        lines += ["", f"## {section.name}", "", section.summary, ""]
        lines += ["| key | type | range | default | description |", "|---|---|---|---|---|"] if section.keys else []
        for key in section.keys:
            name = key.name.removeprefix(f"{section.name}.")
            cells = (f"`{name}`", key.type, key.range, f"`{key.default}`", key.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Write every metric of a run."""
    lines = [
        "# Metrics",
        "",
        NOTE,
        "",
        "Every metric of `metrics.jsonl`. Each is a mean, share or sum over what the third column names. Parts in",
        "angle brackets stand for names; `<function>` is a reward function of the rubric, with the actor behind it:",
        "`metric/solved/solver`. A run that leaves its healthy range says so if a [diagnosis](diagnosis.md) reads it.",
    ]
    for group in groups():
        lines += ["", f"## {group.title}", "", *([group.text, ""] if group.text else [])]
        lines += ["| metric | unit | over | healthy | meaning |", "|---|---|---|---|---|"]
        for one in group.metrics:
            lines.append(f"| `{one.name}` | {one.unit} | {one.over} | {one.healthy} | {one.meaning} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the API page by the docstrings, which mkdocstrings reads."""
    return api(site=True) if page.file.src_uri == "api.md" else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Drop the reStructuredText roles of docstrings: ``:class:`` before a name, the second colon of ``Example::``."""
    html = re.sub(r":(?:class|func|meth|mod|attr|data):(?=<code>)", "", html)
    return re.sub(r"(<code>)~(?:\w+\.)+|(:):(?=</p>)", r"\1\2", html)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
