"""``copy.deepcopy`` of ForkableMixin objects: forks that behave as deep copies do."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import gc
import pickle
import random
import sys
import threading
import weakref
from typing import NamedTuple

import numpy as np
import pytest

from turnwise.state import ForkableMixin, OpaqueError, StateList, Store, TokenArray, to_python


class Suit(enum.Enum):
    RED = "red"
    BLACK = "black"


class Point(NamedTuple):
    x: int
    trail: list


class Agent:
    """Of a class that knows nothing of forks."""

    def __init__(self, env):
        self.env, self.hand, self.board = env, [1, 2], env.board


class Env(ForkableMixin, share=("config",)):
    def __init__(self, seed=0):
        self.config = {"rules": [object()]}
        self.board = [[0] * 3 for _ in range(3)]
        self.row = self.board[1]
        self.scores = {"a": 0, "b": 0}
        self.log, self.seen, self.queue = [], set(), collections.deque([1, 2], maxlen=9)
        self.rng, self.generator = random.Random(seed), np.random.default_rng(seed)
        self.grid = np.zeros((2, 3))
        self.nested = {"list": [{"deep": [1]}], "array": np.arange(3), "suit": Suit.RED, "point": Point(1, [2])}
        self.turn = 0

    def step(self, action):
        self.turn += 1
        self.board[action % 3][action // 3 % 3] += 1
        self.row[0] += 1
        self.scores["ab"[action % 2]] += action
        self.log.append({"action": action, "draw": self.rng.random(), "noise": float(self.generator.normal())})
        self.seen.add(action)
        self.queue.append(action)
        self.grid[action % 2, action % 3] += self.rng.random()
        self.nested["list"].append({"deep": [action]})
        self.nested["list"][0]["deep"].append(action)
        self.nested["array"][action % 3] += 1
        self.nested["point"].trail.append(action)
        if action % 5 == 0:
            self.board = [list(row) for row in self.board]  # a new container, and the row is its own again
            self.row = self.board[1]
        if action % 7 == 0:
            self.extra = {"at": self.turn, "row": self.row}
        elif hasattr(self, "extra") and action % 3 == 0:
            del self.extra
        return self.turn, self.log[-1]["draw"]


class PlainEnv(Env):
    """The same, copied by an ordinary deep copy."""

    def __deepcopy__(self, memo):
        fresh = memo[id(self)] = object.__new__(type(self))
        memo[id(self.config)] = self.config
        for name, value in vars(self).items():
            vars(fresh)[name] = copy.deepcopy(value, memo)
        return fresh


def contents(env):
    """All that can be compared, in plain form."""
    found = {name: value for name, value in vars(env).items() if name not in ("config", "rng", "generator", "seen")}
    found["seen"] = sorted(env.seen)
    found["rng"], found["generator"] = env.rng.getstate(), env.generator.bit_generator.state
    found["aliased"] = env.row is env.board[1], "extra" in found and found["extra"]["row"] is env.row
    return repr(sorted(found.items()))


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_of_forks_equals_a_tree_of_deep_copies(seed):
    luck = random.Random(seed)
    pairs = [(Env(seed), PlainEnv(seed))]
    for _ in range(60):
        ours, plain = luck.choice(pairs)
        if luck.random() < 0.4 and len(pairs) < 12:
            pairs.append((copy.deepcopy(ours), copy.deepcopy(plain)))
            continue
        action = luck.randrange(100)
        assert ours.step(action) == plain.step(action)
        if luck.random() < 0.2:
            for one, other in pairs:
                assert contents(one) == contents(other), f"seed {seed}"
    for ours, plain in pairs:
        assert contents(ours) == contents(plain)


def test_share_as_class_attribute_is_inherited_and_added_to():
    class Base(ForkableMixin):
        share = ("config",)

        def __init__(self):
            self.config, self.table, self.own = {"a": []}, [1], []

    class Derived(Base, share=("table",)):
        pass

    for cls, shared in ((Base, ("config",)), (Derived, ("config", "table"))):
        env = cls()
        fork = copy.deepcopy(env)
        for name in ("config", "table", "own"):
            assert (getattr(fork, name) is getattr(env, name)) == (name in shared)
    with pytest.raises(TypeError, match=r"share='config'.*\('config',\)"):
        type("Bad", (ForkableMixin,), {}, share="config")
    with pytest.raises(TypeError, match="expected names"):
        type("Bad", (ForkableMixin,), {}, share=(1,))


# -- what deepcopy does with several things at once --------------------------------------------------------------------
def test_one_memo_with_whatever_else_is_copied():
    env = Env()
    first, second, board = copy.deepcopy([env, env, env.board])
    assert first is second and board is first.board and first is not env
    for _ in range(3):
        everything = {"board": env.board, "env": env, "rng": env.rng, "row": [env.row], "state": env.scores}
        fork = copy.deepcopy(everything)
        assert fork["board"] is fork["env"].board and fork["rng"] is fork["env"].rng
        assert fork["row"][0] is fork["env"].row and fork["state"] is fork["env"].scores
        fork["env"].step(4)
        assert fork["row"][0][0] == 1 and env.row[0] == 0
        del everything
        copy.deepcopy(env)  # now nothing else refers to the lists: they become facades


def test_objects_that_come_into_a_facade_are_copied_as_ever():
    env = Env()
    copy.deepcopy(env)
    env.log.append(Agent(env))
    env.nested["agent"] = agent = env.log[-1]
    env.nested["env"] = env
    for _ in range(2):
        fork = copy.deepcopy(env)
        assert fork.log[-1] is fork.nested["agent"] is not agent
        assert fork.log[-1].env is fork is fork.nested["env"]
        assert fork.log[-1].board is fork.board
        fork.log[-1].hand.append("new")
        assert env.log[-1] is agent and agent.hand == [1, 2]
        second = copy.deepcopy(fork)
        assert second.log[-1].hand == [1, 2, "new"] and second.log[-1].env is second
    sub = copy.deepcopy(env.log)
    assert sub[-1].env.log is sub


def test_what_others_refer_to_stays_theirs():
    env = Env()
    outside, rng, grid = env.board, env.rng, env.grid
    fork = copy.deepcopy(env)
    assert env.board is outside and type(outside) is list and env.rng is rng and env.grid is grid
    outside[0][0] = 7
    grid[0, 0] = 7
    rng.random()
    assert env.board[0][0] == 7 and env.grid[0, 0] == 7
    assert fork.board[0][0] == 0 and fork.grid[0, 0] == 0 and fork.rng.random() == random.Random(0).random()
    inner = env.nested["list"]
    copy.deepcopy(env)
    inner.append("seen")
    assert env.nested["list"][-1] == "seen"


def test_attributes_that_are_one_object_stay_one():
    class Twice(ForkableMixin):
        def __init__(self):
            self.rng = self.luck = random.Random(1)
            self.grid = self.same = np.zeros(3)
            self.seen = self.visited = {1}
            self.left = {"both": []}
            self.right = [self.left["both"]]

    env = Twice()
    for _ in range(3):
        env = copy.deepcopy(env)
        assert env.rng is env.luck and env.grid is env.same and env.seen is env.visited
        assert env.right[0] is env.left["both"]


def test_token_arrays():
    env = Env()
    env.tokens = TokenArray([1, 2])
    env.holder = {"tokens": env.tokens}
    for _ in range(2):
        fork = copy.deepcopy(env)
        assert fork.tokens is fork.holder["tokens"] and fork.tokens._state is fork.board._state
        fork.tokens.append(3)
        assert env.tokens == [1, 2] and fork.tokens == [1, 2, 3]
    tokens, again = copy.deepcopy([env.tokens, env])
    assert again.tokens is tokens
    again, tokens = copy.deepcopy([env, env.tokens])
    assert again.tokens is tokens and pickle.loads(pickle.dumps(fork)).tokens == [1, 2, 3]


def test_nested_forkable_objects():
    class Player(ForkableMixin):
        def __init__(self, game):
            self.game, self.hand, self.deck = game, [1], game.deck

    class Game(ForkableMixin):
        def __init__(self):
            self.deck = list(range(5))
            self.first = Player(self)
            self.players = [self.first, Player(self)]

    game = Game()
    for _ in range(3):
        fork = copy.deepcopy(game)
        assert fork.players[0] is fork.first and fork.first.game is fork
        assert fork.first.deck is fork.deck is fork.players[1].deck
        fork.first.hand.append(2)
        fork.deck.pop()
        assert game.first.hand == [1] and len(game.deck) == 5
        game = copy.deepcopy(game)
    assert type(game.first.hand) is StateList


def test_a_state_that_holds_a_forkable_object():
    state = Store().state({"env": Env(), "log": []})
    state.data["env"].mine = state.data["log"]
    first, second = state.fork(2)
    first.data["env"].step(4)
    first.data["env"].mine.append("first")
    assert second.data["env"].turn == state.data["env"].turn == 0
    assert first.data["log"] == ["first"] and second.data["log"] == [] == state.data["log"]
    assert first.data["env"].mine is first.data["log"]
    third = first.fork()
    assert third.data["env"].turn == 1 and third.data["env"] is third.data["env"]


# -- copied when asked for ---------------------------------------------------------------------------------------------
def test_arrays_and_generators_are_copied_at_first_use_and_by_the_last_not_at_all():
    class Heavy(ForkableMixin):
        def __init__(self):
            self.grid, self.rng = np.zeros(1000), random.Random(5)

    env = Heavy()
    address = env.grid.ctypes.data
    forks = [copy.deepcopy(env) for _ in range(4)]
    assert len({fork.grid.ctypes.data for fork in forks}) == 4 and all(f.grid.ctypes.data != address for f in forks)
    assert env.grid.ctypes.data == address, "the last one needs no copy"
    forks[0].grid[0] = 1
    assert env.grid[0] == 0 == forks[1].grid[0]
    assert [fork.rng.random() for fork in forks] == [env.rng.random()] * 4
    forks = [copy.deepcopy(forks[0]) for _ in range(2)]
    forks[0].grid = None
    assert copy.deepcopy(forks[0]).grid is None and forks[1].grid[0] == 1
    del forks[1].grid
    assert not hasattr(forks[1], "grid") and not hasattr(copy.deepcopy(forks[1]), "grid")
    with pytest.raises(AttributeError, match="'Heavy' object has no attribute 'grid'"):
        forks[1].grid  # noqa: B018
    with pytest.raises(AttributeError, match="type object 'Heavy' has no attribute 'grid'"):
        Heavy.grid  # noqa: B018


def test_class_defaults_and_computed_attributes_stay_what_they_are():
    import functools

    class Lazy(ForkableMixin):
        grid = "default"

        @functools.cached_property
        def table(self):
            self.computed += 1
            return np.arange(3)

        @property
        def guarded(self):
            return self.__dict__["guarded"]

        def __init__(self):
            self.computed = 0
            self.__dict__["guarded"] = np.ones(2)

    env = Lazy()
    fork = copy.deepcopy(env)
    assert fork.grid == Lazy.grid == "default"
    assert fork.guarded is not env.guarded and list(fork.guarded) == [1, 1]
    env.grid = np.zeros(2)
    assert list(env.table) == [0, 1, 2]
    fork = copy.deepcopy(env)
    assert list(fork.grid) == [0, 0] and list(fork.table) == [0, 1, 2] and fork.computed == 1
    assert Lazy().grid == Lazy.grid == "default" and list(Lazy().table) == [0, 1, 2]
    assert isinstance(vars(Lazy)["grid"].inherited[0], str)


# -- kinds of classes --------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Data(ForkableMixin, share=("config",)):
    config: dict = dataclasses.field(default_factory=dict)
    board: list = dataclasses.field(default_factory=lambda: [[0, 0], [0, 0]])
    tags: set = dataclasses.field(default_factory=set)
    turn: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen(ForkableMixin):
    board: list
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(2), compare=False)


@dataclasses.dataclass(slots=True)
class Slotted(ForkableMixin):
    board: list
    grid: np.ndarray
    other: object = None


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlotted(ForkableMixin):
    board: list


def test_dataclasses():
    env = Data(config={"big": [1]})
    fork = copy.deepcopy(env)
    assert fork == env
    assert repr(fork) == repr(env) == "Data(config={'big': [1]}, board=[[0, 0], [0, 0]], tags=set(), turn=0)"
    fork.board[0][0] = 3
    fork.tags.add(1)
    assert fork != env and env.tags == set()
    assert dataclasses.asdict(fork) == {"config": {"big": [1]}, "board": [[3, 0], [0, 0]], "tags": {1}, "turn": 0}
    # From 3.13 on asdict goes by the very type: it forks a facade, as it copies whatever it does not know.
    assert type(dataclasses.asdict(fork)["board"]) is (list if sys.version_info < (3, 13) else StateList)
    plain = dataclasses.asdict(fork)
    plain["board"][0][0] = 9
    assert fork.board[0][0] == 3 and type(to_python(plain)["board"][0]) is list
    replaced = dataclasses.replace(fork, turn=4)
    assert replaced.turn == 4 and replaced.board is fork.board
    again = copy.deepcopy(replaced)
    again.board[0][0] = 5
    assert replaced.board[0][0] == 3


class Base(ForkableMixin):
    __slots__ = ("board", "unset")


class SlotsByHand(Base):
    __slots__ = ("more",)

    def __init__(self):
        self.board = [[1]]
        self.more = {"a": [self.board]}


class Hooked(ForkableMixin):
    def __init__(self):
        self.board, self.lock = [[1]], threading.Lock()

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["lock"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.lock = threading.Lock()


class Reduced(ForkableMixin):
    def __init__(self, board):
        self.board = board

    def __reduce__(self):
        return (Reduced, (self.board,))


class Watched(ForkableMixin):
    """Its own attribute hooks stay out of the copying."""

    def __init__(self):
        for name, value in (("target", np.zeros(3)), ("board", [[1]]), ("writes", [])):
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        return getattr(self.target, name)

    def __setattr__(self, name, value):
        self.writes.append(name)
        object.__setattr__(self, name, value)


CLASSES = {
    "frozen": lambda: Frozen([[1]]),
    "slotted": lambda: Slotted([[1]], np.zeros(2)),
    "frozen and slotted": lambda: FrozenSlotted([[1]]),
    "slots by hand": SlotsByHand,
    "state hooks": Hooked,
    "reduced": lambda: Reduced([[1]]),
    "attribute hooks": Watched,
}


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_every_kind_of_class_forks_its_containers(make):
    env = make()
    for _ in range(2):
        fork = copy.deepcopy(env)
        fork.board[0].append(2)
        assert env.board == [[1]] and fork.board == [[1, 2]] and type(fork) is type(env)
        assert type(env.board) is type(fork.board) is StateList and copy.copy(env).board is env.board


def test_what_is_special_in_each_kind():
    env = Frozen([[1]])
    fork = copy.deepcopy(env)
    assert fork.rng.random() == env.rng.random()
    with pytest.raises(dataclasses.FrozenInstanceError):
        fork.board = []
    slotted = Slotted([[1]], np.zeros(2))
    slotted.other = slotted
    fork = copy.deepcopy(slotted)
    fork.grid[0] = 1
    assert fork.other is fork and slotted.grid[0] == 0
    fork = copy.deepcopy(SlotsByHand())
    assert fork.more["a"][0] is fork.board and not hasattr(fork, "unset")
    hooked = Hooked()
    assert hooked.lock is not copy.deepcopy(hooked).lock
    assert copy.deepcopy(type("Own", (ForkableMixin,), {"__deepcopy__": lambda self, memo: "mine"})()) == "mine"
    env = Watched()
    env.x = 1
    fork = copy.deepcopy(env)
    assert fork.writes == ["x"] and fork.shape == (3,) and fork.x == 1
    fork.target[0] = 1
    fork.y = 2
    assert env.target[0] == 0 and env.writes == ["x"] and fork.writes == ["x", "y"]


# -- shallow copies and pickles ----------------------------------------------------------------------------------------
def test_pickles_hold_plain_containers():
    env = Env()
    env.config = {"rules": [1]}
    env.me = env
    fork = copy.deepcopy(env)
    fork.step(4)
    for protocol in (2, 4, 5):
        again = pickle.loads(pickle.dumps(fork, protocol))
        assert type(again.board) is list and type(again.nested["list"]) is list
        assert again.row is again.board[1] and again.me is again
        assert contents(again).replace("\n", "") != "" and again.log == fork.log
        assert again.step(5) == copy.deepcopy(fork).step(5)
        deeper = copy.deepcopy(again)
        assert type(deeper.board) is StateList and deeper.me is deeper


# -- errors, memory ----------------------------------------------------------------------------------------------------
def test_what_cannot_be_copied_is_named_with_its_path():
    env = Env()
    env.helper = Agent(env)
    env.helper.locks = {"main": [threading.Lock()]}
    for _ in range(2):
        with pytest.raises(OpaqueError, match=r"Env\.helper\.locks\['main'\]\[0\]: an object of type lock"):
            copy.deepcopy(env)
    env.step(1)
    del env.helper
    env.stream = (number for number in range(3))
    with pytest.raises(OpaqueError, match=r"Env\.stream: an object of type generator.*share="):
        copy.deepcopy(env)
    del env.stream
    copy.deepcopy(env)
    env.log.append(threading.Lock())
    with pytest.raises(OpaqueError, match=r"Env\.log\[1\]: an object of type lock"):
        copy.deepcopy(env)
    env.log.pop()
    assert copy.deepcopy(env).turn == 1

    class Shares(Env, share=("lock",)):
        pass

    env = Shares()
    env.lock = threading.Lock()
    assert copy.deepcopy(env).lock is env.lock


def test_forks_leave_nothing_behind():
    env = Env()
    env.me = env
    env.agents = [Agent(env)]
    copy.deepcopy(env).log.append(Agent(env))
    gc.collect()
    store = env.log._state.store
    before = len(store.states())
    forks = [copy.deepcopy(env) for _ in range(10)]
    for fork in forks:
        fork.log.append(fork)  # a cycle through the store
        fork.step(1)
    kept = [weakref.ref(fork) for fork in forks]
    del forks, fork
    gc.collect()
    assert [ref() for ref in kept] == [None] * 10 and len(store.states()) == before
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None and len(store.states()) < before
