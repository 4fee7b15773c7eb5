"""What code of users does stays its own affair: calls that hang, block, exit, or open what nobody closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from turnwise.arena import MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.runtime import user_code, watch
from turnwise.arena.runtime.user_code import CallTimeoutError, call, hook
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.types import EpisodeRequest, EpisodeState
from turnwise.utils.signals import UserCodeError, exits_as_errors
from turnwise.utils.threads import run_to_end, to_thread

from .user_games import arena_of, asked, forget_warnings, game, leave, play, slept, stop, tool  # noqa: F401


class Custom(BaseException):
    """As the panics of Rust code are."""


def cancel() -> None:
    raise asyncio.CancelledError


def interrupt() -> None:
    raise KeyboardInterrupt


def custom() -> None:
    raise Custom("no text")


def generator_exit() -> None:
    raise GeneratorExit


def cancel_the_task() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]


def grouped() -> None:
    raise BaseExceptionGroup("two", [SystemExit(3), ValueError("x")])


EXITS = [leave, cancel, cancel_the_task, interrupt, custom, generator_exit, stop, grouped]


def of_first(act: Any) -> Any:
    return lambda artifact: act() if artifact == 0 else None


def playing(act: Any) -> Any:
    class Own(SingleTurnEpisode):
        episode_type, rubric = "own", Rubric([lambda: 1.0])

        def get_prompt(self, artifact: Any) -> str:
            return "go"

        async def rollout(self, arena: Any, artifact: Any, state: Any = None) -> Any:
            of_first(act)(artifact)
            return await super().rollout(arena, artifact, state)

    return Own()


def in_a_task(act: Any) -> Any:
    async def agent(question: Any, models: Any) -> float:
        async def inner() -> None:
            act()

        if question == 0:
            await asyncio.create_task(inner())
        return 1.0

    return agent


def agent(question: Any, models: Any, act: Any) -> float:
    if question == 0:
        act()
    return 1.0


async def async_agent(question: Any, models: Any, act: Any) -> float:
    return agent(question, models, act)


PLACES = {
    "hook": lambda act: arena_of(game(env_response=of_first(act))),
    "hook in a thread": lambda act: arena_of(game(env_response=of_first(act), blocking=True)),
    "rollout": lambda act: arena_of(playing(act)),
    "reward": lambda act: arena_of(
        game(rubric=Rubric([lambda rollout, arena: of_first(act)(rollout.artifact) or 1.0]))
    ),
    "reward with a timeout": lambda act: arena_of(
        game(rubric=Rubric([lambda rollout, arena: of_first(act)(rollout.artifact) or 1.0], timeout=5.0))
    ),
    "extras": lambda act: arena_of(
        game(get_extras=lambda state: act() if state.trajectory[0].prompt[-1]["content"][-1] == "0" else {})
    ),
    "agent": lambda act: arena_of(AgentEpisode(partial(agent, act=act), Gateway(), actors=["solver"])),
    "async agent": lambda act: arena_of(AgentEpisode(partial(async_agent, act=act), Gateway(), actors=["solver"])),
    "task of an agent": lambda act: arena_of(AgentEpisode(in_a_task(act), Gateway(), actors=["solver"])),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("act", EXITS)
@pytest.mark.parametrize("place", PLACES)
def test_what_ends_a_process_ends_its_episode_alone(place: str, act: Any) -> None:
    results = play(PLACES[place](act))
    assert [result.rollout.error is None for result in results] == [False, True, True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("act", EXITS)
def test_in_a_tool_it_is_the_answer(act: Any) -> None:
    results = play(arena_of(game(SingleTurnEpisode), asked, [tool(act)]))
    told = results[0].rollout.steps[1].prompt[-1]["content"]
    assert told.startswith("error: ") and results[0].rollout.facts.mishaps == {"tool_errors/run": 1}
    assert all(result.rollout.error is None for result in results)
    assert results[1].rollout.facts.mishaps is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cancellation_from_outside_gets_through() -> None:
    async def main() -> None:
        playing = asyncio.create_task(
            arena_of(game(env_response=lambda artifact: asyncio.sleep(60))).generate_rollouts(
                [EpisodeRequest("game", 0)]
            )
        )
        await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(main())


def test_ctrl_c_gets_through() -> None:
    def pressed() -> None:
        import signal

        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, None)
        handler(signal.SIGINT, None)  # the second one interrupts what runs

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(
            arena_of(game(env_response=lambda artifact: pressed())).generate_rollouts([EpisodeRequest("game", 0)])
        )


# ---- what hangs ------------------------------------------------------------------------------------------------------
class Hang:
    """Calls that wait until the test ends."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __call__(self) -> str:
        """Wait."""
        self.released.wait(60)
        return "late"


