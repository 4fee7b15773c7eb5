"""The gateway bench stops if a gateway recorded wrong tokens or missed a call, and names peers that are missing."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]


def test_wrong_and_missing_records_stop_the_bench(load: Load) -> None:
    bench = load("bench_gateway")
    right = [[*prompt, *bench.ANSWER_IDS] for prompt in bench.prompts(2)]
    bench.verify("turnwise", bench.Played(0.0, [1.0] * 4, [right, right]), 2, 2)
    bench.verify("verifiers eval", bench.Played(0.0, [1.0] * 2, [[[], []]]), 1, 2)
    changed = [right[0], [*right[1][:-1], right[1][-1] + 1]]
    for streams, waits in (([changed], 2), ([right[:1]], 2), ([], 2), ([right], 1)):
        with pytest.raises(AssertionError, match="rllm memory"):
            bench.verify("rllm memory", bench.Played(0.0, [1.0] * waits, streams), 1, 2)
    with pytest.raises(AssertionError, match="verifiers train"):
        bench.verify("verifiers train", bench.Played(0.0, [1.0] * 2, [[[], []]]), 1, 2)


def test_missing_peer_is_named_with_its_installation(load: Load) -> None:
    peers = load("gateway_peers")
    absent = peers.Peer("no_such_gateway.server", "no-such-gateway", "pip install no-such-gateway", "", True)
    assert peers.missing(absent) == "pip install no-such-gateway"
    assert peers.version("no-such-gateway") is None
    assert peers.missing(absent._replace(needs="asyncio.events")) is None
