"""Everything that the documents name exists, and what they show to type works."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

import turnwise
from turnwise.cli import main as cli
from turnwise.cli.look.config import list_sections
from turnwise.credit import registry
from turnwise.report.trace import describe_stations
from turnwise.train.validate import config_from_dict

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "SECURITY", "examples/README")),
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


def spans(path: Path) -> list[str]:
    """The texts in backticks, and the lines of shell blocks."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)] + [
        line for block in blocks(path, "bash") for line in block.splitlines()
    ]


WRITTEN = [path for path in DOCUMENTS if path.name not in ("api.md", "configuration.md")]
"""The documents without those that a script generates from the code."""


def test_each_row_of_who_controls_what_names_tests_that_exist() -> None:
    table = blocks_of_table((ROOT / "SECURITY.md").read_text(encoding="utf-8"), "who controls what")
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    for row in table:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and set(named) <= defined, row


def blocks_of_table(text: str, head: str) -> list[str]:
    """The rows of the table whose first line begins with ``head``."""
    lines = text.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()
    return lines[2:]


PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))

each_document = pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)


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
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_pages_stay_short() -> None:
    """Words, without the generated pages and the table of frameworks. A new page makes another one shorter."""
    written = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    words = {
        path.name: len(re.sub(r"<!-- frameworks -->.*<!-- end of frameworks -->", "", text, flags=re.DOTALL).split())
        for path, text in written.items()
        if "Written by scripts/docs_pages.py" not in text
    }
    assert not {name: count for name, count in words.items() if count > 4_000}
    assert sum(words.values()) <= 50_000, sorted(words.items(), key=lambda item: -item[1])[:5]


def test_make_targets_exist_and_every_page_is_in_the_navigation() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {word for line in commands("make") for word in line[1:] if re.fullmatch(r"[a-z-]+", word)}
    for path in DOCUMENTS:
        named |= set(re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8")))
    assert named <= targets
    named = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "docs_pages.py"))["pages"]()
    old = [path.name for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    assert old == [], "run `PYTHONPATH=python python scripts/docs_pages.py` with the Python of the tests, and commit"
    assert all(f"\n## {section}\n" in pages[ROOT / "docs" / "configuration.md"] for section in SECTIONS)
    package = ROOT / "python" / "turnwise"
    rooms = [path.parent.name for path in package.glob("*/__init__.py") if "\n__all__" in CODE[path]]
    assert all(f"\n`turnwise.{room}`\n" in pages[ROOT / "docs" / "api.md"] for room in rooms), "GROUPS lacks a room"


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


FOREIGN = {
    "AgentTrainer", "ReadWriteMany", "apply_credit", "get_policy_version", "importance_sampling", "main_base", "mean_g",
    "parse_expr", "r_ik", "shuffle_dataset", "std_g", "trace_to_samples", "turnwise_samples_total",
}  # fmt: skip
"""Names in backticks that other projects, formulas or absent code have."""

SUFFIXES = "py|pyi|cpp|cu|cuh|h|sh|sbatch|yaml|toml|md|jsonl?"
FOLDERS = ("bench", "csrc", "docs", "examples", "python", "scripts", "tests")
SOURCES = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix not in (".so", ".pyc")]
NAMES = {path.name for path in (*SOURCES, *ROOT.glob("*"))}
CODE = {
    path: path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in (".py", ".pyi", ".cpp", ".cu", ".h")
}
WORDS = set(re.findall(r"\w+", "".join(text for path, text in CODE.items() if path != Path(__file__))))
PACKAGE = "".join(text for path, text in CODE.items() if "python" in path.parts)
"""All source text of the package, for names that a run writes or that a program computes."""


@each_document
def test_named_files_exist(path: Path) -> None:
    """A path from the checkout's root or, as ``turnwise/...``, from the package; also a file's name alone."""
    missing = set()
    for span in spans(path):
        for name in re.findall(rf"(?<![\w/.])(?:(?:{'|'.join(FOLDERS)}|turnwise)/[\w/.*<>-]+)", span):
            pattern = re.sub("<.*?>", "*", name.rstrip("/."))
            missing |= set() if any(list(root.glob(pattern)) for root in (ROOT, ROOT / "python")) else {name}
        for name in re.findall(rf"(?<![\w*.-])[\w-]+\.(?:{SUFFIXES})\b(?!/)", span):
            foreign = re.match(r"(my_|train_with_|run\.|config\.json|generation_config)", name)
            missing |= {name} - NAMES if not foreign and name not in PACKAGE else set()
    assert missing == set()


@each_document
def test_named_commands_and_their_options_exist(path: Path) -> None:
    """Also those that a sentence shortens, such as ``turnwise eval --ablate``; and scripts with their options."""
    wrong = []
    for span in spans(path):
        options = re.findall(r"(?<!\S)(--[a-z][\w-]*)(?![\w.-])", span.partition("  #")[0])
        if named := re.match(r"turnwise (?!is )([a-z]\w*)(?= |$)", span):
            command = cli.COMMANDS.get(named[1])
            known = cli.options_of(command) if command else set()
            keys = {f"--{key}" for key in KEYS} if command and command.overrides else set()
            wrong += [span] if not command or set(options) - known - keys else []
        elif named := re.match(r"(?:PYTHONPATH=\S+ )?python (\w+/\S+\.py)", span):
            file = ROOT / named[1]
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            wrong += [span] if any(f'"{option}"' not in text for option in options) or not text else []
    assert wrong == []


