from __future__ import annotations

import threading

from turnwise.inference.fair_lock import FairLock


def test_one_at_a_time_and_the_waiter_first() -> None:
    lock, order = FairLock(), []
    holding, go = threading.Event(), threading.Event()

    def hold_twice() -> None:
        with lock:
            holding.set()
            go.wait()
        with lock:
            order.append("again")

    def wait() -> None:
        with lock:
            order.append("waiter")

    holder, waiter = threading.Thread(target=hold_twice), threading.Thread(target=wait)
    holder.start()
    holding.wait()
    waiter.start()
    while not lock._gate.locked():
        pass
    assert lock.locked() and not order
    go.set()
    for thread in (holder, waiter):
        thread.join()
    assert order == ["waiter", "again"] and not lock.locked()
