"""A lock that a busy holder can't keep from others by taking it again at once."""

from __future__ import annotations

import threading


class FairLock:
    """``with lock:`` as ``threading.Lock``, but who waits comes before who has just had it.

    A waiter stands at the gate until it has the lock, so the last holder finds the gate closed.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._gate:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()
