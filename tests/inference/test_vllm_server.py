"""The client of a vLLM server against one that misbehaves, and against vLLM's own."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import signal
from typing import Any

import aiohttp
import pytest
import torch

from turnwise.inference import VLLMServerClient
from turnwise.inference.adapters import SharedBase
from turnwise.inference.endpoint import Endpoint
from turnwise.inference.scripted import ByteTokenizer
from turnwise.serve import Server
from turnwise.types import ContextLengthError, ModelError, ModelRequest, ModelResponse, Sampling

from .fake_server import Act, FakeServer, Hang, Reset, Say, Script, faking

EXACT = 1e-5
PROMPT = [5, 6, 7, 8] * 10
GENERATE = "/inference/v1/generate"


def requests_of(count: int = 4, tokens: int = 8, policy: str = "default", **sampling: Any) -> list[ModelRequest]:
    return [
        ModelRequest(PROMPT[: 40 - 3 * i], Sampling(max_tokens=tokens, seed=i, **sampling), policy=policy)
        for i in range(count)
    ]


def error_of(helpers: Any, model: Any, responses: list[ModelResponse], temperature: float = 1.0) -> float:
    return max(
        float((helpers.teacher_forced(model, r, temperature) - torch.tensor(r.logprobs)).abs().max()) for r in responses
    )


def client_of(server: FakeServer | Server | str, policies: Any = None, **settings: Any) -> VLLMServerClient:
    url = server if isinstance(server, str) else server.url
    kept = {name: settings.pop(name) for name in ("in_flight", "folder", "transfer") if name in settings}
    endpoint = Endpoint(url, **{"retries": 3, "timeout": 5.0, **settings})
    return VLLMServerClient(endpoint, ByteTokenizer(), policies, **kept)


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


class Pretend:
    """A script for :class:`FakeServer`: a vLLM server whose label and weights a test can take away.

    ``parcels`` are the reloads that it was asked for, ``failing`` how many of the next ones fail.
    """

    def __init__(self, model: dict[str, Any] | None = None) -> None:
        self.label, self.parcels, self.failing, self.events = "default", [], 0, []  # type: ignore[var-annotated]
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
            return Say({"error": {"message": "the parcel is gone"}}, 500)
        self.parcels += body["args"]
        return Say({"results": [None]})


async def ask(client: VLLMServerClient, **sampling: Any) -> ModelResponse:
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
    assert (
        body["sampling_params"] | {"temperature": 0.7, "max_tokens": 3, "seed": 2**63 - 1, "logprobs": 0}
        == (body["sampling_params"])
    )
    assert response == ModelResponse("\x07\x08\t", [7, 8, 9], [-0.5] * 3, "length", [(3, 0)], [1, 2, 3])


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
    "no labels": answer(weight_versions=None),
    "labels of fewer tokens": answer(weight_versions=[{"start": 0, "end": 2, "version": "default"}]),
    "labels of more tokens": answer(weight_versions=[{"start": 0, "end": 4, "version": "default"}]),
    "labels with a hole": answer(
        weight_versions=[{"start": 0, "end": 1, "version": "a"}, {"start": 2, "end": 3, "version": "a"}]
    ),
}
for name, value in {
    "NaN": math.nan, "infinite": -math.inf, "vLLM's stand-in for NaN": -9999.0, "positive": 0.5, "text": "-0.5",
    "missing": None,
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


@pytest.mark.parametrize("trouble", [Reset(), Say({"error": {"message": "busy"}}, 429), Say("", 500), Say("", 503)])
async def test_trouble_that_passes_gives_one_response(trouble: Act) -> None:
    with faking(Pretend().script | {GENERATE: [trouble, Say(answer())]}) as server:
        async with client_of(server) as client:
            assert (await ask(client)).completion_token_ids == [7, 8, 9]
            assert client.stats()["requests"] == 1
            assert client.stats()["retries"] == 1
        assert server.count(GENERATE) == 2


async def test_one_failure_fails_its_call_alone() -> None:
    def act(body: dict[str, Any]) -> Act:
        return Say({"error": {"message": "bad"}}, 422) if body["token_ids"] == [4] else Say(answer())

    with faking(Pretend().script | {GENERATE: act}) as server:
        async with client_of(server) as client:
            calls = [client.generate([ModelRequest([n], Sampling(max_tokens=3))]) for n in (3, 4, 5)]
            results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, ModelError) for result in results] == [False, True, False]


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


async def test_a_server_that_hangs_is_told_and_others_go_on() -> None:
    def act(body: dict[str, Any]) -> Act:
        return Hang() if body["token_ids"] == [4] else Say(answer())

    with faking(Pretend().script | {GENERATE: act}) as server:
        async with client_of(server, timeout=0.5) as client:
            calls = [client.generate([ModelRequest([n], Sampling(max_tokens=3))]) for n in (3, 4, 5)]
            results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, ModelError) for result in results] == [False, True, False]
    assert "timeout=0.5" in str(results[1])


async def test_a_server_that_is_not_there() -> None:
    async with client_of("http://127.0.0.1:9", timeout=0.5) as client:
        with pytest.raises(ModelError, match=r"127.0.0.1:9.* can't be reached"):
            await ask(client)


async def test_a_server_without_the_endpoints_is_told_how_to_get_them(helpers: Any) -> None:
    models = {"/v1/models": Say({"data": [{"id": "tiny", "max_model_len": 64}]})}
    with faking(models) as server:
        async with client_of(server) as client:
            with pytest.raises(ModelError, match="turnwise serve"):
                await ask(client)
        async with client_of(server, helpers.build("served")) as client:
            with pytest.raises(ModelError, match="turnwise serve"):
                await ask(client)
    with faking({"/v1/models": Say({"data": [{"id": "gpt"}]})}) as server:
        async with client_of(server) as client:
            with pytest.raises(ModelError, match="max_model_len"):
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
async def test_weights_go_first_and_nothing_is_computed_meanwhile(helpers: Any) -> None:
    pretend, model = Pretend({"vocab_size": 300}), helpers.build("served")
    with faking(pretend.script) as server:
        async with client_of(server, model) as client:
            assert (await ask(client)).policy_versions == [(3, 0)]
            client.load_weights("default", model.state_dict().items(), 4)
            assert (await ask(client)).policy_versions == [(3, 4)]
            assert client.version("default") == 4
    assert pretend.events == ["pause", "incomplete", "reload", "reset", "label", "resume"] * 2


async def test_a_server_that_restarted_gets_its_weights_again(helpers: Any) -> None:
    pretend = Pretend()
    with faking(pretend.script) as server:
        async with client_of(server, helpers.build("served")) as client:
            client.load_weights("default", helpers.build("served", seed=2).state_dict().items(), 5)
            pretend.label = "default"
            responses = await asyncio.gather(*(ask(client) for _ in range(8)))
            assert all(response.policy_versions == [(3, 5)] for response in responses)
            assert client.stats()["restarts"] == 1
            assert client.stats()["requests"] == 8
        assert len(pretend.parcels) == 2
        assert pretend.parcels[0] == pretend.parcels[1]


async def test_a_token_of_weights_that_were_not_sent_is_never_handed_out(helpers: Any) -> None:
    """The second span of the first answer is of start weights; the answer is asked for again, whole."""
    pretend = Pretend()

    def act(body: dict[str, Any]) -> Act:
        spans = [{"start": 0, "end": 2, "version": pretend.label}, {"start": 2, "end": 3, "version": "default"}]
        return Say(answer(weight_versions=spans)) if server.count(GENERATE) == 1 else Say(answer(label=pretend.label))

    with faking(pretend.script | {GENERATE: act}) as server:
        async with client_of(server, helpers.build("served")) as client:
            assert (await ask(client)).policy_versions == [(3, 0)]
        assert server.count(GENERATE) == 2
    with faking(Pretend().script | {GENERATE: Say(answer(label="default"))}) as server:
        async with client_of(server, helpers.build("served")) as client:
            with pytest.raises(ModelError, match="again and again"):
                await ask(client)


async def test_a_server_that_somebody_else_updates_is_refused(helpers: Any) -> None:
    pretend = Pretend()
    with faking(pretend.script) as server:
        async with client_of(server, helpers.build("served")) as client:
            await ask(client)
            pretend.label = "another-3"
            with pytest.raises(ModelError, match=r"somebody else sent \(label 'another-3'\)"):
                await ask(client)


async def test_a_failed_update_is_sent_once_more(helpers: Any) -> None:
    pretend, model = Pretend(), helpers.build("served")
    with faking(pretend.script) as server:
        async with client_of(server, model) as client:
            await ask(client)
            pretend.failing, pretend.events = 1, []
            client.load_weights("default", model.state_dict().items(), 1)
            assert (await ask(client)).policy_versions == [(3, 1)]
        once = ["pause", "incomplete", "reload", "resume"]
        assert pretend.events == [*once, "pause", "incomplete", "reload", "reset", "label", "resume"]


async def test_an_update_that_fails_twice_stops_sampling_until_one_arrives(helpers: Any) -> None:
    pretend, model = Pretend(), helpers.build("served")
    with faking(pretend.script) as server:
        async with client_of(server, model) as client:
            await ask(client)
            pretend.failing = 2
            with pytest.raises(ModelError, match=r"did not arrive whole.*the parcel is gone.*send them again"):
                client.load_weights("default", model.state_dict().items(), 1)
            assert "incomplete" in pretend.label, "a server that is resumed half updated must not pass for a whole one"
            asked = server.count(GENERATE)
            with pytest.raises(ModelError, match="send them again"):
                await ask(client)
            assert server.count(GENERATE) == asked
            assert client.version("default") == 0
            client.load_weights("default", model.state_dict().items(), 2)
            assert (await ask(client)).policy_versions == [(3, 2)]


async def test_weights_are_checked_before_anything_is_sent(helpers: Any) -> None:
    pretend, model = Pretend(), helpers.build("served")
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
        client_of("http://127.0.0.1:9", {"a": model, "b": helpers.build("served", seed=1)})
    with pytest.raises(ValueError, match="policies is empty"):
        client_of("http://127.0.0.1:9", {})


# -- vLLM's own server -------------------------------------------------------------------------------------------------
def sent(model: Any) -> list[tuple[str, torch.Tensor]]:
    """As the trainer sends weights: tied ones once."""
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    return list(once.values())


def patient(server: Server, policies: Any = None, **settings: Any) -> VLLMServerClient:
    return client_of(server, policies, **{"timeout": 300.0, **settings})


async def test_exact_after_each_update(helpers: Any, vllm_servers: list[Server]) -> None:
    model = helpers.build("served")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    async with patient(vllm_servers[0], model) as client:
        for version in range(6):
            if version:
                model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                client.load_weights("default", sent(model), version)
            temperature = (1.0, 0.7)[version % 2]
            responses = await client.generate(requests_of(temperature=temperature))
            assert error_of(helpers, model, responses, temperature) < EXACT, f"after update {version}"
            assert all(response.policy_versions == [(8, version)] for response in responses)
        [again] = await client.generate(requests_of(1, temperature=temperature))
        assert again.completion_token_ids == responses[0].completion_token_ids
        assert client.stats()["cached_tokens"] >= 32, "siblings share the keys and values of their prompt"


@pytest.mark.parametrize("transfer", ["safetensors", "gloo"])
async def test_weights_by_ways_that_reach_other_hosts(
    helpers: Any, vllm_servers: list[Server], tmp_path: Any, transfer: str
) -> None:
    folder = tmp_path if transfer == "safetensors" else None
    async with patient(vllm_servers[0], helpers.build("served"), folder=folder, transfer=transfer) as client:
        for version in (1, 2):
            model = helpers.build("served", seed=version)
            client.load_weights("default", sent(model), version)
            assert error_of(helpers, model, await client.generate(requests_of())) < EXACT


class Traffic:
    """Streams of requests without a pause, of one to sixty tokens: whenever weights change, some are under way."""

    def __init__(self, client: VLLMServerClient, streams: int = 16) -> None:
        self.responses: list[list[ModelResponse]] = [[] for _ in range(streams)]
        self._client = client

    async def __aenter__(self) -> Traffic:
        self._running = [asyncio.ensure_future(self._stream(nth)) for nth in range(len(self.responses))]
        await self.go_on()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._running:
            stream.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _stream(self, nth: int) -> None:
        while True:
            seed = len(self.responses) * len(self.responses[nth]) + nth
            request = ModelRequest([seed % 7, 3, 9], Sampling(max_tokens=1 + 7 * seed % 60, seed=seed))
            self.responses[nth] += await self._client.generate([request])

    async def go_on(self) -> None:
        """Until each stream has had the answer to what it asked before."""
        counts = [len(responses) for responses in self.responses]
        while not all(len(now) > before for now, before in zip(self.responses, counts, strict=True)):
            for stream in self._running:
                if stream.done():
                    stream.result()
            await asyncio.sleep(0.005)

    def all(self) -> list[ModelResponse]:
        return [response for responses in self.responses for response in responses]


async def test_in_flight_each_token_is_that_of_its_own_weights(helpers: Any, vllm_servers: list[Server]) -> None:
    models = [helpers.build("served"), helpers.build("served", seed=1)]
    async with patient(vllm_servers[0], models[0], in_flight=True) as client, Traffic(client) as traffic:
        for version in range(1, 41):
            await asyncio.to_thread(client.load_weights, "default", sent(models[version % 2]), version)
            await traffic.go_on()
            split = [response for response in traffic.all() if len(response.policy_versions) > 1]
            if len(split) >= 5:
                break
    assert len(split) >= 5, f"{len(split)} responses were under way when the weights changed {version} times"
    for response in split[:20]:
        told = [helpers.teacher_forced(model, response, 1.0).tolist() for model in models]
        expected, start = [], 0
        for count, version in response.policy_versions:
            expected += told[version % 2][start : start + count]
            start += count
        assert response.logprobs == pytest.approx(expected, abs=EXACT)


async def test_without_in_flight_an_update_waits_for_what_runs(helpers: Any, vllm_servers: list[Server]) -> None:
    models = [helpers.build("served"), helpers.build("served", seed=1)]
    async with patient(vllm_servers[0], models[0]) as client, Traffic(client) as traffic:
        for version in range(1, 5):
            await asyncio.to_thread(client.load_weights, "default", sent(models[version % 2]), version)
            await traffic.go_on()
        await traffic.go_on()  # the answers before may all be to what was asked before the last update
        responses = traffic.all()
    assert {len(response.policy_versions) for response in responses} == {1}
    assert {version for response in responses for _, version in response.policy_versions} == set(range(5))
    for nth, model in enumerate(models):
        of_it = [response for response in responses if response.policy_versions[0][1] % 2 == nth]
        assert error_of(helpers, model, of_it[:20]) < EXACT


async def test_adapters_stay_exact(helpers: Any, vllm_servers: list[Server]) -> None:
    """Two adapters and their base in one batch, while one adapter and then the base change."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    shared = SharedBase(helpers.build("served"))
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    solver, critic = (shared.add_adapter(n, peft.LoraConfig(**config), i) for i, n in enumerate(("solver", "critic")))
    policies = {"solver": solver, "critic": critic, "base": shared.plain()}
    async with patient(vllm_servers[0], policies) as client:
        for version in range(4):
            for model in (solver, critic) if version == 0 else (solver,):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if version == 3:
                with torch.no_grad():
                    shared.model.model.norm.weight.add_(0.1)
                client.load_weights("base", shared.weights().items(), version)
            client.load_weights("solver", solver.state_dict().items(), version)
            client.load_weights("critic", critic.state_dict().items(), 0)
            responses = await client.generate([r for name in policies for r in requests_of(2, policy=name)])
            for number, (name, model) in enumerate(policies.items()):
                merged = helpers.build("served")
                merged.load_state_dict(shared.merged_weights(model) if model.key else shared.weights())
                mine = responses[2 * number : 2 * number + 2]
                assert error_of(helpers, merged, mine) < EXACT, f"{name} at version {version}"
            assert responses[0].policy_versions[0][1] == version
            assert responses[2].policy_versions[0][1] == 0


