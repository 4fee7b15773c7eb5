"""The client of a vLLM server against one that misbehaves, and against vLLM's own."""

from __future__ import annotations

import asyncio
import copy
import math
from typing import Any

import aiohttp
import pytest
import torch

from turnwise.chat import ChatFormat
from turnwise.chat.grammar import json_grammar
from turnwise.inference import PoolClient, VLLMServerClient
from turnwise.inference.common.http import Endpoint, EndpointError
from turnwise.inference.scripted import ByteTokenizer
from turnwise.inference.server.answers import kept_logprobs, read_completion
from turnwise.inference.server.launch import LOAD
from turnwise.inference.server.remote import sampling_error
from turnwise.inference.server.server import ModelServer
from turnwise.tasks.tiny import build_tokenizer
from turnwise.types import ContextLengthError, DeadEndError, ModelError, ModelRequest, ModelResponse, Sampling

from .fake_server import Act, FakeServer, Hang, Say, Script, faking
from .helpers import EXACT, build, error_of, requests_of, sent

pytestmark = pytest.mark.xdist_group("vllm_servers")
GENERATE = "/inference/v1/generate"


def client_of(server: FakeServer | ModelServer | str, policies: Any = None, **settings: Any) -> VLLMServerClient:
    url = server if isinstance(server, str) else server.url
    kept = {name: settings.pop(name) for name in ("in_flight", "folder", "transfer", "grammars") if name in settings}
    endpoint = Endpoint(url, **{"timeout": 5.0, **settings})
    return VLLMServerClient(endpoint, ByteTokenizer(), policies, **kept)


def pool_of(server: FakeServer | ModelServer, policies: Any = None, **settings: Any) -> PoolClient:
    """A pool of one."""
    return PoolClient({"one": client_of(server, policies, **settings)}, keeps_weights=False)


# -- a server that misbehaves ------------------------------------------------------------------------------------------
def answer(tokens: list[int] | None = None, label: str = "default", **changes: Any) -> dict[str, Any]:
    ids = [7, 8, 9] if tokens is None else tokens
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in ids]},
        "finish_reason": "length",
        "weight_versions": [{"start": 0, "end": len(ids), "version": label}],
        **changes,
    }
    return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


KEPT = [{"token_id": 7, "logprob": math.log(0.25)}, {"token_id": 9, "logprob": math.log(0.75)}]
OUTSIDE = {"token_id": 4, "logprob": -9999.0}
TOP = Sampling(top_p=0.9, top_k=2)


def choice_with(top: list[Any], **changes: Any) -> dict[str, Any]:
    content = [{"token_id": 7, "logprob": math.log(0.25), "top_logprobs": top}]
    return answer([7], **{"logprobs": {"content": content}, **changes})


def test_kept_tokens_are_read_and_must_be_whole() -> None:
    """Those with a log-prob, which add up to 1; a list of its own comes first; without top-k nothing names them."""
    assert kept_logprobs(TOP) == 14 and kept_logprobs(Sampling(top_p=0.9)) == kept_logprobs(Sampling()) == 0
    read = lambda content, sampling=TOP: read_completion(content, "it", 1, 10, sampling).sampling_mask  # noqa: E731
    assert read(choice_with([*KEPT, OUTSIDE])).lists() == [[7, 9]]
    assert read(choice_with(KEPT), Sampling(top_p=0.9)) is read(choice_with(KEPT), Sampling()) is None
    assert read(choice_with([], sampling_mask=[[3, 7]]), Sampling(top_p=0.9)).lists() == [[3, 7]]
    for content, said in {
        "25.0% are not all": (choice_with(KEPT[:1]), "1 tokens with 0.2500 of the probability"),
        "none": (choice_with([]), "0 tokens with 0.0000 of the probability"),
        "another token": (choice_with([], sampling_mask=[[3]]), "the sampled token 7 among them"),
        "too many": (choice_with([], sampling_mask=[[7], [7]]), "one for each of 1 tokens"),
        "outside the vocabulary": (choice_with([], sampling_mask=[[7, 10]]), "from 0 to 9"),
    }.values():
        with pytest.raises(EndpointError, match=said):
            read(content)


