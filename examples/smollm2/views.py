"""A describer sees a secret word and may not say it; a guesser sees four words and the description.

``task_options.actors = ["guesser"]`` is a lone agent with half the view. Held-out questions have other words.
"""

import random
import re

from turnwise import MultiTurnEpisode, Rubric
from turnwise.tasks import OwnOptions, OwnTask
from turnwise.types import TaskCapabilities

KINDS = {
    "animal": "tiger horse rabbit whale eagle snake mouse sheep lion monkey duck shark bear goat wolf frog camel owl",
    "food": "bread apple cheese rice banana soup cake onion honey carrot butter grape pizza potato salad lemon pie egg",
    "vehicle": "train boat bicycle truck plane bus tractor rocket canoe taxi ferry tram scooter jeep van ship car sled",
    "clothing": "shirt hat shoe coat glove scarf sock dress boot belt skirt jacket tie sweater sandal cap vest apron",
}
SECRETS = {"train": slice(0, 10), "validation": slice(10, 13), "eval": slice(13, 18)}
"""The words of each kind that a split's questions have: no secret word of one split is in another."""
DESCRIBED = [
    ("cow", "An animal that gives milk."),
    ("pasta", "A food from Italy."),
    ("airplane", "A vehicle that flies."),
    ("jeans", "A piece of clothing for the legs."),
]
GUESSED = [
    ("cow, pasta, airplane, jeans\nA vehicle that flies.", "airplane"),
    ("jeans, cow, pasta, airplane\nA food from Italy.", "pasta"),
    ("pasta, jeans, airplane, cow\nAn animal that gives milk.", "cow"),
    ("airplane, cow, jeans, pasta\nA piece of clothing for the legs.", "jeans"),
]


class Described(MultiTurnEpisode):
    episode_type = "described"
    max_turns = 1

    def __init__(self, actors, sampler=None):
        super().__init__(sampler=sampler)
        self.actors = actors
        self.rubric = Rubric([form, outcome], [0.25, 1.0], own=[form])

    def setup(self, state, arena, artifact):
        state.data.update(said={"describer": ""}, artifact=artifact)

    def build_messages(self, state, arena, artifact):
        examples, asked = DESCRIBED, artifact["secret"]
        if state.current_actor == "guesser":
            examples, asked = GUESSED, f"{artifact['words']}\n{state.data['said']['describer']}"
        roles = ("user", "assistant")
        shown = [{"role": role, "content": text} for pair in examples for role, text in zip(roles, pair, strict=True)]
        return [*shown, {"role": "user", "content": asked}]

    def env_response(self, state, arena, artifact):
        state.data["said"][state.current_actor] = state.last_completion_text.strip()

    def team_answer(self, state, arena, artifact):
        guess = state.data["said"].get("guesser")
        return None if guess is None else (guess, bool(right(state.data["said"], artifact)))

    def get_extras(self, state):
        return dict(state.data)


def is_told(said, artifact):
    """Return true if the description has the secret word."""
    return bool(re.search(rf"\b{artifact['secret']}(s|es)?\b", said["describer"].lower()))


def right(said, artifact):
    """Return 1 if the one word of the four that the guess names is the secret, and the description has it not."""
    named = [word for word in artifact["words"].split(", ") if word in re.findall(r"[a-z]+", said["guesser"].lower())]
    return float(named == [artifact["secret"]] and not is_told(said, artifact))


def form(extras, artifact):
    """Reward the describer for one short sentence without the word, the guesser for one of the words alone."""
    said = extras["said"]
    good = {"guesser": said["guesser"] in artifact["words"].split(", ")}
    if said["describer"]:
        good["describer"] = bool(re.fullmatch(r"[^.\n]+\.", said["describer"])) and not is_told(said, artifact)
    return {actor: float(value) for actor, value in good.items()}


def outcome(extras, artifact):
    """Reward everyone for the right guess."""
    return right(extras["said"], artifact)


class Options(OwnOptions):
    actors: tuple[str, ...] = ("describer", "guesser")


class Views(OwnTask):
    name = "described"
    success_metric = "outcome/guesser"
    system_prompts = {"describer": "Describe the word. Do not say it.", "guesser": "Which of the words is meant?"}
    options_type = Options
    capabilities = TaskCapabilities(credit_rule="dr_mas")

    @property
    def roles(self):
        return self.options.actors

    def questions(self):
        return [question for split in SECRETS for question in self.draw(split, 400, 0)]

    def draw(self, split, n, seed):
        rng = random.Random(f"{split}/{seed}")
        drawn = []
        while len(drawn) < n:
            words = [rng.choice(words.split()[SECRETS[split]]) for words in KINDS.values()]
            rng.shuffle(words)
            question = f"{', '.join(words)}: {rng.choice(words)}"
            drawn += [] if question in drawn else [question]
        return drawn

    def artifact(self, question):
        words, secret = question.split(": ")
        return {"words": words, "secret": secret}

    def episodes(self, tree=None):
        return {"described": Described(self.options.actors, tree)}
