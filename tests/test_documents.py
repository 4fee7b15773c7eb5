"""What the documents tell a reader to type works: Python blocks run, commands parse, files and targets exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import turnwise
from turnwise.cli import main as cli
from turnwise.credit import registry
from turnwise.train.validate import config_from_dict

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of every shell line of the documents that starts with ``program``, without its comment."""
    lines = [line for path in DOCUMENTS for block in blocks(path, "bash") for line in block.splitlines()]
    words = [shlex.split(line.strip(), comments=True) for line in lines]
    return [line for line in words if line and Path(line[0]).name == program]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "python")], ids=lambda path: path.name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(path, "python"), start=1):
        exec(compile(block, f"{path.name}, python block {number}", "exec"), namespace)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "toml")], ids=lambda path: path.name)
def test_toml_blocks_are_settings(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that the document shows, by a first line such as ``# my_losses.py``, may be named in them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks(path, "python"):
        if named := re.match(r"# (\w+\.py)$", block, flags=re.MULTILINE):
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
    for block in blocks(path, "toml"):
        config_from_dict(tomllib.loads(block))


def test_readme_opens_with_the_two_commands() -> None:
    assert [line[1] for line in commands("make")][:2] == ["demo", "test"]
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_make_targets_exist_and_every_page_is_in_the_navigation() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {word for line in commands("make") for word in line[1:] if re.fullmatch(r"[a-z-]+", word)}
    for path in DOCUMENTS:
        named |= set(re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8")))
    assert named <= targets
    # So are the two pages that the build generates, the config reference and the API.
    named = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} | {"api.md", "config.md"}


@pytest.mark.parametrize("words", commands("turnwise"), ids=" ".join)
def test_turnwise_commands_parse(words: list[str]) -> None:
    options = cli.parse(words[1:])
    config = getattr(options, "config", None)
    # A run folder is what the reader's own run leaves.
    assert config is None or config.suffix != ".toml" or (ROOT / config).is_file()


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", text)
    links += [(source, "") for source in re.findall(r"""(?:src|srcset)="([^":]+)\"""", text)]
    broken = []
    for file, anchor in links:
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{file}#{anchor}")
    assert broken == []


def test_architecture_names_every_room_and_files_that_exist() -> None:
    package = Path(turnwise.__file__).parent
    folders = {".".join(path.parent.relative_to(package).parts) for path in package.rglob("__init__.py")} - {""}
    rooms = {room for room in folders if not room.startswith("tasks.")}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert rooms - set(re.findall(r"`([a-z_.]+)`", text)) == set()
    # Its paths are relative to the package as well.
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|cpp|cu)|\w+/(?:\w+/)?)`", text)}
    assert len(named) > 10
    assert {
        name for name in named if not ((ROOT / name).exists() or (ROOT / "python/turnwise" / name).exists())
    } == set()


def test_architecture_floors_hold() -> None:
    """Each room lists only rooms of lower floors in its docstring, and its own sub-rooms."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    floors, floor = {}, 0
    for number, room in re.findall(r"^\| (\d?) ?\| `(\w+)` \|", text, flags=re.MULTILINE):
        floor = int(number or floor)
        floors[room] = floor
    wrong = []
    for path in Path(turnwise.__file__).parent.rglob("__init__.py"):
        room = path.relative_to(Path(turnwise.__file__).parent).parts[0]
        for listed in re.findall(r"^May import: ([\w., ]+)\.$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            names = {name.split(".")[0] for name in listed.split(", ")} - {room}
            wrong += [f"{path.parent}: {name}" for name in names & set(floors) if floors[name] >= floors[room]]
    assert len(floors) > 12 and wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(path: Path) -> None:
    """Paths in backticks, from the checkout's root or, as ``turnwise/...``, from the package."""
    folders = "bench|csrc|docs|examples|python|scripts|tests|turnwise"
    named = set(re.findall(rf"`((?:{folders})/[\w/.-]+)[`:]", path.read_text(encoding="utf-8")))
    assert {name for name in named if not ((ROOT / name).exists() or (ROOT / "python" / name).exists())} == set()


def test_every_credit_rule_is_in_the_table() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    assert set(registry) <= {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