class Pretend:
    """A script for :class:`FakeServer`: a vLLM server whose label and weights a test can take away.

    ``handles`` are the reloads that it was asked for, ``failing`` how many of the next ones fail.
    """

    def __init__(self, model: dict[str, Any] | None = None) -> None:
        self.label, self.handles, self.failing, self.events = "default", [], 0, []  # type: ignore[var-annotated]
        self.model, self.dtype = model or {}, "float32"
        self.script: Script = {
            "/health": Say({}),
            "/v1/models": Say({"data": [{"id": "tiny", "max_model_len": 64}]}),
            "/weight_info": lambda body: Say({"weight_version": self.label}),
            "/update_weight_version": self.set_label,
            "/collective_rpc": self.call,
            "/pause": self.note("pause"),
            "/resume": self.note("resume"),
            "/reset_prefix_cache": self.note("reset", {"success": True}),
            GENERATE: lambda body: Say(answer(label=self.label)),
        }

    def note(self, event: str, said: Any = None) -> Any:
        def act(body: dict[str, Any]) -> Act:
            self.events.append(event)
            return Say(said or {})

        return act

    def set_label(self, body: dict[str, Any]) -> Act:
        self.label = body["new_version"]
        self.events.append("incomplete" if "incomplete" in self.label else "label")
        return Say({"success": True})

    def call(self, body: dict[str, Any]) -> Act:
        if body["method"] == "turnwise_describe":
            return Say({"results": [{"vocabulary": 300, "dtype": self.dtype, "model": self.model, "adapters": []}]})
        self.events.append("reload")
        if self.failing:
            self.failing -= 1
            return Say({"error": {"message": "the handle is gone"}}, 500)
        self.handles += body["args"]
        return Say({"results": [None]})


NOT_A_SERVER: dict[str, Script] = {
    "an infinite context": {"/v1/models": Say('{"data": [{"id": "tiny", "max_model_len": Infinity}]}')},
    "models of text": {"/v1/models": Say({"data": "tiny"})},
    **{
        f"workers that say {str(said)[:30]}": {"/collective_rpc": Say(said)}
        for said in ({"results": "ab"}, {"results": [5]}, {"results": {"a": 1}}, {"results": [{"vocabulary": "x"}]})
    },
    "a model that is a list": {"/collective_rpc": Say({"results": [{"vocabulary": 9, "dtype": None, "model": 5}]})},
}


@pytest.mark.parametrize("wrong", NOT_A_SERVER.values(), ids=NOT_A_SERVER)
async def test_a_server_that_describes_itself_wrongly_is_an_error(wrong: Script) -> None:
    model = build("served")
    with faking(Pretend().script | wrong) as server:
        async with client_of(server, model) as client:
            with pytest.raises(ModelError, match=server.url):
                client.load_weights("default", model.state_dict().items(), 1)


async def test_absurd_numbers_of_a_server_do_not_count() -> None:
    said = answer()
    said["usage"]["prompt_tokens_details"]["cached_tokens"] = 10**400
    loads = [Say({"running": 10**400, "waiting": 0, "kv_cache_use": 0, "preemptions": 0}), Say(["running"]), Say(5)]
    with faking(Pretend().script | {GENERATE: Say(said), LOAD: list(loads)}) as server:
        async with client_of(server) as client:
            await ask(client)
            assert client.stats()["cached_tokens"] == 0
            assert [client.peaks() for _ in loads] == [{}] * 3


async def ask(client: Any, **sampling: Any) -> ModelResponse:
    [response] = await client.generate([ModelRequest([1, 2, 3], Sampling(**{"max_tokens": 3, **sampling}))])
    return response


async def test_what_is_asked_and_what_is_made_of_the_answer() -> None:
    with faking(Pretend().script) as server:
        async with client_of(server) as client:
            response = await ask(client, temperature=0.7, seed=-1, stop_token_ids=(9,))
            assert client.stats()["cached_tokens"] == 2
        body = next(body for path, body in server.asked if path == GENERATE)
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"]["stop_token_ids"] == [256, 9]
    wanted = {"temperature": 0.7, "max_tokens": 3, "seed": 2**63 - 1, "logprobs": 0}
    assert body["sampling_params"].items() >= wanted.items()
    assert "structured_outputs" not in body["sampling_params"]
    assert response == ModelResponse("\x07\x08\t", [7, 8, 9], [-0.5] * 3, "length", [(3, 0)], [1, 2, 3])


