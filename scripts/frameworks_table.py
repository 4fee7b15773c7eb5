"""Writes the table of agent frameworks in docs/agents.md from the tests' results: `make test-frameworks` calls it.

    python scripts/frameworks_table.py FOLDER

FOLDER holds pytest's JUnit files. The exit code is 1 if a test failed, or if the table was out of date.
Without npm some tests are skipped, and no table is written.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/agents.md"
BEGIN, END = "<!-- frameworks -->\n", "<!-- end of frameworks -->\n"
PROMPT = "own prompt, bytes"
"""The longest prompt that begins a chat: of the agent's own text, its tools and the question."""
COLUMNS = {"agent": "agent", "tool": "tool", "structured": "structured output", "forced": "forced calls"}
Rows = dict[tuple[str, str], dict[str, list[str]]]
HEAD = ["framework", "version", PROMPT, *COLUMNS.values()]


def read(folder: Path) -> Rows:
    """Return the cells of each framework and version. Raises ``SystemExit`` if a test failed or was skipped."""
    rows: Rows = {}
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            told = {node.attrib["name"]: node.attrib["value"] for node in case.iter("property")}
            for outcome in ("failure", "error", "skipped"):
                if case.find(outcome) is not None:
                    print(f"no table: {outcome}, {case.get('classname')}.{case.get('name')}", file=sys.stderr)
                    raise SystemExit(outcome != "skipped")
            if "framework" not in told:  # a test that fills no cells
                continue
            empty: dict[str, list[str]] = {column: [] for column in ("prompt", *COLUMNS)}
            cells = rows.setdefault((told["framework"], told["version"]), empty)
            for column, texts in cells.items():
                if column in told and told[column] not in texts:
                    texts.append(told[column])
    return rows


def table(rows: Rows) -> str:
    """Return the table of ``rows``, one line for each framework, by name."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for key, cells in sorted(rows.items()):
        longest = f"{max(map(int, cells['prompt'])):,}" if cells["prompt"] else "–"
        lines.append([*key, longest, *("; ".join(cells[column]) or "–" for column in COLUMNS)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    new = table(read(Path(sys.argv[1])))
    if new == old:
        return 0
    PAGE.write_text(before + BEGIN + new + END + after, encoding="utf-8")
    print(f"{PAGE}: the table was out of date, and is written", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
