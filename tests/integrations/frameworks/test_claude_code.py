"""Claude Code: a headless run with its own tools in a folder of the episode."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .helpers import Case, call_of, cases, check

PROGRAM = Path(sys.prefix) / "claude/node_modules/.bin/claude"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="npm is needed to install Claude Code")


async def headless(question, models, *options):
    model = models["agent"]
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("-p", question["text"], "--model", model.name, "--output-format", "json"),
            *("--allowedTools", "Bash,ToolSearch", *options),
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": folder,
                "ANTHROPIC_BASE_URL": model.anthropic_base_url,
                "ANTHROPIC_API_KEY": model.api_key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
    assert output, errors
    return json.loads(output)


async def print_mode(question, models):
    return float(question["answer"] in (await headless(question, models))["result"])


async def tool_search(question, models):
    """Its own search loads tools that the prompt doesn't begin with."""
    return await print_mode(question, models)


async def json_schema(question, models):
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
    result = await headless(question, models, "--json-schema", json.dumps(schema))
    return float(result["structured_output"]["total"] == int(question["answer"]))


BASH = call_of("Bash", '{"command": "echo sum=$$(($a + $b))", "description": "Add"}')


SEARCH = call_of("ToolSearch", '{"query": "select:WebFetch", "max_results": 1}')


@cases(
    Case(print_mode, [BASH, "It is $sum."], {"agent": "`claude -p`", "tool": "bash"}, shown="sum=$sum"),
    Case(
        tool_search,
        [SEARCH, BASH, "It is $sum."],
        {"agent": "`ToolSearch`", "tool": "bash"},
        shown='"name": "WebFetch"',
    ),
    Case(
        json_schema,
        [BASH, call_of("StructuredOutput", '{"total": $sum}')],
        {"structured": "`--json-schema`", "tool": "bash"},
        shown="sum=$sum",
    ),
)
def test_runs(case, record_property):
    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    check(case, "claude-code", record_property, version.split()[0])