async def test_a_parcel_that_is_gone_stops_sampling_until_one_arrives(
    helpers: Any, vllm_servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = helpers.build("served")
    async with patient(vllm_servers[0], model) as client:
        parcel = client._parcel
        monkeypatch.setattr(client._transfer, "send", lambda weights: {**parcel, "sequence": 99})
        with pytest.raises(ModelError, match=r"did not arrive whole.*number 99.*send them again"):
            client.load_weights("default", sent(model), 1)
        with pytest.raises(ModelError, match="send them again"):
            await client.generate(requests_of())
        monkeypatch.undo()
        client.load_weights("default", sent(model), 2)
        assert error_of(helpers, model, await client.generate(requests_of())) < EXACT


async def test_vllms_words_for_a_prompt_that_is_too_long(vllm_servers: list[Server]) -> None:
    async with patient(vllm_servers[0]) as client:
        await client.generate(requests_of(1))
        body = {"model": None, "token_ids": [1] * 70, "sampling_params": {"max_tokens": 1}}
        with pytest.raises(ContextLengthError, match="64"):
            client._endpoint.thread.submit(client._remote.generate(body)).result()


async def test_a_server_is_closed_to_others(helpers: Any, vllm_servers: list[Server]) -> None:
    """vLLM itself asks for the key at some paths alone; those by which weights come in are not among them."""
    own, server = vllm_servers
    async with patient(server) as client:
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
        for path in ("/health", "/v1/models"):
            assert await status("GET", path, **key, Host="rebound.example:8000") == 400
        for route in ("POST /sleep", "GET /server_info", "POST /reset_mm_cache", "POST /update_weights", "GET /docs"):
            method, _, path = route.partition(" ")
            assert await status(method, path) == 401
            assert await status(method, path, **key) == 404
        assert await status("POST", "/collective_rpc", {"method": "turnwise_describe"}) == 401
        for method, found in {"turnwise_describe": 200, "load_model": 403, "execute_method": 403}.items():
            assert await status("POST", "/collective_rpc", {"method": method}, **key) == found
        for parcel in ("nonsense", {"kind": []}, {"kind": "shared_memory", "mark": 1}):
            assert (
                await status("POST", "/collective_rpc", {"method": "turnwise_reload", "args": [parcel]}, **key) == 500
            )
        assert await status("GET", "/health") == 200
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/realtime", headers=key)
        assert refused.value.status == 403
    model = helpers.build("served", seed=4)
    async with patient(server, model, api_key_env="TURNWISE_TEST_KEY") as client:
        assert error_of(helpers, model, await client.generate(requests_of())) < EXACT


async def test_two_trainers_can_not_share_a_server(helpers: Any, vllm_servers: list[Server]) -> None:
    async with patient(vllm_servers[0], helpers.build("served")) as first:
        await first.generate(requests_of(1))
        async with patient(vllm_servers[0], helpers.build("served", seed=1)) as second:
            await second.generate(requests_of(1))
            with pytest.raises(ModelError, match="somebody else"):
                await first.generate(requests_of(1))


async def test_a_server_killed_in_the_midst_of_a_batch(helpers: Any, vllm_servers: list[Server]) -> None:
    """Each request is answered once, wholly, by the weights that were last sent, on the server that came after."""
    server, model = vllm_servers[0], helpers.build("served", seed=2)
    many = [ModelRequest([n % 7, 3, 9], Sampling(max_tokens=1 + 7 * n % 60, seed=n)) for n in range(200)]
    restarts, pid = server.restarts, server.pid
    async with patient(server, helpers.build("served")) as client:
        client.load_weights("default", sent(model), 4)
        expected = await client.generate(many[:10])
        running = [asyncio.ensure_future(client.generate([request])) for request in many]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        responses = [response for [response] in await asyncio.gather(*running)]
        stats = client.stats()
    assert server.restarts == restarts + 1
    assert stats["restarts"] == 1
    assert stats["requests"] == 210
    assert [response.completion_token_ids for response in responses[:10]] == [
        response.completion_token_ids for response in expected
    ]
    assert {version for response in responses for _, version in response.policy_versions} == {4}
    assert error_of(helpers, model, responses[:40]) < EXACT
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
