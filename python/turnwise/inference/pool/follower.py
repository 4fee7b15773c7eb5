"""Keeps the engines of a pool those of a list, such as the members of a run."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Mapping

from turnwise.inference.pool.client import PoolClient
from turnwise.types import InferenceClient


class Follower:
    """Lets engines join and leave ``pool`` to match a list, until the pool is closed.

    - ``read``: returns the list's epoch, which grows with every change, and the addresses of the engines by name.
    - ``connect``: makes the client of the engine at an address.
    - ``addresses``: those of the engines that the pool has.
    - ``every``: seconds between two looks at the list.

    An engine that is no longer listed, or whose address has changed, leaves at once: its answers no longer count,
    including those under way. An engine at a new address joins. Lists of an earlier epoch are ignored, as a shared
    folder may show them again. If reading or connecting fails, the pool stays as it is until the next look; each new
    error is a warning.

    Example: ``Follower(pool, lambda: (4, {"engine-0": "http://10.0.0.2:8000"}), connect, {})``
    """

    def __init__(
        self,
        pool: PoolClient,
        read: Callable[[], tuple[int, Mapping[str, str]]],
        connect: Callable[[str], InferenceClient],
        addresses: Mapping[str, str],
        every: float = 0.5,
    ) -> None:
        self._pool, self._read, self._connect, self._every = pool, read, connect, every
        self._addresses, self._epoch = dict(addresses), -1
        self._thread = threading.Thread(target=self._run, name="turnwise-follower", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        warned = ""
        while not self._pool.closed:
            try:
                self._look()
            except Exception as error:
                if not self._pool.closed and str(error) != warned:
                    warned = str(error)
                    warnings.warn(f"the pool's engines stay as they are: {error!r}", stacklevel=2)
            time.sleep(self._every)

    def _look(self) -> None:
        epoch, listed = self._read()
        if epoch <= self._epoch:
            return
        for name, address in list(self._addresses.items()):
            if listed.get(name) != address:
                del self._addresses[name]
                asyncio.run(self._pool.leave(name, at_once=True))
        for name, address in listed.items():
            if name not in self._addresses:
                self._pool.join(name, self._connect(address))
                self._addresses[name] = address
        self._epoch = epoch
