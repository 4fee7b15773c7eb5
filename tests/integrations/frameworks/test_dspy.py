"""dspy: ReAct with a tool, a typed signature, and each adapter."""

from __future__ import annotations

import dspy

from .helpers import Case, add, cases, check


def lm_of(model):
    return dspy.LM(f"openai/{model.name}", api_base=model.base_url, api_key=model.api_key, cache=False)


def react(question, models):
    with dspy.context(lm=lm_of(models["agent"])):
        prediction = dspy.ReAct("question -> answer", tools=[add])(question=question["text"])
    return float(question["answer"] in prediction.answer)


def typed(adapter):
    def structured(question, models):
        with dspy.context(lm=lm_of(models["agent"]), adapter=adapter()):
            prediction = dspy.ChainOfThought("question -> total: int")(question=question["text"])
        return float(prediction.total == int(question["answer"]))

    structured.__name__ = adapter.__name__
    return structured


def field(**values):
    return "\n\n".join([f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()] + ["[[ ## completed ## ]]"])


STEP = field(next_thought="I add.", next_tool_name="add", next_tool_args='{"a": $a, "b": $b}')
END = field(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")
ANSWER = field(reasoning="I added.", answer="$sum")
TYPED = field(reasoning="I add.", total="$sum")


@cases(
    Case(react, [STEP, END, ANSWER], {"agent": "`ReAct`", "tool": "text"}),
    Case(typed(dspy.ChatAdapter), [TYPED], {"structured": "`ChatAdapter`"}),
    Case(typed(dspy.JSONAdapter), ['{"reasoning": "I add.", "total": $sum}'], {"structured": "`JSONAdapter`"}),
)
def test_runs(case, record_property):
    check(case, "dspy", record_property)
