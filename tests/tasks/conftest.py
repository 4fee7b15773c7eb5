"""Play a task's episodes with players instead of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from turnwise.arena import Arena
from turnwise.arena.answers import Contribution
from turnwise.inference.scripted import ByteTokenizer, ScriptedClient
from turnwise.tasks import Player, Task, build_task
from turnwise.tasks.tiny import build_tokenizer
from turnwise.types import EpisodeRequest, GenerateResult, Messages, ModelRequest, Sampling


class ChatTokenizer(ByteTokenizer):
    """A tokenizer that writes the chat as JSON, so that a player can parse the prompt."""

    def apply_chat_template(self, conversation: Messages, **kwargs: Any) -> list[int]:
        return self.encode(json.dumps(conversation))


class Table:
    """An arena with a task's actors and episodes. ``seen`` keeps ``(actor id, chat)`` of every call.

    Actors with tools get the tiny model's tokenizer, because its template shows tools.
    """

    def __init__(self, task: Task, player: Player | Sequence[str], tree: Any = None, **settings: Any) -> None:
        self.seen: list[tuple[str, Messages]] = []
        self.task, self.player = task, player
        self.lines = iter(()) if callable(player) else iter(player)
        self.tools = any(actor.tools for actor in task.actors)
        tokenizer: Any = build_tokenizer(task.texts()) if self.tools else ChatTokenizer()
        client = ScriptedClient(self._answer, tokenizer=tokenizer)
        self.arena = Arena(client, tokenizer, sampling=Sampling(max_tokens=4096), failure_threshold=0.0, **settings)
        for actor in task.actors:
            self.arena.add_actor(actor)
        for name, episode in task.episodes(tree).items():
            self.arena.add_episode(name, episode)

    def _answer(self, request: ModelRequest) -> str:
        messages: Any = request.messages if self.tools else json.loads(bytes(request.prompt_token_ids))
        actor = next(actor.id for actor in self.task.actors if actor.system_prompt == messages[0]["content"])
        self.seen.append((actor, messages))
        return self.player(actor, messages) if callable(self.player) else next(self.lines)

    async def play(self, requests: Sequence[EpisodeRequest]) -> list[GenerateResult]:
        return await self.arena.generate_rollouts(requests)

    async def one(self, artifact: Any) -> GenerateResult:
        (result,) = await self.play([EpisodeRequest(self.task.name, artifact, seed=0)])
        return result

    @staticmethod
    def rewards(result: GenerateResult) -> list[tuple[str, int, Any]]:
        """Actor, turn and reward of each step; rewards equal floats that are near."""
        assert result.rollout.error is None, result.rollout.error
        return [(str(step.actor_id), step.turn, pytest.approx(step.reward)) for step in result.rollout.steps]

    @staticmethod
    def branches(result: GenerateResult) -> list[tuple[str, Any, bool]]:
        """Actor, reward and selection of each step of a tree."""
        return [(str(step.actor_id), pytest.approx(step.reward), step.selected) for step in result.rollout.steps]

    async def contributions(self, artifact: Any) -> list[tuple[str, int, Contribution]]:
        """Evaluate one episode: what each action did to the answer that it was handed."""
        request = EpisodeRequest(self.task.name, artifact, seed=0)
        (result,) = await self.arena.evaluation().generate_rollouts([request])
        assert result.rollout.error is None, result.rollout.error
        steps = [step for step in result.rollout.steps if "handed" in step.info]
        return [(str(step.actor_id), step.turn, Contribution(**step.info["handed"])) for step in steps]


@pytest.fixture
def table() -> Callable[..., Table]:
    return Table


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 200 questions in GSM8K's format. Each answer is above 99."""
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows = [{"question": f"{n} + {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(50, 250)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="session")
def build(questions: str) -> Callable[..., Task]:
    """Build a shipped task; tasks over a file get ``questions``."""

    def made(name: str, **options: Any) -> Task:
        return build_task(name, {"path": questions, **options} if name in ("gsm8k", "math_orchestra") else options)

    return made
