"""Collects the module of each framework that is installed: `make test-frameworks`. Nothing here calls home."""

from __future__ import annotations

import importlib.util
import os
import shutil

NEEDS = {
    "agent_framework": "agent_framework",
    "anthropic": "agent_framework",
    "autogen": "autogen_agentchat",
    "claude_code": "agent_framework",
    "crewai": "crewai",
    "dspy": "dspy",
    "instructor": "instructor",
    "langgraph": "langgraph",
    "litellm": "litellm",
    "llama_index": "llama_index",
    "mini_swe_agent": "minisweagent",
    "openai": "agent_framework",
    "openai_agents": "agent_framework",
    "pydantic_ai": "pydantic_ai",
    "smolagents": "smolagents",
}