async def test_a_grammar_is_sent_to_a_server_that_was_started_for_it() -> None:
    """A dead end is an error that no other engine is asked about: vLLM then samples the end of the sequence."""
    words: Any = build_tokenizer(["abc"], vocab_size=300)
    keys = {"properties": {"n": {"const": 5}}, "patternProperties": {"^n$": {}}, "required": ["n"]}
    grammar = json_grammar(ChatFormat(words), {"type": "object", "additionalProperties": False, **keys})
    whole, dead = ([*words.encode(text), words.eos_token_id] for text in ('{"n": 5}', '{"n": 5, '))
    said = [answer(ids, finish_reason="stop") for ids in (whole, dead)]
    with faking({**Pretend().script, GENERATE: [Say(each) for each in said]}) as server:
        client = VLLMServerClient(Endpoint(server.url, timeout=5.0), words, grammars=True)
        async with PoolClient({"one": client}, keeps_weights=False) as pool:
            assert pool.capabilities.grammars
            assert (await ask(pool, grammar=grammar, max_tokens=40)).completion_token_ids == whole
            with pytest.raises(DeadEndError, match="allows no token behind"):
                await ask(pool, grammar=grammar, max_tokens=40)
            assert server.count(GENERATE) == 2
        async with client_of(server) as plain:
            assert not plain.capabilities.grammars
        body = next(body for path, body in server.asked if path == GENERATE)
    assert body["sampling_params"]["structured_outputs"] == {"grammar": grammar.text}


WRONG = {
    "no object": [1, 2],
    "no choices": {"choice": []},
    "two choices": {"choices": answer()["choices"] * 2},
    "choice of text": {"choices": ["text"]},
    "no tokens": answer([]),
    "more tokens than asked": answer([1, 2, 3, 4]),
    "token_ids missing": answer(token_ids=None),
    "token outside of the vocabulary": answer([7, 300, 9]),
    "negative token": answer([7, -1, 9]),
    "token that is no number": answer([7, "8", 9]),
    "token that is a switch": answer([7, True, 9]),
    "no logprobs": answer(logprobs=None),
    "logprobs of text": answer(logprobs={"content": "none"}),
    "a logprob too few": answer(logprobs={"content": answer([7, 8])["choices"][0]["logprobs"]["content"]}),
    "logprobs of other tokens": answer(logprobs=answer([7, 9, 8])["choices"][0]["logprobs"]),
    "aborted": answer(finish_reason="abort"),
    "no finish reason": answer(finish_reason=None),
    "a list of finish reasons": answer(finish_reason=["stop"]),
    "no labels": answer(weight_versions=None),
    "labels of fewer tokens": answer(weight_versions=[{"start": 0, "end": 2, "version": "default"}]),
    "labels of more tokens": answer(weight_versions=[{"start": 0, "end": 4, "version": "default"}]),
    "labels with a hole": answer(
        weight_versions=[{"start": 0, "end": 1, "version": "a"}, {"start": 2, "end": 3, "version": "a"}]
    ),
}
for name, value in {
    "NaN": math.nan, "infinite": -math.inf, "vLLM's stand-in for NaN": -9999.0, "positive": 0.5, "text": "-0.5",
    "missing": None, "beyond all floats": -(10**400),
}.items():  # fmt: skip
    content = copy.deepcopy(answer()["choices"][0]["logprobs"]["content"])
    content[1]["logprob"] = value
    WRONG[f"logprob {name}"] = answer(logprobs={"content": content})


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_a_malformed_answer_is_an_error_and_never_a_row(wrong: Any) -> None:
    pretend = Pretend()
    with faking(pretend.script | {GENERATE: Say(wrong)}) as server:
        async with client_of(server) as client:
            with pytest.raises(ModelError, match=rf"{server.url}{GENERATE} answered .*expected"):
                await ask(client)
            assert client.stats()["requests"] == 0
        assert server.count(GENERATE) == 1


