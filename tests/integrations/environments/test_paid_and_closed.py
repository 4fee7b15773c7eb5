"""One contract for all packages: what an action causes is paid to its actor, and what was opened is closed."""

from __future__ import annotations

import asyncio
import copy
import sys
import types

import pytest

from turnwise.arena import TreeSampler
from turnwise.credit import VineCredit
from turnwise.integrations.environments.base.forks import choose_fork_method
from turnwise.tasks import build_task

from .cases import GUESSING, LAKE, TEXT_KUHN, TEXT_TICTACTOE, TICTACTOE, Case, param
from .helpers import played, random_reply, request_of, said


# ---- payments --------------------------------------------------------------------------------------------------------
def workers():
    """Modules of PettingZoo environments in which each action ``1`` pays its own worker 1 at once, without an end."""
    import gymnasium
    import pettingzoo
    from pettingzoo.utils import AgentSelector

    class Shift:
        metadata = {"name": "shift"}  # noqa: RUF012
        possible_agents = ["a", "b"]  # noqa: RUF012
        render_mode = None

        def action_space(self, agent):
            return gymnasium.spaces.Discrete(2)

        observation_space = action_space

        def close(self):
            pass

    class Turns(Shift, pettingzoo.AECEnv):
        def reset(self, seed=None, options=None):
            self.agents = list(self.possible_agents)
            self.rewards, self._cumulative_rewards = ({"a": 0.0, "b": 0.0} for _ in range(2))
            self.terminations, self.truncations, self.infos = ({"a": it, "b": it} for it in (False, False, {}))
            self.selector = AgentSelector(self.agents)
            self.agent_selection = self.selector.reset()

        def observe(self, agent):
            return 0

        def step(self, action):
            agent = self.agent_selection
            self._cumulative_rewards[agent] = 0.0
            self.rewards = {"a": 0.0, "b": 0.0, agent: float(action)}
            self._accumulate_rewards()
            self.agent_selection = self.selector.next()

    class AtOnce(Shift, pettingzoo.ParallelEnv):
        def reset(self, seed=None, options=None):
            self.agents = list(self.possible_agents)
            return {"a": 0, "b": 0}, {"a": {}, "b": {}}

        def step(self, actions):
            no = {"a": False, "b": False}
            return {"a": 0, "b": 0}, {agent: float(did) for agent, did in actions.items()}, no, no, {"a": {}, "b": {}}

    return types.SimpleNamespace(env=Turns, parallel_env=AtOnce, __spec__=types.SimpleNamespace(name="work.shift"))


@pytest.fixture
def work(monkeypatch):
    monkeypatch.setitem(sys.modules, "work", types.ModuleType("work"))
    monkeypatch.setitem(sys.modules, "work.shift", workers())


def cut(task, rounds, **options):
    return Case(task, {"max_turns": rounds, **options})


SHIFTS, TWO = "pettingzoo:work.shift", {"player_0": 2.0, "player_1": -2.0}
PRISONERS = "openspiel:repeated_game(stage_game=matrix_pd(),num_repetitions=9)"
PAID = [
    # Each step off the cliff's edge costs 1; a wrong guess 0.1.
    param(cut("gymnasium:CliffWalking-v1", 2), ["0", "1"], {"player": -2.0}, [-1.0, -1.0]),
    param(cut(GUESSING.task, 2, **GUESSING.options), ["9", "1"], {"player": -0.2}, [-0.1, -0.1]),
    param(cut(SHIFTS, 2, cooperative=True), "1111", {"a": 2.0, "b": 2.0}, [1.0] * 4, name="work in turns"),
    param(cut(SHIFTS, 2, parallel=True), "1001", {"a": 1.0, "b": 1.0}, [1.0, 0.0, 0.0, 1.0], name="work at once"),
    # Paper (1) beats rock (0): the first player's choice counts once the second one has chosen.
    param(cut("pettingzoo:rps_v2", 2), "1010", TWO, [1.0, -1.0, 1.0, -1.0], name="rps in turns"),
    param(cut("pettingzoo:rps_v2", 2, parallel=True), "1010", TWO, [1.0, -1.0, 1.0, -1.0], name="rps at once"),
    param(
        cut(PRISONERS, 2), ["Cooperate", "Defect", "Defect", "Defect"], {"player0": 1.0, "player1": 11.0},
        [0.0, 10.0, 1.0, 1.0], name="prisoners",
    ),
    # The loser's last action was not the one that lost to an answer at once, but its last chance.
    param(TICTACTOE, "04182", {"player_1": 1.0, "player_2": -1.0}, [0.0, 0.0, 0.0, -1.0, 1.0]),
    param(TEXT_TICTACTOE, "04182", {"player0": 1.0, "player1": -1.0}, [0.0, 0.0, 0.0, -1.0, 1.0]),
    # An illegal move is the loss of its actor, and in a zero-sum game the gain of the other.
    param(TICTACTOE, "00", {"player_1": 1.5, "player_2": -1.5}, [1.5, -1.5], name="an illegal move"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "moves", "rewards", "steps"), PAID)
