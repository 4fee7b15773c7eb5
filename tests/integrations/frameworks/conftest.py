"""Collects the modules of the frameworks that are installed: `make test-frameworks` has three environments for them."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path

# The package that only the environment of a module's framework has; openai and others are in several.
ENVIRONMENTS = {
    "autogen_agentchat": (
        "agent_framework anthropic autogen claude_code command_line dspy javascript langgraph litellm mini_swe_agent "
        "openai openai_agents pydantic_ai smolagents"
    ),
    "llama_index": "instructor llama_index",
    "crewai": "crewai",
}
HERE = [package for package in ENVIRONMENTS if importlib.util.find_spec(package) is not None]
if importlib.util.find_spec("verifiers") is not None and metadata.version("verifiers").startswith("0.4."):
    ENVIRONMENTS["verifiers"] = "verifiers"
    HERE.append("verifiers")
MODULES = {f"test_{name}.py" for package in HERE for name in ENVIRONMENTS[package].split()}
collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in MODULES]

# Frameworks read these when they are imported: no telemetry, no download of prices, no banner.
if HERE:
    os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
