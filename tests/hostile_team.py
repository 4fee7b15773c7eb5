"""A run of 200 episodes, half of which misbehave: ``python tests/hostile_team.py FOLDER [--healthy]``.

Tools hang, exit, raise, block, return 10 MB and are called 2,000 times; hooks block; rewards fail; environments are
left open; agents never end. Prints the healthy episodes' transcripts and the step's metrics as JSON, and the time at
which the last step ended. With ``--healthy``, the others are left out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import turnwise as tw
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train import build_policies
from turnwise.utils.threads import end_process, run_to_end

CALL = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
HEALTHY = 100
HOSTILE = ("hang", "leave", "fail", "block", "large", "look", "hook", "reward", "agent", "stubborn")


def look() -> str:
    """Look."""
    time.sleep(0.01)
    return "seen"


def hang() -> None:
    """Hang."""
    time.sleep(10**6)


def leave() -> None:
    """Leave."""
    sys.exit(0)


def fail() -> None:
    """Fail."""
    raise LookupError("nothing here")


async def block() -> str:
    """Block."""
    time.sleep(0.3)
    return "blocked"


def large() -> str:
    """Return 10 MB."""
    return "x" * 10**7


class Environment:
    open_now = 0

    def __init__(self) -> None:
        Environment.open_now += 1

    def __deepcopy__(self, memo: Any) -> Environment:
        return Environment()

    def close(self) -> None:
        Environment.open_now -= 1


def scored(rollout: Any, arena: Any) -> float:
    if rollout.artifact["kind"] == "reward":
        sys.exit(1)
    return float(len(rollout.steps))


class Game(tw.MultiTurnEpisode):
    episode_type, actors, max_turns = "game", ("solver",), 2
    rubric = tw.Rubric([scored], on_error="zero", timeout=5.0)

    def setup(self, state: Any, arena: Any, artifact: Any) -> None:
        state.data["environment"] = Environment()

    def get_prompt(self, artifact: Any) -> str:
        return f"{artifact['kind']} {artifact['number']}"

    async def env_response(self, state: Any, arena: Any, artifact: Any) -> str:
        if artifact["kind"] == "hook":
            time.sleep(0.2)
            raise ValueError("a bug of the game")
        return "go on"

    def close(self, state: Any) -> None:
        state.data["environment"].close()


def agent(question: Any, models: Any) -> float:
    time.sleep(10**6)
    return 1.0


async def stubborn(question: Any, models: Any) -> float:
    while True:
        try:
            await asyncio.sleep(10**6)
        except asyncio.CancelledError:
            continue


def reply(request: Any) -> str:
    asked = request.messages[0]["content"].split()[0]
    if request.messages[-1]["role"] == "tool":
        return "done"
    if asked == "healthy":
        return CALL.format("look") + CALL.format("look")
    return CALL.format(asked) * (300 if asked == "look" else 1) if asked in TOOLS else "4"


TOOLS = {tool.__name__: tool for tool in (look, hang, leave, fail, block, large)}


async def play(folder: str, healthy_alone: bool) -> dict[str, Any]:
    tokenizer = build_tokenizer(["hello world 0123456789"])
    config = tw.TrainConfig(run_dir=folder, steps=1, policies={"default": {}}, eval={"every": 0})
    client = ScriptedClient(reply, tokenizer=tokenizer)
    arena = tw.Arena(client, tokenizer, credit=tw.GRPOCredit(), failure_threshold=1.0)
    arena.add_actor(tw.Actor("solver", tools=[*TOOLS.values()], tool_timeout=1.0, max_tokens=10**5))
    arena.add_episode(Game())
    for one in (agent, stubborn):
        arena.add_episode(AgentEpisode(one, Gateway(), actors=["solver"], timeout=1.0))
    kinds = (
        ["healthy"] * HEALTHY + []
        if healthy_alone
        else [k for n in range(HEALTHY) for k in ("healthy", HOSTILE[n % 10])]
    )
    numbers = iter(range(10**6))
    requests = []
    for place, kind in enumerate(kinds):
        number = next(numbers) if kind == "healthy" else place
        kind_of = kind if kind in ("agent", "stubborn") else "game"
        requests.append(tw.EpisodeRequest(kind_of, {"kind": kind, "number": number}, seed=number, group_id=number // 4))
    arena.source = lambda: requests
    trainer = tw.Trainer(arena, build_policies(config, {"default": build_model(tokenizer)}), config)
    results: list[Any] = []
    keep = arena.assign_credit_and_pack

    def kept(found: list[Any]) -> Any:
        results.extend(found)
        return keep(found)

    arena.assign_credit_and_pack = kept  # type: ignore
    await trainer.run()
    rollouts = [result.rollout for result in results]
    told = [
        [[step.prompt, step.completion, step.reward] for step in rollout.steps] + [rollout.rewards, rollout.error]
        for rollout in rollouts
        if rollout.artifact["kind"] == "healthy"
    ]
    with open(f"{folder}/metrics.jsonl", encoding="utf-8") as file:
        [metrics] = [json.loads(line) for line in file]
    return {"healthy": told, "metrics": metrics, "open": Environment.open_now, "ended": time.time()}


if __name__ == "__main__":
    print(json.dumps(run_to_end(play(sys.argv[1], "--healthy" in sys.argv))), flush=True)
    end_process(0)
