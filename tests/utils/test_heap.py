from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from turnwise.utils import memory
from turnwise.utils.memory import frozen_heap


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests of each file begin with a frozen heap: see ``conftest.py``."""
    monkeypatch.setattr(memory, "_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_others_froze_stays_frozen():
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0


def test_what_exists_is_not_searched_and_what_is_made_is_collected():
    class Node:
        pass

    before = gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 1_000
        with frozen_heap():  # a run inside another one
            assert len(gc.get_objects()) < 1_000
        assert gc.get_freeze_count() > 10_000, "the inner block does not thaw what the outer one froze"
        first, second = Node(), Node()
        first.other, second.other = second, first
        del first, second
        assert gc.collect() > 0
    assert gc.get_freeze_count() == before == 0


def test_it_thaws_after_an_error():
    with pytest.raises(KeyError), frozen_heap():
        raise KeyError
    assert gc.get_freeze_count() == 0
