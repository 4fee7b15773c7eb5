"""A buyer and a seller haggle over a price. Each knows its own value alone, and both gain from a deal in between.

The buyer opens, and each speaks at most twice. A deal pays each its share of what the two could gain, no deal pays
nothing. So it is no zero-sum game: who insists on a better price may lose the deal.
"""

import random
import re

from turnwise import MultiTurnEpisode, Rubric
from turnwise.tasks import OwnOptions, OwnTask
from turnwise.types import TaskCapabilities

THINGS = ("lamp", "bike", "chair", "watch", "phone", "coat", "drum", "tent")
OTHER = {"buyer": "The seller wants", "seller": "The buyer offers"}


def prompt(actor, artifact, price):
    """Write what a seat sees: its own value, and the price that the other one named last."""
    own = {"buyer": f"is worth {artifact['value']} to you.", "seller": f"cost you {artifact['cost']}."}[actor]
    asked = "Make an offer." if price is None else f"{OTHER[actor]} {price}."
    return f"The {artifact['thing']} {own} {asked}"


class Haggle(MultiTurnEpisode):
    episode_type = "haggle"
    actors = ("buyer", "seller")
    max_turns = 2

    def __init__(self, options, sampler=None):
        super().__init__(sampler=sampler)
        self.rubric = Rubric([gain, form, deal, price], [1.0, options.form, options.deal, 0.0], own=[form])

    def setup(self, state, arena, artifact):
        state.data.update(price=None, dealt=False, over=False, readable={"buyer": [], "seller": []})

    def build_messages(self, state, arena, artifact):
        actor = state.current_actor
        return [{"role": "user", "content": prompt(actor, artifact, state.data["price"])}]

    def env_response(self, state, arena, artifact):
        data, said = state.data, state.last_completion_text.strip()
        agrees = said == "deal" and data["price"] is not None
        is_price = re.fullmatch(r"[1-9]\d?", said)
        data["readable"][state.current_actor].append(bool(agrees or is_price))
        data["dealt"], data["over"] = agrees, agrees or not is_price
        if is_price:
            data["price"] = int(said)

    def is_done(self, state, arena, artifact):
        return state.data["over"]

    def get_extras(self, state):
        return dict(state.data)


def gain(extras, artifact):
    """Reward each seat for its share of what a deal can gain, from -1 to 1; without a deal it is 0."""
    cost, value, price = artifact["cost"], artifact["value"], extras["price"]
    if not extras["dealt"]:
        return {"buyer": 0.0, "seller": 0.0}
    shares = {"buyer": (value - price) / (value - cost), "seller": (price - cost) / (value - cost)}
    return {seat: min(max(share, -1.0), 1.0) for seat, share in shares.items()}


def form(extras):
    """Measure the share of each seat's answers that are a price or "deal"."""
    return {seat: sum(read) / len(read) for seat, read in extras["readable"].items() if read}


def deal(extras, artifact):
    """Measure whether they agree on a price at which nobody loses."""
    agreed = extras["dealt"] and artifact["cost"] <= extras["price"] <= artifact["value"]
    return {"buyer": float(agreed), "seller": float(agreed)}


def price(extras, artifact):
    """Measure the seller's share of the gain in deals at which nobody loses."""
    share = gain(extras, artifact)["seller"]
    return {"seller": share} if deal(extras, artifact)["seller"] else {}


class Options(OwnOptions):
    """``form`` and ``deal`` are the weights of readable answers, and of a deal at which nobody loses. ``quality`` is
    the chance that a demonstration doesn't lose."""

    form: float = 0.1
    deal: float = 0.0
    quality: float = 0.0


class Haggling(OwnTask):
    name = "haggle"
    success_metric = "deal/buyer"
    system_prompts = {
        "buyer": "You buy. Answer with a price, or with deal.",
        "seller": "You sell. Answer with a price, or with deal.",
    }
    options_type = Options
    capabilities = TaskCapabilities(credit_rule="dr_mas", seats=("buyer", "seller"))

    def questions(self):
        rng = random.Random("haggle")
        every = [f"{thing} {cost} {cost + gain}" for thing in THINGS for cost in range(20, 61) for gain in range(8, 33)]
        return rng.sample(every, 2000)

    def artifact(self, question):
        thing, cost, value = question.split()
        return {"question": question, "thing": thing, "cost": int(cost), "value": int(value)}

    def episodes(self, tree=None):
        return {"haggle": Haggle(self.options, tree)}

    def demonstrations(self, n, seed):
        """Show random answers, half of them "deal"; with chance ``quality`` one at which the seat doesn't lose."""
        rng, made = random.Random(f"haggle-demonstrations/{seed}"), []
        for index, question in enumerate(self.draw("train", n, f"demonstrations/{seed}")):
            artifact, actor = self.artifact(question), self.roles[index % 2]
            cost, value, buys = artifact["cost"], artifact["value"], actor == "buyer"
            named = None if buys and rng.random() < 0.5 else rng.randint(10, 99)
            gains = named is not None and (named <= value if buys else named >= cost)
            low, high, agrees = 10, 99, named is not None and rng.random() < 0.5
            if rng.random() < self.options.quality:
                low, high, agrees = (10, value, gains) if buys else (cost, 99, gains)
            chat = [{"role": "system", "content": self.system_prompts[actor]}]
            said = "deal" if agrees else str(rng.randint(low, high))
            made.append((actor, [*chat, {"role": "user", "content": prompt(actor, artifact, named)}], said))
        return made
