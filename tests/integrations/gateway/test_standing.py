"""``turnwise serve RUN``: actors as models outside any episode, in all dialects; and the command on a real run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from turnwise.cli import main as cli
from turnwise.inference.common.http import key_file, read_key
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.integrations.gateway.service.standing import standing
from turnwise.integrations.gateway.settings import GatewaySettings
from turnwise.run.build import train_from_config
from turnwise.types import Actor, Sampling

from ...test_run import config_of, save_tiny
from .helpers import USER, arena_of, call_of
from .wires import Chat, both, every, refused

KEY = "k" * 43


def serving(agent: Callable[..., Awaitable[Any]], script: Any = "4", **settings: Any) -> Any:
    """Run ``agent(model, arena)`` beside a standing server of two actors, and return the arena."""
    arena = _arena(lambda request: script)

    async def run() -> None:
        async with standing(arena, GatewaySettings(renderer="template", **settings), KEY) as url:
            model = SimpleNamespace(base_url=url, anthropic_base_url=url.removesuffix("/v1"), api_key=KEY)
            await agent(model, arena)

    asyncio.run(run())
    return arena


def _arena(script: Any) -> Any:
    arena = arena_of(script, actors=("solver", Actor("checker", max_tokens=5)))
    arena.add_episode(AgentEpisode(lambda question, models: 1.0, Gateway(), actors=["solver"]))
    return arena


@both
def test_each_actor_answers_by_its_name(wire: Any) -> None:
    async def agent(model: Any, arena: Any) -> None:
        async with wire.client(model) as client:
            for actor in ("solver", "checker"):
                assert wire.text(await wire.ask(client, actor=actor)) == "4"
            assert {one.id async for one in client.models.list()} == {"solver", "checker"}

    sent = serving(agent).client.calls
    assert [request.sampling.max_tokens for request in sent][1] == 5, "the actor's limit holds"


@every
def test_tools_and_streams(wire: Any) -> None:
    async def agent(model: Any, arena: Any) -> None:
        async with wire.client(model) as client:
            for asked in (wire.ask, wire.streamed):
                [(_, arguments)] = wire.calls(await asked(client, tools=wire.tools))
                assert arguments == {"a": 2, "b": 2}

    serving(agent, call_of("add", '{"a": 2, "b": 2}'))


def test_choices_and_how_the_client_samples() -> None:
    """The client's temperature and seed hold; without a seed each call has its own."""

    async def agent(model: Any, arena: Any) -> None:
        async with Chat.client(model) as client:
            for options in ({"temperature": 0.25, "seed": 7}, {"temperature": 0.25, "seed": 7}, {}, {}):
                await Chat.ask(client, max_tokens=9, **options)
            assert [choice.message.content for choice in (await Chat.ask(client, n=3)).choices] == ["4"] * 3

    first, again, *others = [request.sampling for request in serving(agent).client.calls]
    assert (first.temperature, first.seed, first.max_tokens) == (0.25, 7, 9) and again == first
    assert others[0].temperature == Sampling().temperature and len({one.seed for one in others}) == 5, "each its own"


@both
def test_what_is_refused(wire: Any) -> None:
    async def agent(model: Any, arena: Any) -> None:
        wrong = SimpleNamespace(**{**vars(model), "api_key": "x" * 43})
        await refused(wire, wrong, status=401, name="AuthenticationError")
        await refused(wire, model, status=404, name="NotFoundError", actor="nobody")
        foreign = {"default_headers": {"Host": "evil.example"}}
        await refused(wire, model, status=421, name="APIStatusError", client=foreign)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
            for host in ("gpu1.lab:8000", "10.1.2.3", "[::1]:80"):
                found = await client.get(f"{model.base_url}/models", headers={"Host": host})
                assert found.status_code == 200, host
            assert (await client.get(model.base_url.replace("/v1", "/s/x/v1/models"))).status_code == 404
        assert not arena.client.calls

    serving(agent, allowed_hosts=["gpu1.lab"])


def test_an_answer_that_fails_leaves_the_next_one_alone() -> None:
    replies = [RuntimeError("lost"), "4"]

    def script(request: Any) -> str:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    arena = _arena(script)

    async def run() -> None:
        async with (
            standing(arena, GatewaySettings(renderer="template"), KEY) as url,
            Chat.client(SimpleNamespace(base_url=url, api_key=KEY), max_retries=0) as client,
        ):
            with pytest.raises(openai.InternalServerError, match="lost"):
                await Chat.ask(client)
            assert Chat.text(await Chat.ask(client)) == "4"

    asyncio.run(run())


# ---- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, narrow_model: None) -> Path:
    folder = tmp_path_factory.mktemp("sudoku")
    model = {"default": {"path": save_tiny(folder / "model")}}
    config = config_of(
        folder / "run", policies=model, warm_start={"steps": 2, "batch_size": 8}, eval={"num_prompts": 2}
    )
    return train_from_config(config).config.run_dir


@pytest.mark.slow
@pytest.mark.representative
def test_a_run_serves_until_it_is_told_to_stop(run_dir: Path, tmp_path: Path, warm_python: str) -> None:
    log = (tmp_path / "log").open("w+")
    words = [warm_python, "-P", "-m", "turnwise", "serve", str(run_dir), "--port", "0", "--checkpoint", "newest"]
    process = subprocess.Popen(words, stderr=log)
    try:
        url, path = asyncio.run(_use(process, log))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, _text(log)
    assert "step_0000000" in _text(log) and "proposer, reviser" in _text(log)
    assert not path.exists(), f"the key of {url} is forgotten"


async def _use(process: subprocess.Popen[bytes], log: Any) -> tuple[str, Path]:
    while "serving the models" not in _text(log):
        assert process.poll() is None, _text(log)
        await asyncio.sleep(0.2)
    url = _text(log).partition(" at http")[2].split()[0]
    url = f"http{url}"
    path = key_file(url)
    assert path.stat().st_mode & 0o77 == 0
    async with openai.AsyncOpenAI(base_url=url, api_key=read_key(path)) as client:
        ask = {"model": "proposer", "messages": USER, "temperature": 0, "max_tokens": 8}
        first, second = [(await client.chat.completions.create(**ask)).choices[0].message.content for _ in range(2)]
        assert first == second, "greedy"
        assert isinstance((await client.responses.create(model="reviser", input="x")).output_text, str)
    return url, path


def _text(log: Any) -> str:
    return Path(log.name).read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--adapter-slots", "2"], "--adapter-slots: is an option of a model's server"),
        (["--checkpoint", "step_00000099"], "step_00000099"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    ],
)
def test_what_a_run_can_not_be_served_with(
    run_dir: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(run_dir), *words]) in (1, 2)
    assert problem in capsys.readouterr().err


def test_a_model_has_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path), "--checkpoint", "best"]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
