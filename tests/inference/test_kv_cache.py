"""Which decoder serves which model, and how siblings are seated; what they compute is in ``test_decode.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from turnwise import _C
from turnwise.inference.local.kv_cache import SHARED_PREFIX_MODELS, Repeated, SharedPrefix, make_decoder
from turnwise.inference.local.paths import Paths

from .helpers import build


def prefilled(model: Any, prompts: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(3 * prompts).view(prompts, 3), past_key_values=cache, use_cache=True)
    return cache


def test_models_that_were_tried_share_their_prefix(family: str) -> None:
    model = build(family)
    decoder = make_decoder(model, prefilled(model, 2), None, torch.tensor([0, 0, 1]))
    assert type(decoder) is (Paths if family in SHARED_PREFIX_MODELS else Repeated)


@pytest.mark.parametrize(
    ("index", "groups", "width"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, 4),
        ([0, 1, 0, 1, 0, 1], 2, 3),
        ([0, 1, 1, 1, 1, 1, 1, 1], 3, 4),  # one prompt has most of the rows: its group is split, not padded to
        ([0], 1, 1),
    ],
)
def test_seats(index: list[int], groups: int, width: int) -> None:
    model = build()
    decoder = SharedPrefix(model, prefilled(model, max(index) + 1), None, torch.tensor(index))
    assert decoder.size == groups == len(set(decoder.nodes.tolist())), "a node per group at first"
    decoder.keep(decoder.nodes.sort().values)  # a node per row
    assert tuple(decoder._table.shape) == (groups, width)
    assert decoder._table.view(-1)[decoder._place].tolist() == list(range(len(index)))
    assert len(decoder._keys[0]) == groups


def test_groups_without_rows_are_dropped() -> None:
    model = build()
    decoder = SharedPrefix(model, prefilled(model, 4), None, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    third = decoder._keys[0][2]
    decoder.keep(decoder.nodes)
    decoder.keep(torch.tensor([0, 4, 5]))
    assert len(decoder._keys[0]) == 2
    assert torch.equal(decoder._keys[0][1], third)
    assert decoder._group_of.tolist() == [0, 1, 1]


def test_paths_of_unequal_rows_are_packed() -> None:
    """-1 leaves them once they have twice the columns that the longest row needs; the places keep their order."""
    decoder = Paths(build(), prefilled(build(), 2), None, torch.tensor([0, 1]))
    path = torch.full((2, 100), -1)
    path[0, 1::2], path[1, ::10] = torch.arange(50), torch.arange(50, 60)
    packed = decoder._packed(path)
    assert packed.shape == (2, 50)
    assert packed[0].tolist() == list(range(50)) and packed[1].tolist() == [*range(50, 60), *[-1] * 40]
    assert decoder._packed(torch.full((2, 163), -1)).shape == (2, 163)


def attended(query, key, value, begin, end, path, kv_heads):
    """What each row's heads should read, in float64."""
    rows, heads, size = query.shape
    out = torch.empty(rows, heads, size, dtype=torch.float64)
    for row in range(rows):
        places = [*range(int(begin[row]), int(end[row])), *(place for place in path[row].tolist() if place >= 0)]
        for head in range(heads):
            own = slice(head // (heads // kv_heads) * size, (head // (heads // kv_heads) + 1) * size)
            scores = key[places][:, own].double() @ query[row, head].double() * size**-0.5
            out[row, head] = torch.softmax(scores, dim=0) @ value[places][:, own].double()
    return out


EXACT = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
"""Largest difference from float64; those of 16 bits are half the distance of two numbers at 4."""


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("size", [3, 4, 8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_the_kernel_equals_a_plain_softmax(size: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    seed = torch.seed()
    told = f"seed {seed}"
    query = 3 * torch.randn(40, heads, size, dtype=dtype)
    key, value = (torch.randn(90, kv_heads * size, dtype=dtype) for _ in range(2))
    begin = torch.randint(0, 40, (40,))
    end = begin + torch.randint(0, 50, (40,))
    path = torch.randint(-1, 90, (40, 5))  # -1 is no place
    path[:, 2] = torch.arange(40)
    results = []
    for threads in (1, 3):
        out = torch.full((40, heads * size), float("nan"), dtype=dtype)
        _C.path_attention(query.flatten(1), key, value, begin, end, path, heads, kv_heads, size**-0.5, out, threads)
        results.append(out.view(40, heads, size))
    assert torch.equal(*results), told
    expected = attended(query, key, value, begin, end, path, kv_heads)
    torch.testing.assert_close(
        results[0].double(), expected, atol=EXACT[dtype], rtol=0, msg=lambda text: f"{told}: {text}"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"begin": torch.tensor([-1, 0])}, "begin, end: expected places of key"),
        ({"end": torch.tensor([2, 7])}, "begin, end: expected places of key"),
        ({"path": torch.tensor([[0], [6]])}, "path: expected places of key"),
        ({"path": torch.tensor([[0], [-2]])}, "path: expected places of key, or -1"),
        ({"end": torch.zeros(2, dtype=torch.int64), "path": torch.full((2, 3), -1)}, "at least one"),
        ({"path": torch.zeros((3, 1), dtype=torch.int64)}, r"path.*expected \[R, S\]"),
        ({"end": torch.zeros(2, dtype=torch.int64), "path": torch.zeros((2, 0), dtype=torch.int64)}, "at least one"),
        ({"key": torch.zeros(6, 5)}, r"key.*expected \[6, 4\]"),
        ({"value": torch.zeros(6, 4, dtype=torch.float64)}, "value.dtype=float64: expected float32"),
        ({"heads": 3}, "heads, kv_heads: expected a divisor"),
    ],
)
def test_the_kernel_reads_no_other_memory(changed: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "query": torch.zeros(2, 8),
        "key": torch.zeros(6, 4),
        "value": torch.zeros(6, 4),
        "begin": torch.tensor([0, 0]),
        "end": torch.tensor([2, 6]),
        "path": torch.tensor([[0], [5]]),
        "heads": 2,
        "kv_heads": 1,
        "scale": 1.0,
        "out": torch.zeros(2, 8),
        "threads": 1,
    }
    _C.path_attention(**call)
    with pytest.raises(ValueError, match=message):
        _C.path_attention(**call | changed)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set(isa: str) -> None:
    """The kernels for lesser processors, in a process of their own."""
    others = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("draw_tokens", "norms")]
    chosen = ["-p", "no:cacheprovider", __file__, *others, "-k", "test_the_kernel or test_draw_tokens"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", *chosen],
        env={**os.environ, "TURNWISE_ISA": isa},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
