"""LangChain and LangGraph: ``create_agent`` over three APIs, a graph of two actors, and structured output."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

from .helpers import ADDS, CALL, Case, add, call_of, cases, check

TEAM = ("planner", "worker")


class Sum(BaseModel):
    """A sum."""

    total: int


def openai_model(model, **options):
    return ChatOpenAI(model=model.name, base_url=model.base_url, api_key=model.api_key, **options)


def claude(model):
    return ChatAnthropic(model=model.name, base_url=model.anthropic_base_url, api_key=model.api_key)


async def run(question, llm, **options):
    agent = create_agent(llm, tools=[tool(add)], system_prompt="Use the tool.", **options)
    return await agent.ainvoke({"messages": [{"role": "user", "content": question["text"]}]})


async def chat(question, models):
    state = await run(question, openai_model(models["agent"]))
    return float(question["answer"] in state["messages"][-1].text)


async def responses(question, models):
    state = await run(question, openai_model(models["agent"], use_responses_api=True))
    return float(question["answer"] in state["messages"][-1].text)


async def responses_previous(question, models):
    llm = openai_model(models["agent"], use_previous_response_id=True)
    state = await run(question, llm)
    return float(question["answer"] in state["messages"][-1].text)


async def messages(question, models):
    state = await run(question, claude(models["agent"]))
    return float(question["answer"] in state["messages"][-1].text)


async def streamed(question, models):
    agent = create_agent(openai_model(models["agent"]), tools=[tool(add)])
    text = ""
    chat = {"messages": [{"role": "user", "content": question["text"]}]}
    async for message, _ in agent.astream(chat, stream_mode="messages"):
        text += message.text
    return float(question["answer"] in text)


async def graph(question, models):
    tools = [tool(add)]
    planner, worker = openai_model(models["planner"]), openai_model(models["worker"]).bind_tools(tools)

    async def plan(state):
        return {"messages": [await planner.ainvoke([("system", "You plan."), *state["messages"]])]}

    async def work(state):
        return {"messages": [await worker.ainvoke([("system", "You work."), *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("plan", plan)
    builder.add_node("work", work)
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "work")
    builder.add_conditional_edges("work", tools_condition, {"tools": "tools", END: END})
    builder.add_edge("tools", "work")
    state = await builder.compile().ainvoke({"messages": [("user", question["text"])]})
    return float(question["answer"] in state["messages"][-1].text)


def with_structured_output(llm_of, **options):
    async def structured(question, models):
        llm = llm_of(models["agent"]).with_structured_output(Sum, **options)
        found = await llm.ainvoke(f"{question['text']} Answer with JSON.")
        return float(found.total == int(question["answer"]))

    structured.__name__ = f"structured_{llm_of.__name__}_{options.get('method', 'default')}"
    return structured


def response_format(strategy, llm_of=openai_model):
    async def structured(question, models):
        state = await run(question, llm_of(models["agent"]), response_format=strategy)
        return float(state["structured_response"].total == int(question["answer"]))

    structured.__name__ = f"response_format_{type(strategy).__name__}_{llm_of.__name__}"
    return structured


def forced(choice):
    async def bound(question, models):
        llm = openai_model(models["agent"]).bind_tools([tool(add)], tool_choice=choice)
        answer = await llm.ainvoke(question["text"])
        return float(add(**answer.tool_calls[0]["args"]) == int(question["answer"]))

    bound.__name__ = f"forced_{choice}"
    return bound


async def forced_claude(question, models):
    llm = claude(models["agent"]).bind_tools([tool(add)], tool_choice="any")
    answer = await llm.ainvoke(question["text"])
    return float(add(**answer.tool_calls[0]["args"]) == int(question["answer"]))


JSON = ['{"total": $sum}']
TOOL = [call_of("Sum", '{"total": $sum}')]


@cases(
    Case(chat, ADDS, {"agent": "`create_agent`, Chat Completions", "tool": "function"}),
    Case(responses, ADDS, {"agent": "Responses", "tool": "function"}),
    Case(responses_previous, ADDS, {"agent": "`use_previous_response_id`", "tool": "function"}),
    Case(messages, ADDS, {"agent": "Messages", "tool": "function"}),
    Case(streamed, ADDS, {"agent": "streamed", "tool": "function"}),
    Case(graph, ["Add them.", *ADDS], {"agent": "graph of two actors", "tool": "function"}, TEAM),
    Case(with_structured_output(openai_model), JSON, {"structured": "`json_schema`"}),
    Case(with_structured_output(openai_model, method="json_mode"), JSON, {"structured": "`json_mode`"}),
    Case(with_structured_output(openai_model, method="function_calling"), TOOL, {"structured": "`function_calling`"}),
    Case(with_structured_output(claude), TOOL, {"structured": "Messages, function"}),
    Case(with_structured_output(claude, method="json_schema"), JSON, {"structured": "Messages, `json_schema`"}),
    Case(response_format(Sum), [CALL, *TOOL], {"structured": "`response_format`", "tool": "function"}),
    Case(response_format(ToolStrategy(Sum)), [CALL, *TOOL], {"structured": "`ToolStrategy`", "tool": "function"}),
    Case(
        response_format(ProviderStrategy(Sum)), [CALL, *JSON], {"structured": "`ProviderStrategy`", "tool": "function"}
    ),
    Case(forced("any"), [CALL], {"forced": "`any`", "tool": "function"}),
    Case(forced("add"), [CALL], {"forced": "named", "tool": "function"}),
    Case(forced_claude, [CALL], {"forced": "Messages, `any`", "tool": "function"}),
)
def test_runs(case, record_property):
    check(case, "langgraph", record_property)
