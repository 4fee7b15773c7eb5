from __future__ import annotations

import gc
import resource
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from turnwise.utils import memory
from turnwise.utils.memory import frozen_heap, kept_memory


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


def fewest_page_faults() -> int:
    """Of a block of 64 MiB, in pages of 4 KiB, once such blocks were freed before."""
    counts = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(16 << 20)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)


@pytest.mark.skipif(memory._glibc() is None, reason="the C library has no mallopt")
def test_freed_memory_is_kept_for_models_on_a_cpu() -> None:
    with pytest.raises(KeyError), kept_memory([nn.Linear(1, 1)]):
        with kept_memory([nn.Linear(1, 1, device="meta")]):  # of a run that resumes
            assert memory._keepers == 2 and fewest_page_faults() < 100
        assert memory._keepers == 1 and fewest_page_faults() < 100
        raise KeyError
    with kept_memory([]):
        assert memory._keepers == 0