@pytest.fixture
def hang() -> Any:
    one = Hang()
    yield one
    one.released.set()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_calls_that_hang_hold_up_no_other(hang: Hang) -> None:
    """300 abandoned calls, and then a quick one of each kind."""

    async def main() -> list[Any]:
        many = [call(kind, hang, limit=0.02) for kind in user_code.THREADS for _ in range(80)]
        ended = await asyncio.gather(*many, return_exceptions=True)
        assert all(isinstance(one, CallTimeoutError) for one in ended)
        return await asyncio.gather(*(call(kind, lambda: 4, limit=5.0) for kind in user_code.THREADS))

    began = time.monotonic()
    watch.take_counts()
    assert run_to_end(main()) == [4] * len(user_code.THREADS)
    assert time.monotonic() - began < 30, "nothing waits for the calls that hang"
    counts = watch.take_counts()
    assert counts["user_code/abandoned"] == 80 * len(user_code.THREADS) and counts["user_code/waiting"] > 0


async def test_a_function_that_always_hangs_is_called_no_more(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "MAX_HANGING", 2)
    for _ in range(2):
        with pytest.raises(CallTimeoutError, match=r"longer than 0\.01 s"):
            await call("tool", hang, limit=0.01, name="stuck")
    with pytest.raises(CallTimeoutError, match="tool 'stuck' is not called: 2 of its calls"):
        await call("tool", hang, limit=0.01, name="stuck")
    assert await call("tool", lambda: 4, limit=5.0, name="other") == 4
    hang.released.set()
    for _ in range(500):
        if not user_code._hanging["tool", "stuck"]:
            break
        await asyncio.sleep(0.01)
    assert await call("tool", hang, limit=5.0, name="stuck") == "late"


async def test_the_limit_begins_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(user_code.THREADS, "agent", 2)
    user_code._gates.clear()
    ended = await asyncio.gather(*(call("agent", lambda: slept(0.1), limit=0.35) for _ in range(12)))
    assert ended == [1.0] * 12, "the last one waits 0.5 s for a thread"


async def test_an_episode_takes_some_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many calls of one episode, few run at once; those of others don't wait for them."""
    running = most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.01)
        with lock:
            running -= 1

    monkeypatch.setattr(
        user_code, "current_context", lambda: type("Context", (), {"rollout": type("R", (), {"id": "e1"})})
    )
    await asyncio.gather(*(call("tool", work) for _ in range(30)))
    assert most == user_code.THREADS_OF_EPISODE


async def test_time_in_which_others_hold_the_loop_does_not_count() -> None:
    """A call of 20 ms with a limit of 100 ms, and a hook that holds the loop for 300 ms."""

    async def quick() -> int:
        for _ in range(4):
            await asyncio.sleep(0.005)
        return 4

    async def blocks() -> None:
        await asyncio.sleep(0.004)
        await hook(time.sleep, 0.3)

    with pytest.warns(RuntimeWarning, match="'sleep' blocked the event loop for 0.3 s"):
        found = await asyncio.gather(call("tool", quick, limit=0.1), call("tool", lambda: 5, limit=0.1), blocks())
    assert found[:2] == [4, 5]


async def test_what_swallows_its_cancellation_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "GRACE", 0.05)
    going = asyncio.Event()

    async def stubborn() -> str:
        while not going.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await going.wait()
        return "success"

    with (
        pytest.warns(RuntimeWarning, match="agent 'stubborn' was cancelled and still runs"),
        pytest.raises(CallTimeoutError),
    ):
        await call("agent", stubborn, limit=0.05)
    going.set()


def test_an_event_loop_ends_whatever_its_tasks_do(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.utils.threads.END_SECONDS", 0.1)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def main() -> int:
        left = [asyncio.create_task(stubborn(), name="stubborn"), asyncio.create_task(asyncio.to_thread(hang))]
        await asyncio.sleep(0.05)
        return 2 * len(left)

    with pytest.warns(UserWarning, match="stubborn: cancelled, but still runs"):
        assert run_to_end(main()) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", [lambda loop: loop.stop(), lambda loop: loop.call_soon(exit)])
def test_an_event_loop_goes_on_whatever_code_does_to_it(act: Any) -> None:
    async def main() -> int:
        act(asyncio.get_running_loop())
        await asyncio.sleep(0.01)
        return 4

    with pytest.warns(RuntimeWarning, match="user code can't end the event loop"):
        assert run_to_end(main()) == 4


def test_a_thread_that_raises_stop_iteration_is_heard() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        run_to_end(to_thread(stop))


async def test_what_comes_late_is_freed(hang: Hang) -> None:
    freed: list[str] = []
    with pytest.raises(CallTimeoutError):
        await call("hook", hang, limit=0.02, late=freed.append)
    hang.released.set()
    for _ in range(500):
        await asyncio.sleep(0.01)
        if freed:
            break
    assert freed == ["late"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_a_hook_that_swallows_the_deadline_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "GRACE", 0.1)
    monkeypatch.setattr("turnwise.utils.threads.END_SECONDS", 0.1)

    async def swallow(artifact: Any) -> None:
        for _ in range(1 + 100 * artifact):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)

    arena = arena_of(game(env_response=swallow))
    results = run_to_end(arena.generate_rollouts([EpisodeRequest("game", number, timeout=0.05) for number in (0, 1)]))
    assert all("ran past its deadline" in str(result.rollout.error) for result in results)


