"""A solver writes the sum of a word problem, and a verifier says that it is right or writes another one.

The solver earns for its own sum and for the team's, the verifier for the team's alone. Their rewards differ in mean, so
Dr. MAS gives each its own baseline. ``task_options.actors = ["solver"]`` is the solver alone; ``task_options.verdict``
also pays the verifier for its word, and with ``task_options.calculator`` it sees what the solver does not: the value of
the sum that the solver wrote.
"""

import re

from turnwise import MultiTurnEpisode, Rubric
from turnwise.tasks import OwnOptions, OwnTask
from turnwise.types import TaskCapabilities

SUM = r"\d+ [+-] \d+ = \d+"
FORMS = {"solver": SUM, "verifier": rf"Right|Wrong: {SUM}"}
SOLVED = [
    ("Sam has 31 pens and gets 4 more. How many pens does Sam have now?", "31 + 4 = 35"),
    ("There are 28 cups on the table. Sam takes 7 of them. How many cups remain?", "28 - 7 = 21"),
    ("Tom buys 22 pens on Monday and 5 on Tuesday. How many pens is that in all?", "22 + 5 = 27"),
    ("Eva has 16 cups and loses 9 of them. How many cups are left?", "16 - 9 = 7"),
]
STORIES = {
    "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?": 1,
    "{who} has {a} {things} and loses {b} of them. How many {things} are left?": -1,
    "{who} buys {a} {things} on Monday and {b} on Tuesday. How many {things} is that in all?": 1,
    "There are {a} {things} on the table. {who} takes {b} of them. How many {things} remain?": -1,
}
QUESTIONS = {
    story.format(who=who, things=things, a=a, b=b): a + sign * b
    for story, sign in STORIES.items()
    for who, things in (("Ann", "apples"), ("Ben", "cards"), ("Mia", "coins"))
    for a in range(6, 26)
    for b in range(2, 6)
}
CHECKED = [
    (f"{SOLVED[0][0]}\n31 + 4 = 35", "Right"),
    (f"{SOLVED[1][0]}\n28 + 7 = 35", "Wrong: 28 - 7 = 21"),
    (f"{SOLVED[2][0]}\n22 + 5 = 26", "Wrong: 22 + 5 = 27"),
    (f"{SOLVED[3][0]}\n16 - 9 = 7", "Right"),
]


def is_right(said, artifact):
    """Return true if the last number of a line is the answer, whatever comes before it."""
    return re.findall(r"\d+", said)[-1:] == [str(artifact["answer"])]


def calculated(seen):
    """Add what a calculator says of the sum in the last line, if there is one."""
    found = re.match(r"(\d{1,4}) ([+-]) (\d{1,4})", seen.splitlines()[-1])
    if found is None:
        return seen
    first, sign, second = found.groups()
    value = int(first) + int(second) * (1 if sign == "+" else -1)
    return f"{seen}\nThe calculator says {first} {sign} {second} = {value}"


class Checked(MultiTurnEpisode):
    episode_type = "checked"
    max_turns = 1

    def __init__(self, options, sampler=None):
        super().__init__(sampler=sampler)
        self.actors, self.calculator = options.actors, options.calculator
        self.rubric = Rubric([attempt, outcome, verdict, form], [0.5, 0.5, options.verdict, 0.0])

    def setup(self, state, arena, artifact):
        state.data.update(said={}, answer="")

    def build_messages(self, state, arena, artifact):
        examples, asked = SOLVED, artifact["question"]
        if state.current_actor == "verifier":
            examples, asked = CHECKED, f"{asked}\n{state.data['answer']}"
            if self.calculator:
                examples = [(calculated(seen), said) for seen, said in examples]
                asked = calculated(asked)
        roles = ("user", "assistant")
        shown = [{"role": role, "content": text} for pair in examples for role, text in zip(roles, pair, strict=True)]
        return [*shown, {"role": "user", "content": asked}]

    def env_response(self, state, arena, artifact):
        said = state.data["said"][state.current_actor] = state.last_completion_text.strip()
        if not said.startswith("Right"):
            state.data["answer"] = said

    def team_answer(self, state, arena, artifact):
        answer = state.data["answer"]
        return (answer, is_right(answer, artifact)) if state.data["said"] else None

    def get_extras(self, state):
        return dict(state.data)


def attempt(extras, artifact):
    """Reward the solver for its own sum."""
    return {"solver": float(is_right(extras["said"]["solver"], artifact))}


def outcome(extras, artifact):
    """Reward everyone for the team's sum, which is the verifier's where it says another one than the solver."""
    return dict.fromkeys(extras["said"], float(is_right(extras["answer"], artifact)))


def form(extras):
    """Measure whether each line is in its actor's form."""
    return {actor: float(bool(re.fullmatch(FORMS[actor], line))) for actor, line in extras["said"].items()}


def verdict(extras, artifact):
    """Reward the verifier for the right word about the solver's sum."""
    says = {actor: line.startswith("Right") for actor, line in extras["said"].items() if actor == "verifier"}
    return {actor: float(said == is_right(extras["said"]["solver"], artifact)) for actor, said in says.items()}


class Options(OwnOptions):
    """``verdict`` is the weight of the verifier's reward for a true verdict; ``calculator`` gives it a calculator."""

    verdict: float = 0.0
    calculator: bool = False
    actors: tuple[str, ...] = ("solver", "verifier")


class Verifier(OwnTask):
    name = "checked"
    success_metric = "outcome/solver"
    system_prompts = {"solver": "Write the sum.", "verifier": "Check the sum: say Right, or Wrong and the right sum."}
    options_type = Options
    capabilities = TaskCapabilities(credit_rule="dr_mas")

    @property
    def roles(self):
        return self.options.actors

    def questions(self):
        return list(QUESTIONS)

    def artifact(self, question):
        return {"question": question, "answer": QUESTIONS[question]}

    def episodes(self, tree=None):
        return {"checked": Checked(self.options, tree)}
