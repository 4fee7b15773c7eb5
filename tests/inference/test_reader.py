"""A client that samples from a server to which another client sends weights."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from turnwise.inference import PoolClient, VLLMServerClient, VLLMServerReader
from turnwise.inference.common.http import Endpoint
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server.reader import ServedWeights
from turnwise.types import ModelError, ModelRequest, Sampling

from .fake_server import faking
from .helpers import build, sent, versions_of
from .test_vllm_server import GENERATE, Pretend

ASKED = [ModelRequest([1, 2, 3], Sampling(max_tokens=3, seed=1))]


def reader_of(server: Any, writer: VLLMServerClient, **how: Any) -> VLLMServerReader:
    served = pickle.loads(pickle.dumps(ServedWeights.by(writer)))
    return VLLMServerReader(Endpoint(server.url), ByteTokenizer(), served, **how)


async def test_a_reader_knows_the_versions_that_it_was_told() -> None:
    model = build("served")
    with faking(Pretend().script) as server:
        async with VLLMServerClient(server.url, ByteTokenizer(), model) as writer:
            writer.load_weights("default", sent(model), 4)
            async with reader_of(server, writer) as reader:
                assert reader.version("default") == 4
                assert versions_of(await reader.generate(ASKED)) == {4}
                with pytest.raises(ValueError, match="'default' is what the server has"):
                    reader.load_weights("default", sent(model), 5)
                # The server has version 5 before the reader knows it: the answer waits for the news.
                writer.load_weights("default", sent(model), 5)
                waiting = asyncio.ensure_future(reader.generate(ASKED))
                await asyncio.sleep(0.2)
                assert not waiting.done()
                reader.follow(ServedWeights.by(writer))
                assert versions_of(await waiting) == {5} and reader.version("default") == 5
                with pytest.raises(ValueError, match=r"served\.names.*'other'"):
                    reader.follow(ServedWeights({"other": None}, {}))
        assert len([path for path, _ in server.asked if path == "/pause"]) == 2, "the reader sends no weights"


async def test_a_reader_that_nobody_tells_gives_up() -> None:
    pretend, model = Pretend(), build("served")
    with faking(pretend.script) as server:
        async with VLLMServerClient(server.url, ByteTokenizer(), model) as writer:
            writer.load_weights("default", sent(model), 1)
            async with reader_of(server, writer, wait=0.2) as reader:
                pretend.label = "default"  # the server was restarted, and has its first weights
                with pytest.raises(ModelError, match=r"label 'default', which .* did not learn within 0\.2 seconds"):
                    await reader.generate(ASKED)
                assert server.count(GENERATE) == 0
    with pytest.raises(ValueError, match="wait=-1"):
        VLLMServerReader("http://127.0.0.1:1", ByteTokenizer(), ServedWeights({"default": None}, {}), wait=-1)


async def test_only_the_last_two_labels_count() -> None:
    model = build("served")
    with faking(Pretend().script) as server:
        async with VLLMServerClient(server.url, ByteTokenizer(), model) as writer:
            for version in range(1, 5):
                writer.load_weights("default", sent(model), version)
            assert list(ServedWeights.by(writer).labels.values()) == [{"default": 3}, {"default": 4}]


async def test_a_pool_of_readers() -> None:
    pretend, model = [Pretend(), Pretend()], build("served")
    with faking(pretend[0].script) as one, faking(pretend[1].script) as two:
        servers = {"one": one, "two": two}
        writers = {name: VLLMServerClient(server.url, ByteTokenizer(), model) for name, server in servers.items()}
        async with PoolClient(writers) as publisher:
            publisher.load_weights("default", sent(model), 1)
            readers = {name: reader_of(servers[name], writer) for name, writer in writers.items()}
            async with PoolClient(readers) as pool:
                asked = [ModelRequest([n], Sampling(max_tokens=3)) for n in range(4)]
                assert versions_of(await pool.generate(asked)) == {1} and pool.version("default") == 1
                publisher.load_weights("default", sent(model), 2)
                for name, reader in readers.items():
                    reader.follow(ServedWeights.by(writers[name]))
                assert versions_of(await pool.generate(asked)) == {2}
                assert pool.serving() == ["one", "two"]
                assert min(server.count(GENERATE) for server in servers.values()) >= 4