async def test_a_prompt_that_the_server_finds_too_long() -> None:
    said = "This model's maximum context length is 8 tokens. However, your prompt contains 9 input tokens"
    with faking(Pretend().script | {GENERATE: Say({"error": {"message": said}}, 400)}) as server:
        async with client_of(server) as client:
            with pytest.raises(ContextLengthError, match="9 input tokens"):
                await ask(client)
            with pytest.raises(ContextLengthError, match="64-token context"):
                await client.generate([ModelRequest([1] * 64)])
            with pytest.raises(ValueError, match=r"expected 0\.\.299"):
                await client.generate([ModelRequest([300])])
        assert server.count(GENERATE) == 1


@pytest.mark.parametrize(
    ("trouble", "said", "retryable"),
    [(Hang(), "timeout=0.5", False), (Say({"detail": "bad"}, 422), "bad", False), (Say("", 503), "503", True)],
    ids=["hangs", "refuses", "is busy"],
)
async def test_one_failure_fails_its_call_alone(trouble: Act, said: str, retryable: bool) -> None:
    script = Pretend().script | {GENERATE: lambda body: trouble if body["token_ids"] == [4] else Say(answer())}
    with faking(script) as server:
        async with client_of(server, timeout=0.5) as client:
            calls = [client.generate([ModelRequest([n], Sampling(max_tokens=3))]) for n in (3, 4, 5)]
            results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, EndpointError) for result in results] == [False, True, False]
    assert said in str(results[1]) and results[1].retryable == retryable  # type: ignore[union-attr]


async def test_a_server_without_the_endpoints_is_told_how_to_get_them() -> None:
    models = {"/v1/models": Say({"data": [{"id": "tiny", "max_model_len": 64}]})}
    other = {"/v1/models": Say({"data": [{"id": "gpt"}]})}
    for script, policies, said in (
        (models, None, "turnwise serve"),
        (models, build("served"), "turnwise serve"),
        (other, None, "max_model_len"),
    ):
        with faking(script) as server:
            async with client_of(server, policies) as client:
                with pytest.raises(ModelError, match=said):
                    await ask(client)


async def test_close_fails_what_runs() -> None:
    with faking(Pretend().script | {GENERATE: Hang()}) as server:
        client = client_of(server)
        running = asyncio.ensure_future(ask(client))
        while not server.count(GENERATE):
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(ModelError, match="closed before"):
            await running


# -- weights, and a server that loses them -----------------------------------------------------------------------------
async def test_weights_go_first_and_nothing_is_computed_meanwhile() -> None:
    pretend, model = Pretend({"vocab_size": 300}), build("served")
    with faking(pretend.script) as server:
        async with client_of(server, model) as client:
            assert (await ask(client)).policy_versions == [(3, 0)]
            client.load_weights("default", model.state_dict().items(), 4)
            assert (await ask(client)).policy_versions == [(3, 4)]
            assert client.version("default") == 4 and client.stats()["sync_seconds"] > 0
    assert pretend.events == ["pause", "incomplete", "reload", "reset", "label", "resume"] * 2


async def test_a_server_that_restarted_gets_its_weights_again() -> None:
    pretend = Pretend()
    with faking(pretend.script) as server:
        async with pool_of(server, build("served")) as client:
            client.load_weights("default", build("served", seed=2).state_dict().items(), 5)
            pretend.label = "default"
            with pytest.warns(UserWarning, match="answered with weights that were not sent to it"):
                responses = await asyncio.gather(*(ask(client) for _ in range(8)))
            assert all(response.policy_versions == [(3, 5)] for response in responses)
            assert client.stats()["restarts"] == 1
            assert client.stats()["requests"] == 8
        assert len(pretend.handles) == 2
        assert pretend.handles[0] == pretend.handles[1]


