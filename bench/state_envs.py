"""Environments to step and fork: one of this bench with a large config, and Gymnasium's toy environments unchanged."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from state_cases import SEED, messages, text

MOVES = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
SIDE = 12
BRANCHES, TURNS = 8, 10


def config(documents: int) -> dict[str, Any]:
    """Return the constant config of an environment: tools, and documents of about 700 bytes."""
    rng = random.Random(SEED)
    tools = [{"name": f"tool_{i}", "parameters": {"q": {"type": "string", "about": text(rng, 80)}}} for i in range(20)]
    library = {
        f"doc-{i}": {"title": text(rng, 30), "text": text(rng, 600), "links": [f"doc-{rng.randrange(documents)}"]}
        for i in range(documents)
    }
    return {"tools": tools, "documents": library, "limits": {"turns": TURNS, "characters": 2_000}}


@dataclass
class Warehouse:
    """A robot on a grid that fetches things and looks up documents, with a transcript of replies and observations."""

    config: dict[str, Any]
    grid: list[list[int]]
    robot: dict[str, Any]
    things: dict[str, dict[str, Any]]
    transcript: list[dict[str, Any]]
    counters: dict[str, int] = field(default_factory=lambda: {"turn": 0, "moves": 0})

    @classmethod
    def new(cls, documents: int) -> Warehouse:
        rng = random.Random(SEED)
        things = {f"box-{i}": {"at": [rng.randrange(SIDE), rng.randrange(SIDE)], "held": False} for i in range(24)}
        return cls(
            config=config(documents),
            grid=[[int(rng.random() < 0.2) for _ in range(SIDE)] for _ in range(SIDE)],
            robot={"at": [0, 0], "holds": [], "battery": 1.0},
            things=things,
            transcript=messages(rng, 10),
        )

    def step(self, reply: str) -> tuple[str, float, bool]:
        """Take one reply, ``"<move> <document>: words"``: move, pick up things there, and answer with the document."""
        head, _, _ = reply.partition(":")
        move, document = head.split()
        self.transcript.append({"role": "assistant", "content": reply})
        at = self.robot["at"]
        row, column = ((a + b) % SIDE for a, b in zip(at, MOVES[move], strict=True))
        reward = -0.01
        if not self.grid[row][column]:
            at[0], at[1] = row, column
            self.counters["moves"] += 1
            self.robot["battery"] -= 0.001
        for name, thing in self.things.items():
            if not thing["held"] and thing["at"] == [row, column]:
                thing["held"] = True
                self.robot["holds"].append(name)
                reward += 1.0
        seen = self.config["documents"][document]["text"]
        self.transcript.append({"role": "tool", "content": {"at": [row, column], "text": seen, "reward": reward}})
        self.counters["turn"] += 1
        return self.prompt(), reward, self.counters["turn"] >= self.config["limits"]["turns"]

    def prompt(self) -> str:
        """Return the model's next prompt: the end of the transcript, and the robot's position."""
        shown = [f"{message['role']}: {message['content']}" for message in self.transcript[-6:]]
        return "\n".join([*shown, f"You are at {self.robot['at'][0]}, {self.robot['at'][1]}."])


class SharedWarehouse(Warehouse):
    """A hand-written fork: ``__deepcopy__`` leaves the config out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedWarehouse:
        memo[id(self.config)] = self.config
        made = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def forkable_warehouse(documents: int) -> Warehouse:
    from turnwise.state import ForkableMixin

    class ForkableWarehouse(ForkableMixin, Warehouse, share=("config",)):
        pass

    return ForkableWarehouse.new(documents)


def replies(documents: int) -> list[list[str]]:
    """Return replies of a model to replay, ``[TURNS][BRANCHES]``."""
    rng = random.Random(SEED)

    def reply() -> str:
        return f"{rng.choice(list(MOVES))} doc-{rng.randrange(documents)}: {text(rng, 300)}"

    return [[reply() for _ in range(BRANCHES)] for _ in range(TURNS)]


# ---------------------------------------------------------------------------------------------------------------------
# Gymnasium
# ---------------------------------------------------------------------------------------------------------------------
def gymnasium_steps() -> dict[str, tuple[Any, Any, Callable[[Any], Any]]]:
    """Return by name a plain environment, a fork of a forkable one, and a function that takes some steps. Empty if
    Gymnasium is not installed."""
    if not importlib.util.find_spec("gymnasium"):
        print("without gymnasium: not installed")
        return {}
    from gymnasium.envs.toy_text.blackjack import BlackjackEnv
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    from turnwise.state import ForkableMixin

    spaces = ("action_space", "observation_space")

    class Lake(ForkableMixin, FrozenLakeEnv, share=(*spaces, "P", "desc")):
        pass

    class Blackjack(ForkableMixin, BlackjackEnv, share=spaces):
        pass

    def lake(env: Any) -> list[Any]:
        env.s = 0
        return [env.step(action) for action in (1, 1, 2, 2, 1, 2, 0, 3)]

    def blackjack(env: Any) -> list[Any]:
        env.player = [4, 5]
        return [env.step(action) for action in (1, 1, 1, 0)]

    made = {}
    for name, plain, forkable, play in (
        ("FrozenLake step", FrozenLakeEnv(), Lake(), lake),
        ("Blackjack step", BlackjackEnv(), Blackjack(), blackjack),
    ):
        plain.reset(seed=SEED)
        forkable.reset(seed=SEED)
        made[name] = (plain, copy.deepcopy(forkable), play)
    return made
