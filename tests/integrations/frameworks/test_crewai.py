"""CrewAI: a crew of one with a tool, a crew of two, and structured output."""

from __future__ import annotations

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

from . import helpers
from .helpers import ADDS, CALL, Case, cases, check

TEAM = ("planner", "worker")


class Sum(BaseModel):
    total: int


@tool("add")
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return helpers.add(a, b)


def llm_of(model, **options):
    return LLM(model=f"openai/{model.name}", base_url=model.base_url, api_key=model.api_key, **options)


def agent_of(model, role, **options):
    return Agent(role=role, goal="Right sums.", backstory="You know numbers.", llm=llm_of(model), **options)


def crew(question, models):
    worker = agent_of(models["agent"], "adder", tools=[add])
    task = Task(description=question["text"], expected_output="the sum", agent=worker)
    return float(question["answer"] in Crew(agents=[worker], tasks=[task]).kickoff().raw)


def team(question, models):
    planner, worker = agent_of(models["planner"], "planner"), agent_of(models["worker"], "adder", tools=[add])
    plan = Task(description=f"Plan {question['text']}", expected_output="a plan", agent=planner)
    work = Task(description=question["text"], expected_output="the sum", agent=worker)
    return float(question["answer"] in Crew(agents=[planner, worker], tasks=[plan, work]).kickoff().raw)


async def kickoff_async(question, models):
    result = await agent_of(models["agent"], "adder", tools=[add]).kickoff_async(question["text"])
    return float(question["answer"] in result.raw)


def output_pydantic(question, models):
    worker = agent_of(models["agent"], "adder")
    task = Task(description=question["text"], expected_output="the sum", agent=worker, output_pydantic=Sum)
    result = Crew(agents=[worker], tasks=[task]).kickoff()
    return float(result.pydantic.total == int(question["answer"]))


def output_pydantic_with_tool(question, models):
    worker = agent_of(models["agent"], "adder", tools=[add])
    task = Task(description=question["text"], expected_output="the sum", agent=worker, output_pydantic=Sum)
    result = Crew(agents=[worker], tasks=[task]).kickoff()
    return float(result.pydantic.total == int(question["answer"]))


def response_format(question, models):
    found = llm_of(models["agent"], response_format=Sum).call(question["text"])
    found = found if isinstance(found, Sum) else Sum.model_validate_json(found)
    return float(found.total == int(question["answer"]))


@cases(
    Case(crew, ADDS, {"agent": "`Crew`", "tool": "function"}),
    Case(kickoff_async, ADDS, {"agent": "`kickoff_async`", "tool": "function"}),
    Case(team, ["Add them.", *ADDS], {"agent": "crew of two", "tool": "function"}, TEAM),
    Case(output_pydantic, ['{"total": $sum}'], {"structured": "`output_pydantic`"}),
    Case(output_pydantic_with_tool, [CALL, '{"total": $sum}'], {"structured": "`output_pydantic`", "tool": "function"}),
    Case(response_format, ['{"total": $sum}'], {"structured": "`response_format`"}),
)
def test_runs(case, record_property):
    check(case, "crewai", record_property)