async def test_a_token_of_weights_that_were_not_sent_is_never_handed_out() -> None:
    """The second span of the first answer is of start weights; the answer is asked for again, whole."""
    pretend = Pretend()

    def act(body: dict[str, Any]) -> Act:
        spans = [{"start": 0, "end": 2, "version": pretend.label}, {"start": 2, "end": 3, "version": "default"}]
        return Say(answer(weight_versions=spans)) if server.count(GENERATE) == 1 else Say(answer(label=pretend.label))

    with faking(pretend.script | {GENERATE: act}) as server:
        async with pool_of(server, build("served")) as client:
            with pytest.warns(UserWarning, match="not sent to it"):
                assert (await ask(client)).policy_versions == [(3, 0)]
        assert server.count(GENERATE) == 2
        assert pretend.events.count("reload") == 1, "the server has its weights"
    with faking(Pretend().script | {GENERATE: Say(answer(label="default"))}) as server:
        async with pool_of(server, build("served")) as client:
            with (
                pytest.warns(UserWarning, match="not sent to it"),
                pytest.raises(ModelError, match=r"failed 3 times: one: .*weights that were not sent to it"),
            ):
                await ask(client)


async def test_a_server_that_somebody_else_updates_is_refused() -> None:
    pretend = Pretend()
    with faking(pretend.script) as server:
        async with pool_of(server, build("served")) as client:
            await ask(client)
            pretend.label = "another-3"
            with (
                pytest.warns(UserWarning, match="not sent to it"),
                pytest.raises(ModelError, match=r"no engine is left: .*another client sent \(label 'another-3'\)"),
            ):
                await ask(client)
    assert pretend.events.count("reload") == 1


async def test_an_update_that_fails_stops_sampling_until_one_arrives() -> None:
    pretend, model = Pretend(), build("served")
    with faking(pretend.script) as server:
        async with client_of(server, model) as client:
            pretend.failing = 1
            with pytest.raises(ModelError, match="did not arrive whole"):
                await ask(client)
            assert (await ask(client)).policy_versions == [(3, 0)], "the first weights are sent again"
            pretend.failing, pretend.events = 1, []
            said = r"did not arrive whole.*the handle is gone.*send them again"
            with pytest.raises(EndpointError, match=said) as caught:
                client.load_weights("default", model.state_dict().items(), 1)
            assert caught.value.retryable, "a pool sends them again"
            assert pretend.events == ["pause", "incomplete", "reload", "resume"]
            assert "incomplete" in pretend.label, "a server that is resumed half updated must not pass for a whole one"
            asked = server.count(GENERATE)
            for call in (ask(client), client.recover()):
                with pytest.raises(ModelError, match="send them again"):
                    await call
            assert server.count(GENERATE) == asked
            assert client.version("default") == 0
            client.load_weights("default", model.state_dict().items(), 2)
            assert (await ask(client)).policy_versions == [(3, 2)]


async def test_what_the_engine_had_to_do() -> None:
    told = {"running": 3, "waiting": 1, "kv_cache_use": 0.5, "preemptions": 7}
    with faking(Pretend().script | {LOAD: [Say(told), Say("", 404)]}) as server:
        async with client_of(server) as client:
            assert client.peaks() == {"running": 3, "waiting": 1, "kv_cache_use": 0.5}
            assert client.stats()["preemptions"] == 7
            assert client.peaks() == {}


async def test_peaks_of_a_client_that_closes_meanwhile_are_none() -> None:
    """An engine may leave the pool while the trainer asks for its peaks: that must not end the run."""
    with faking({**Pretend().script, LOAD: Hang()}) as server:
        client = client_of(server)
        await ask(client)
        asking = asyncio.create_task(asyncio.to_thread(client.peaks))
        while not any(path == LOAD for path, _ in server.asked):
            await asyncio.sleep(0.01)
        await client.close()
        assert await asking == {}