ENDINGS = {
    "a process": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)).start()",
    "a thread": "threading.Thread(target=time.sleep, args=(60,), name='mine').start()",
    "an idle pool": "pool = ThreadPoolExecutor(); pool.submit(int).result()",
    "a busy pool": "pool = ThreadPoolExecutor(thread_name_prefix='mine'); pool.submit(time.sleep, 60)",
    "closed streams": "sys.stdout.close(); sys.stderr.close()",
}


@pytest.mark.parametrize("left", ENDINGS)
def test_the_process_ends_whatever_code_has_left(left: str) -> None:
    lines = (
        "import atexit, multiprocessing, os, sys, threading, time",
        "from concurrent.futures import ThreadPoolExecutor",
        "from turnwise.utils import threads",
        "threads.END_SECONDS = 0.5",
        ENDINGS[left],
        "atexit.register(os.write, 1, b'at exit')",
        "threads.end_process(3)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 3
    if left in ("an idle pool", "closed streams"):
        assert ended.stdout == "at exit" and not ended.stderr
    else:
        named = "process ForkProcess-1 (terminated)" if left == "a process" else "mine"
        assert ended.stderr.startswith(f"turnwise: ended, and left behind what still runs: {named}")
        assert len(ended.stderr.splitlines()) == 1


# ---- what is left open -----------------------------------------------------------------------------------------------
class Opened:
    """What an episode holds; copies of forks are further ones."""

    opened, closed = 0, 0

    def __init__(self) -> None:
        type(self).opened += 1
        self.is_open = True

    def __deepcopy__(self, memo: Any) -> Opened:
        return Opened()

    def close(self) -> None:
        assert self.is_open
        self.is_open = False
        type(self).closed += 1


class Holding(MultiTurnEpisode):
    episode_type, actors, max_turns, rubric = "holding", ("solver",), 3, Rubric([lambda: 1.0])

    def __init__(self, ends: str = "done", **options: Any) -> None:
        super().__init__(**options)
        self.ends = ends

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data["held"] = Opened()
        if self.ends == "setup":
            raise ValueError("no setup")

    def get_prompt(self, artifact: Any) -> str:
        return "go"

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> Any:
        assert state.data["held"].is_open
        if self.ends == "error" and state.turn == 1:
            raise ValueError("no response")
        return asyncio.sleep(60) if self.ends == "deadline" and state.turn == 1 else None

    def step_reward(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        return 1.0

    def close(self, state: EpisodeState) -> None:
        state.data["held"].close()


@pytest.mark.parametrize("tree", [None, {}, {"beam_width": 2}, {"select": "none"}, {"playouts": 2}], ids=json.dumps)
@pytest.mark.parametrize("ends", ["done", "setup", "error", "deadline", "retried"])
def test_what_an_episode_opened_is_closed(tree: Any, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Opened.opened = Opened.closed = 0
    sampler = None if tree is None else TreeSampler(3, **tree)
    arena = arena_of(Holding("error" if ends == "retried" else ends, sampler=sampler))
    arena.retries = int(ends == "retried")
    timeout = 0.2 if ends == "deadline" else None
    run_to_end(arena.generate_rollouts([EpisodeRequest("holding", 1, timeout=timeout)]))
    assert Opened.opened == Opened.closed > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tree", [False, True])
def test_a_close_that_hangs_is_left(tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "CLOSE_SECONDS", 0.1)
    hooks = {"sampler": TreeSampler(2), "step_reward": lambda artifact: 1.0} if tree else {}
    [result] = play(arena_of(game(close=lambda state: asyncio.sleep(60), **hooks)), 1)
    assert result.rollout.error is None
    assert result.rollout.facts.mishaps == {"close_errors/game": 3 if tree else 1}


def test_a_cancellation_lets_what_closes_end() -> None:
    closed: list[Any] = []

    async def close(state: Any) -> None:
        await asyncio.sleep(0.2)
        closed.append(state)

    async def main() -> None:
        playing = asyncio.create_task(arena_of(game(close=close)).generate_rollouts([EpisodeRequest("game", 0)] * 3))
        await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run_to_end(main())
    assert len(closed) == 3


def test_an_error_of_close_harms_nothing() -> None:
    def broken(state: Any) -> None:
        raise ValueError("already gone")

    with pytest.warns(RuntimeWarning, match="close_errors/game: ValueError: already gone"):
        [result] = play(arena_of(game(close=broken)), 1)
    assert result.rollout.error is None and result.rollout.facts.mishaps == {"close_errors/game": 1}
    with pytest.raises(UserCodeError, match="callback 'plot' raised SystemExit"), exits_as_errors("callback 'plot'"):
        leave()