@each_document
def test_dotted_names_exist(path: Path) -> None:
    """``turnwise.room.name``: the room or module is a file, and has the name. Nothing is imported."""
    wrong = []
    for name in {name for span in spans(path) for name in re.findall(r"(?<![\w.+])turnwise(?:\.\w+)+", span)}:
        place, parts = ROOT / "python", name.split(".")
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        modules = [
            place / "__init__.py",
            *(place / f"{part}{suffix}" for part in parts[:1] for suffix in (".py", ".pyi")),
        ]
        text = "".join(module.read_text(encoding="utf-8") for module in modules if module.is_file())
        own = parts[1:] if parts and len(list(place.glob(f"{parts[0]}.py*"))) else parts
        wrong += [name] if any(not re.search(rf"\b{part}\b", text) for part in own) else []
    assert wrong == []


@each_document
def test_names_in_backticks_are_in_the_code(path: Path) -> None:
    """Each ``CamelCase`` and ``snake_case`` word is in a source file, or in a Python block of the page."""
    words = set(re.findall(r"\w+", "".join(blocks(path, "python")))) | {Path(name).stem for name in NAMES} | FOREIGN
    named = {name for span in spans(path) for name in re.findall(r"\b(?:[A-Z][a-z]+\w*[A-Z]\w*|[a-z]+_\w*\w)\b", span)}
    assert {name for name in named - words - WORDS if not re.match(r"my_|My|.*_$", name)} == set()


KEYS = {key.name: key for section in list_sections() for key in section.keys}
SECTIONS = {section.name for section in list_sections()}


def is_key(name: str) -> bool:
    """Tell whether ``name`` is a key or section of the config; below a table of any value every name is."""
    names = (*KEYS, *SECTIONS, *(section.removesuffix(".NAME") for section in SECTIONS))
    patterns = [re.escape(each).replace("NAME", r"[\w-]+") for each in names]
    tables = [re.escape(key.name).replace("NAME", r"[\w-]+") for key in KEYS.values() if "table of" in key.type]
    return any(re.fullmatch(each, name) for each in (*patterns, *(rf"{each}\..+" for each in tables)))


@each_document
def test_config_keys_exist(path: Path) -> None:
    """``section.key`` with or without a value, ``--section.key`` and ``[section]``."""
    roots = "|".join({name.partition(".")[0] for name in SECTIONS} - {"top"})
    named = set()
    for span in spans(path):
        named |= set(re.findall(rf"(?:^|\s--)((?:{roots})\.[\w.-]+)(?= |$)", span))
        named |= set(re.findall(r"^\[((?!env\b)[a-z][\w.-]*)\]$", span))
    rooms = {name for name in named if (ROOT / "python/turnwise" / name.replace(".", "/")).exists()}
    assert {name for name in named - rooms if not (is_key(name) or Path(name).suffix in (".py", ".jsonl"))} == set()


def test_every_credit_rule_is_in_the_table() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    assert set(registry) <= {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_page_of_rewards_names_all_that_changes_one_in_order() -> None:
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    stations = [station.partition(" (")[0] for station in describe_stations().split(" > ")]
    places = [
        text.find(f"`{station}`", text.index("| in the trace |")) for station in stations[:-1] if "rule" not in station
    ]
    assert -1 not in places and places == sorted(places)


def test_table_of_frameworks_names_the_pinned_versions() -> None:
    """`make test-frameworks` writes the table from what it ran; this finds pins that changed without a run."""
    page = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    lines = page.partition("<!-- frameworks -->\n")[2].partition("<!-- end of frameworks -->")[0].splitlines()[2:]
    rows = {name: version for name, version in (line.strip("| ").split(" | ")[:2] for line in lines)}
    pins: dict[str, set[str]] = {}
    pinned = ROOT / "tests" / "environments"
    for path in [pinned / "verifiers.txt", *pinned.glob("frameworks-*.txt")]:
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), flags=re.MULTILINE):
            pins.setdefault(name, set()).add(version)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [javascript] = re.findall(r"^JAVASCRIPT := ((?:.*\\\n)*.*)$", makefile, flags=re.MULTILINE)
    pins |= {f"{name} (npm)": {version} for name, version in re.findall(r"(\S+)@(\d\S*)", javascript)}
    programs = ("claude-code", "codex", "opencode", "qwen-code")
    for name, variable in ((name, name.upper().replace("-", "_")) for name in programs):
        pins[name] = set(re.findall(rf"^{variable} := (\S+)$", makefile, flags=re.MULTILINE))
    pins |= {name: {version} for name, version in PINS.items() if name in rows and name not in pins}
    assert len(rows) == 23
    assert {name: version for name, version in rows.items() if version not in pins.get(name, ())} == {}