async def test_what_an_action_causes_is_paid_to_its_actor(request, build, case, moves, rewards, steps):
    if case.task == SHIFTS:
        request.getfixturevalue("work")
    task = build(case)
    (plain,) = await played(task, [request_of(task, 3)], said(*(f"[{move}]" for move in moves)))
    assert plain.rewards == pytest.approx(rewards)
    assert [step.reward for step in plain.steps] == [None] * len(moves)  # each has its actor's sum
    # Of two equal branches one goes on. Along its path the rewards of each actor add up to the same.
    twice = said(*(f"[{move}]" for move in moves for _ in range(2)))
    (tree,) = await played(task, [request_of(task, 3)], twice, tree=TreeSampler(branches=2))
    own = [step for step in tree.steps if step.selected]
    assert [step.reward for step in own] == pytest.approx(steps)
    paid = {actor: sum(step.reward for step in own if step.actor_id == actor) for actor in rewards}
    assert paid == pytest.approx(rewards) == tree.extras["rewards"]


@pytest.mark.needs("pettingzoo")
@pytest.mark.usefixtures("work")
async def test_branches_that_are_left_several_ends_and_values_are_paid():
    task = build_task(SHIFTS, {"max_turns": 1, "parallel": True})
    # The first player's branches: what only the branch that goes on brought is not known of the others.
    script = said("[1]", "[0]", "[0]", "[0]")
    (tree,) = await played(task, [request_of(task)], script, tree=TreeSampler(branches=2, select="first"))
    assert [(step.actor_id, step.reward, step.selected) for step in tree.steps] == [
        ("a", 1.0, True), ("a", 0.0, False), ("b", 0.0, True), ("b", 0.0, False),
    ]  # fmt: skip
    # With several ends an action that led to more than one gets the mean, here of 1 and 1.
    beams = TreeSampler(branches=2, beam_width=2)
    (tree,) = await played(task, [request_of(task)], said("[1]"), tree=beams)
    assert [step.reward for step in tree.steps if step.selected] == [1.0, 1.0]
    # A playout pays both, and the first player's value before the second one acts has its reward to come.
    tree = TreeSampler(branches=2, playouts=2)
    (valued,) = await played(task, [request_of(task)], said("[1]"), tree=tree, credit=VineCredit())
    first = next(step for step in valued.steps if step.actor_id == "a")
    assert all(one["rewards"] == [["b", 1.0], ["a", 1.0]] for one in first.info["playouts"])


# ---- what is opened --------------------------------------------------------------------------------------------------
class Opened:
    """An environment, or the client of one, that notes whether it is open and fails where it is told to."""

    all: list[Opened] = []  # noqa: RUF012
    fails = ""

    def __init__(self, inner):
        self.inner, self.is_open = inner, True
        Opened.all.append(self)

    def __getattr__(self, name):
        if name == Opened.fails:
            raise RuntimeError(f"{name} fails")
        return getattr(self.inner, name)

    def __deepcopy__(self, memo):
        return Opened(copy.deepcopy(self.inner, memo))

    def close(self):
        self.is_open = False
        return self.inner.close()

    disconnect = close


class OpenedClient(Opened):
    def disconnect(self):
        self.is_open = False
        self.inner.disconnect()


MAKERS = {
    "gymnasium": ("gymnasium:GymnasiumGame.make", Opened),
    "pettingzoo": ("pettingzoo:PettingZooGame.make", Opened),
    "textarena": ("textarena:TextArenaGame.make", Opened),
    "openenv": ("openenv:OpenEnvGame.connect", OpenedClient),
}
"""What opens an environment, by package. OpenSpiel and reasoning-gym hold no environment open."""


@pytest.fixture
def opened(monkeypatch):
    """``opened(case)``: note what the case's package opens from now on."""

    def note(case):
        module, _, place = MAKERS[case.prefix][0].partition(":")
        kind, _, method = place.partition(".")
        __import__(f"turnwise.integrations.environments.{module}")
        game = getattr(sys.modules[f"turnwise.integrations.environments.{module}"], kind)
        make, kept = getattr(game, method), MAKERS[case.prefix][1]
        monkeypatch.setattr(game, method, lambda self: kept(make(self)))
        monkeypatch.setattr(Opened, "all", [])
        monkeypatch.setattr(Opened, "fails", "")

    return note


def proved(task):
    choose_fork_method(task.game)


def shown(task):
    assert len(task.demonstrations(12, 0)) == 12


def play(tree=None, text=None, **options):
    def run(task):
        task.game.max_turns = options.get("max_turns", task.game.max_turns)
        script = random_reply(task) if text is None else said(text)
        requests = [request_of(task, seed) for seed in range(3)]
        asyncio.run(played(task, requests, script, tree=tree and tree(), failure_threshold=1.0))

    return run


WAYS = {
    "to the end": play(),
    "cut off": play(max_turns=1),
    "an illegal move": play(text="[]"),
    "a tree": play(lambda: TreeSampler(branches=2), max_turns=3),
    "beams and playouts": play(lambda: TreeSampler(branches=2, beam_width=2, playouts=1), max_turns=2),
    "a proof of its forks": proved,
    "demonstrations": shown,
}
FAILS = {"reset": play(), "step": play(), "reset of a proof": proved, "step of a proof": proved}


@pytest.mark.parametrize("way", [*WAYS, *FAILS])
@pytest.mark.parametrize("case", [param(case) for case in (LAKE, TICTACTOE, TEXT_KUHN, GUESSING)])
def test_what_was_opened_is_closed(build, opened, case, way):
    opened(case)
    task = build(case)
    assert not any(one.is_open for one in Opened.all), "a task that is not played holds nothing"
    Opened.fails = way.partition(" ")[0] if way in FAILS else ""
    if way in FAILS:
        with pytest.raises((AssertionError, RuntimeError), match=f"{Opened.fails} fails"):
            FAILS[way](task)
    else:
        WAYS[way](task)
    assert Opened.all and not any(one.is_open for one in Opened.all)
