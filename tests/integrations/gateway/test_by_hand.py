"""``turnwise gateway``: a session for a try by hand, which shows each call and what would train."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import openai
import pytest

from turnwise.cli import main as cli
from turnwise.integrations.gateway import Gateway
from turnwise.integrations.gateway.by_hand import ByHandEpisode, summary
from turnwise.types import EpisodeRequest

from .helpers import USER, arena_of, scripted
from .wires import Chat, Messages, refusal


def test_each_call_is_shown_with_its_tokens():
    told = []
    stopped = asyncio.Event()

    async def by_hand():
        while not told:
            await asyncio.sleep(0)
        urls = dict(re.findall(r"(\w+)=(\S+)", told[0]))
        model = SimpleNamespace(base_url=urls["OPENAI_BASE_URL"], api_key=urls["OPENAI_API_KEY"])
        async with Chat.client(model) as client:
            chat = list(USER)
            for _ in range(2):
                answer = await Chat.ask(client, chat)
                chat += [*Chat.sent_back(answer), *USER]
            await Chat.ask(client, [*USER, {"role": "assistant", "content": "Other."}, *USER])
        model = SimpleNamespace(anthropic_base_url=urls["ANTHROPIC_BASE_URL"], api_key=urls["ANTHROPIC_API_KEY"])
        async with Messages.client(model) as client:
            await refusal(Messages, Messages.ask(client, metadata={"turn": "x"}), 400, "BadRequestError")
        stopped.set()

    arena = arena_of(scripted("<think>\nHm.\n</think>\n\nFour.", "Still four."), actors=("solver", "checker"))
    arena.add_episode(ByHandEpisode(Gateway(renderer="template"), told.append, stopped, actors=["solver", "checker"]))

    async def run():
        playing = arena.generate_rollouts([EpisodeRequest("by hand", {})])
        return (await asyncio.gather(playing, by_hand()))[0]

    [result] = asyncio.run(run())
    begin, *calls, refused = told
    assert begin.endswith("# model names: solver, checker")
    first, second, third = (call.splitlines() for call in calls)
    rows = result.rollout.steps
    sizes = [(len(row.prompt_token_ids), len(row.completion_token_ids)) for row in rows]
    assert first[0] == (
        f"call 0 of 'solver': {sizes[0][0]} prompt tokens (0 reused), {sizes[0][1]} sampled, stop; a new chat"
    )
    assert first[2] == r"  answer '<think>\nHm.\n</think>\n\nFour.<|im_end|>'"
    assert second[0].endswith("sampled, stop; goes on from call 0") and f"({sum(sizes[0])} reused)" in second[0]
    assert second[1] == r"  prompt '\n<|im_start|>user\n2 + 2 = ?<|im_end|>\n<|im_start|>assistant\n'"
    assert third[0].endswith("a row of its own: rendered again, cause 'history'")
    assert refused.startswith("refused: 400 invalid_request: metadata.turn")
    assert summary(result).splitlines() == [
        f"solver: 3 of 3 rows would train, with {sum(sampled for _, sampled in sizes)} sampled tokens",
        "gateway/rewritten_rows/solver = 1",
    ]


@pytest.mark.slow
@pytest.mark.representative
def test_the_command_serves_a_model_until_it_is_stopped(tmp_path):
    command = [sys.executable, "-m", "turnwise", "gateway", "tiny", "--actor", "writer"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            urls = dict(re.findall(r"(\w+)=(\S+)", process.stdout.readline()))
            client = openai.OpenAI(base_url=urls["OPENAI_BASE_URL"], api_key=urls["OPENAI_API_KEY"])
            answer = client.responses.create(model="writer", input="Hi", max_output_tokens=5)
            assert answer.usage.output_tokens == 5
        finally:
            process.send_signal(signal.SIGINT)
        text = process.stdout.read()
    assert process.returncode == 0
    assert "call 0 of 'writer': " in text and "writer: 1 of 1 rows would train, with 5 sampled tokens" in text


def test_a_checkpoint_is_of_a_run(capsys):
    assert cli.main(["gateway", "tiny", "--checkpoint", "best"]) == 2
    assert "--checkpoint best: expected the folder of a run, got 'tiny'" in capsys.readouterr().err
