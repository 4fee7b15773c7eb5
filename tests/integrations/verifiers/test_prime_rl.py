"""An exported task under prime-rl's own code: its server of environments, its clients of it, and its choice of tokens.

Runs where prime-rl can be imported (its folders ``src`` and ``packages/prime-rl-configs/src`` are on the path). It was
written against commit 559b44772e, whose ``trace_to_samples`` wants an older verifiers than 0.4.0.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.tasks import build_task
from turnwise.types import EpisodeRequest, Sampling

from ...chat.families import chat_tokenizer
from .helpers import rows_of, token_server, use_modules

pytest.importorskip("prime_rl.orchestrator.envs", reason="prime-rl is not installed")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


async def native(artifact):
    """Play turnwise's own episode. The proposer is wrong, and the reviser is right."""
    task = build_task("sudoku")
    oracle = task.oracle()
    actor_of = {actor.system_prompt: actor.id for actor in task.actors}

    def reply(request):
        actor = actor_of[request.messages[0]["content"]]
        answer = oracle(actor, request.messages)
        return answer if actor == "reviser" else answer[:-1]

    arena = Arena(ScriptedClient(reply, tokenizer=chat_tokenizer("qwen3")), sampling=Sampling())
    for actor in task.actors:
        arena.add_actor(actor)
    for episode in task.episodes().values():
        arena.add_episode(episode)
    [result] = await arena.generate_rollouts([EpisodeRequest(next(iter(task.episodes())), artifact)])
    assert result.rollout.error is None
    return result.rollout


async def test_orchestrator_gets_tokens_and_rewards_of_the_native_task(tmp_path, monkeypatch):
    from prime_rl.configs.orchestrator import OrchestratorConfig
    from prime_rl.orchestrator.envs import TrainEnvs
    from prime_rl.orchestrator.trajectories import iter_trainable_branches

    use_modules(monkeypatch)
    port = free_port()
    env = {"taskset": {"id": "sudoku_env", "size": 4}}
    config = OrchestratorConfig.model_validate(
        {"train": {"source": [{"env": env}]}, "env_server_base_port": port, "batch_size": 4, "group_size": 2}
    )
    [address] = config.env_addresses.values()
    (tmp_path / "server.toml").write_text(
        f'[env.taskset]\nid = "sudoku_env"\nsize = 4\n[serve]\naddress = "{address}"\n'
        '[serve.pool]\ntype = "static"\nnum_workers = 1\n'
    )
    command = [sys.executable, "-m", "prime_rl.entrypoints.env_server", "@", str(tmp_path / "server.toml")]
    server = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=dict(os.environ))
    try:
        envs = TrainEnvs(config.train.source, config.env_addresses, policy_pool=None)
        await asyncio.wait_for(envs.start(), 180)
        train = envs.get("sudoku_env")
        assert train.num_tasks == 4
        for task in train.tasks:
            expected = await native(task.data.artifact)
            async with token_server(tmp_path, [step.completion for step in expected.steps]) as (client, _):
                episode = await train.run(client, "model", None, task.data.model_dump())
            assert episode.ok, episode.errors
            assert {step.actor_id for step in expected.steps} == {"proposer", "reviser"}
            assert {trace.agent.name: trace.reward for trace in episode.traces} == expected.rewards
            for trace in episode.traces:
                trained = [
                    token
                    for branch, mask in iter_trainable_branches(trace)
                    for token, trains in zip(branch.token_ids, mask, strict=True)
                    if trains
                ]
                assert trained == [token for row in rows_of(trace) for token in row[1]]
    finally:
        server.terminate()
        await server.wait()