async def test_weights_are_checked_before_anything_is_sent() -> None:
    pretend, model = Pretend(), build("served")
    with faking(pretend.script) as server:
        async with client_of(server, {"default": model, "other": None}) as client:
            weights = dict(model.state_dict())
            for problem, changed in {
                "missing": {k: v for k, v in weights.items() if "q_proj" not in k},
                "unknown": weights | {"extra": torch.zeros(1)},
                "shape": weights | {"model.norm.weight": torch.zeros(3)},
            }.items():
                with pytest.raises(ValueError, match=problem):
                    client.load_weights("default", changed.items(), 1)
            with pytest.raises(ValueError, match="'other' is what the server has"):
                client.load_weights("other", weights.items(), 1)
        assert server.asked == []
    with faking(Pretend({"hidden_size": 64}).script) as server:
        async with client_of(server, model) as client:
            with pytest.raises(ValueError, match=r"hidden_size=32, the model at .* has 64"):
                await ask(client)
    pretend.dtype = "bfloat16"
    with faking(pretend.script) as server:
        async with client_of(server, model) as client:
            with pytest.warns(UserWarning, match="computes in bfloat16, policy 'default' in float32"):
                await ask(client)
    with pytest.raises(ValueError, match="'a', 'b' have 2 bases"):
        client_of("http://127.0.0.1:9", {"a": model, "b": build("served", seed=1)})
    with pytest.raises(ValueError, match="policies is empty"):
        client_of("http://127.0.0.1:9", {})


# -- vLLM's own server -------------------------------------------------------------------------------------------------
def patient(server: ModelServer, policies: Any = None, **settings: Any) -> VLLMServerClient:
    return client_of(server, policies, **{"timeout": 300.0, **settings})


@pytest.mark.slow
async def test_weights_that_are_broadcast(vllm_servers: list[ModelServer]) -> None:
    async with patient(vllm_servers[0], build("served"), transfer="gloo") as client:
        for version in (1, 2):
            model = build("served", seed=version)
            client.load_weights("default", sent(model), version)
            assert error_of(model, await client.generate(requests_of())) < EXACT


@pytest.mark.slow
async def test_vllms_words_for_a_prompt_that_is_too_long(vllm_servers: list[ModelServer]) -> None:
    async with patient(vllm_servers[0]) as client:
        await client.generate(requests_of(1))
        body = {"model": None, "token_ids": [1] * 70, "sampling_params": {"max_tokens": 1}}
        with pytest.raises(EndpointError, match="64") as caught:
            client._endpoint.thread.submit(client._endpoint.ask("POST", GENERATE, body=body)).result()
        assert isinstance(sampling_error(caught.value, None), ContextLengthError)


@pytest.mark.slow
async def test_a_server_is_closed_to_others(vllm_servers: list[ModelServer]) -> None:
    """vLLM itself asks for the key at some paths alone; those by which weights come in are not among them."""
    own = server = vllm_servers[0]
    async with patient(server, api_key="another") as client:
        for path in ("/pause", "/collective_rpc", "/v1/models", GENERATE, "/metrics"):
            asked = client._endpoint.ask("POST", path, body={})
            with pytest.raises(ModelError, match="401: the server asks for a key"):
                client._endpoint.thread.submit(asked).result()
    assert own.key_file is not None and own.key_file.stat().st_mode & 0o777 == 0o600
    key = {"Authorization": f"Bearer {own._key}"}
    connector = aiohttp.TCPConnector(force_close=True)  # the server ends idle connections when it likes
    async with aiohttp.ClientSession(own.url, connector=connector) as session:

        async def status(method: str, path: str, body: Any = None, **headers: str) -> int:
            async with session.request(method, path, json=body, headers=headers) as answer:
                return answer.status

        assert await status("GET", "/health") == 200
        assert await status("GET", "/v1/models", **key, Host="rebound.example:8000") == 400
        assert await status("POST", "/sleep", **key) == 404
        for method, found in {"turnwise_describe": 200, "load_model": 403}.items():
            assert await status("POST", "/collective_rpc", {"method": method}, **key) == found
        for handle in ("nonsense", {"kind": []}, {"kind": "shared_memory", "mark": 1}):
            assert (
                await status("POST", "/collective_rpc", {"method": "turnwise_reload", "args": [handle]}, **key) == 500
            )
        assert await status("GET", "/health") == 200
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/realtime", headers=key)
        assert refused.value.status == 403
    model = build("served", seed=4)
    async with patient(server, model) as client:
        assert error_of(model, await client.generate(requests_of())) < EXACT
