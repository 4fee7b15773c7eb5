"""A small OpenEnv server on a free port of the loopback, in a thread of the tests."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    tries: int
    truncated: bool = False


class Guessing(Environment):
    """Find a number from 1 to 9 within four tries; each says higher or lower. The right one earns 1, a wrong one -0.1.

    With seed 3 the number is 4.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.tries = random.Random(seed).randint(1, 9), 0
        return Hint(hint="guess", tries=0)

    def step(self, action, timeout_s=None, **more):
        self.tries += 1
        right = action.number == self.number
        hint = "right" if right else "higher" if action.number < self.number else "lower"
        return Hint(
            hint=hint,
            tries=self.tries,
            done=right or self.tries == 4,
            truncated=not right and self.tries == 4,
            reward=1.0 if right else -0.1,
        )

    @property
    def state(self):
        return State(step_count=self.tries)


class Unseeded(Guessing):
    """Ignores the seed of its reset, so no play repeats."""

    count = 0

    def reset(self, seed=None, episode_id=None, **more):
        Unseeded.count += 1
        return super().reset(seed=Unseeded.count)


@contextmanager
def serving(environment=Guessing, sessions=64):
    """Serve ``environment`` and yield its URL."""
    app = create_fastapi_app(environment, Guess, Hint, max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
