"""A shop: a simulated user wants some fruit, which only it knows, and an agent learns to ask before it sells."""

from random import Random

from turnwise import Actor, Rubric
from turnwise.arena import UserActor, UserEpisode
from turnwise.tasks import OwnTask
from turnwise.types import Sampling

FRUITS = tuple(
    f"{kind} {fruit}"
    for kind in ("ripe", "dry", "green", "sweet")
    for fruit in ("plums", "figs", "pears", "limes", "dates", "nuts")
)
NUMBERS = range(2, 10)
ASK, STOP = "How many?", "bye"
AGENT = Actor("agent", "Sell fruit.", max_tokens=12)
USER = UserActor(
    "user",
    system_prompt="Buy. {goal} End: {stop}",
    stop=STOP,
    greeting="Hi!",
    sampling=Sampling(temperature=0.2, max_tokens=12),
)


def sold(rollout, artifact):
    """1.0 if the agent's last words are the order."""
    said = [step.completion for step in rollout.steps if step.actor_id == "agent"]
    return {"agent": float(said[-1:] == [artifact["order"]])}


class Shop(UserEpisode):
    episode_type = "shop"
    actors = ("user", "agent")
    max_turns = 3
    rubric = Rubric([sold])


class SimulatedUser(OwnTask):
    name = "shop"
    success_metric = "sold/agent"
    system_prompts = {"agent": AGENT.system_prompt, "user": USER.system_prompt}

    @property
    def actors(self):
        return [USER, AGENT]

    def questions(self):
        return [
            {"goal": f"You want {number} {fruit}.", "order": f"Sold: {number}"}
            for number in NUMBERS
            for fruit in FRUITS
        ]

    def episodes(self, tree=None):
        return {"shop": Shop(sampler=tree)}

    def demonstrations(self, n, seed):
        """One message of a talk in each row. Half of the agents guess the number; an answer to a guess is goodbye."""
        rng, rows = Random(f"shop/{seed}"), []
        for _ in range(n):
            number, fruit = rng.choice(NUMBERS), rng.choice(FRUITS)
            talk = [f"{fruit}, please", ASK, f"{number}", f"Sold: {number}", STOP]
            place = rng.choices(range(5), (1, 2, 4, 4, 1))[0]
            if place in (1, 4) and rng.random() < 0.5:
                talk, place = [talk[0], f"Sold: {rng.choice(NUMBERS)}", STOP], min(place, 2)
            is_agent = place % 2 == 1
            brief = USER.system_prompt.replace("{goal}", f"You want {number} {fruit}.").replace("{stop}", STOP)
            heard = talk[:place] if is_agent else [USER.greeting, *talk[:place]]
            chat = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(heard)]
            system = {"role": "system", "content": AGENT.system_prompt if is_agent else brief}
            rows.append(("agent" if is_agent else "user", [system, *chat], talk[place]))
        return rows

    def texts(self):
        return [
            message["content"]
            for _, chat, said in self.demonstrations(400, 0)
            for message in (*chat, {"content": said})
        ]
