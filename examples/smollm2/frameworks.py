"""A team of two frameworks: a LangGraph planner writes the sum, and a worker of the OpenAI Agents SDK works it out.

They use no tools: SmolLM2's chat template shows none. Each actor has a reward of its own: half for the form of its
line, half for the team's answer.
"""

import re
from typing import TypedDict

from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, Runner
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from turnwise import Rubric

actors = ["planner", "worker"]
FORMS = {"planner": r"Plan: \d+ [+-] \d+", "worker": r"Answer: \d+"}
PLANS = [
    ("Sam has 31 pens and gets 4 more. How many pens does Sam have now?", "Plan: 31 + 4"),
    ("There are 28 cups on the table. Sam takes 7 of them. How many cups remain?", "Plan: 28 - 7"),
    ("Tom buys 22 pens on Monday and 5 on Tuesday. How many pens is that in all?", "Plan: 22 + 5"),
]
WORK = [("Plan: 31 + 4", "Answer: 35")]

STORIES = {
    "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?": 1,
    "{who} has {a} {things} and loses {b} of them. How many {things} are left?": -1,
    "{who} buys {a} {things} on Monday and {b} on Tuesday. How many {things} is that in all?": 1,
    "There are {a} {things} on the table. {who} takes {b} of them. How many {things} remain?": -1,
}
questions = [
    {"text": story.format(who=who, things=things, a=a, b=b), "answer": a + sign * b}
    for story, sign in STORIES.items()
    for who, things in (("Ann", "apples"), ("Ben", "cards"), ("Mia", "coins"))
    for a in range(6, 26)
    for b in range(2, 6)
]


class State(TypedDict):
    question: str
    plan: str


def chat(examples, text):
    """Messages that show how earlier texts were answered, and end with ``text``."""
    shown = [({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in examples]
    return [*(message for pair in shown for message in pair), {"role": "user", "content": text}]


async def agent(question, models):
    planner, worker = models["planner"], models["worker"]
    llm = ChatOpenAI(**planner.langchain_kwargs())

    async def plan(state):
        answer = await llm.ainvoke([("system", "Write the plan."), *chat(PLANS, state["question"])])
        return {"plan": answer.content.strip()}

    graph = StateGraph(State).add_node("plan", plan).add_edge(START, "plan").add_edge("plan", END).compile()
    planned = (await graph.ainvoke({"question": question["text"]}))["plan"]

    model = OpenAIChatCompletionsModel(worker.name, openai_client=worker.async_openai_client())
    reckoner = Agent("worker", instructions="Work out the plan.", model=model)
    try:
        answer = (await Runner.run(reckoner, chat(WORK, planned))).final_output
    except ModelBehaviorError:  # an empty answer, which earns nothing
        answer = ""
    return {"planner": planned, "worker": answer.strip()}


def form(extras):
    """Reward each actor for a line in its form."""
    return {actor: float(bool(re.fullmatch(FORMS[actor], extras["result"][actor]))) for actor in actors}


def right(extras, artifact):
    """Reward the team for the right number, whatever stands around it."""
    numbers = re.findall(r"\d+", extras["result"]["worker"])
    return float(numbers[-1:] == [str(artifact["answer"])])


def planned(extras, artifact):
    """Measure whether the planner's line, alone, has the right sum."""
    sums = re.findall(r"(\d+) ([+-]) (\d+)", extras["result"]["planner"])
    value = {int(a) + int(b) if sign == "+" else int(a) - int(b) for a, sign, b in sums[-1:]}
    return {"planner": float(value == {artifact["answer"]})}


rubric = Rubric([form, right, planned], weights=[0.5, 0.5, 0.0], own=[form])
