"""Episodes for ``bench_arena.py``, in turnwise and in ``verifiers``, with clients that answer at once.

A chat has four turns: the model says ``REPLY``, the environment ``ANSWER``. A lead asks the model for a topic and then
plays four chats. Both libraries record token ids and log-probabilities, and reward the length of the completion.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from turnwise.arena import Arena, Episode, MultiTurnEpisode, Rubric
from turnwise.credit import GRPOCredit
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import Actor, EpisodeRequest, GenerateResult, ModelRequest, ModelResponse, Sampling

TURNS, CHILDREN, GROUP = 4, 4, 8
REPLY, ANSWER = "the answer is 4", "No. Once more."
Asked = Counter[tuple[tuple[str, str], ...]]


class Talk(NamedTuple):
    """A chat: in each of ``turns`` the model says ``reply``, of up to ``tokens``, and the environment ``answer``."""

    turns: int = TURNS
    reply: str = REPLY
    answer: str = ANSWER
    tokens: int = 16

    @property
    def reply_ids(self) -> list[int]:
        return [*self.reply.encode(), 256]


def question(number: Any) -> str:
    return f"Question {number}: how far is it?"


def topic(number: Any) -> str:
    return f"Topic {number}?"


class Instant:
    """An inference client that gives ``replies``, texts with their token ids, in turns and at once.

    While ``asked`` is a counter, it counts chats."""

    def __init__(self, *replies: tuple[str, list[int]]) -> None:
        self.calls = 0
        self.asked: Asked | None = None
        self._replies = itertools.cycle([(text, ids, [-0.5] * len(ids)) for text, ids in replies])

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        self.calls += len(requests)
        if self.asked is not None:
            self.asked.update(tuple((m["role"], m["content"]) for m in r.messages or ()) for r in requests)
        return [self._response(*next(self._replies)) for _ in requests]

    def _response(self, text: str, ids: list[int], logprobs: list[float]) -> ModelResponse:
        return ModelResponse(text, list(ids), list(logprobs), "stop", [(len(ids), 0)])

    def version(self, policy: str) -> int:
        return 0


class Chat(MultiTurnEpisode):
    episode_type = "chat"
    actors = ("player",)
    rubric = Rubric([lambda completion: float(len(completion))])

    def __init__(self, talk: Talk) -> None:
        super().__init__(max_turns=talk.turns)
        self.answer = talk.answer

    def get_prompt(self, artifact: Any) -> str:
        return question(artifact)

    def env_response(self, state: Any, arena: Any, artifact: Any) -> str:
        return self.answer


class Lead(Episode):
    episode_type = "lead"
    rubric = Rubric([lambda extras: extras["mean"]])

    async def rollout(self, arena: Arena, artifact: Any, state: Any = None) -> Any:
        await self.call_model("player", topic(artifact), arena)
        await arena.generate_rollouts([EpisodeRequest("chat", f"{artifact}.{child}") for child in range(CHILDREN)])
        return state

    def get_extras(self, state: Any) -> dict[str, float]:
        rewards = [result.rollout.rewards["player"] for result in state.child_results]
        return {"mean": sum(rewards) / len(rewards)}


class Ours:
    """turnwise's arena, with chats and with leads that have nested chats."""

    def __init__(self, concurrency: int, tokenizer: Any = None, talk: Talk = Talk()) -> None:  # noqa: B008
        self.client = Instant((talk.reply, talk.reply_ids))
        self.arena = Arena(
            self.client,
            ByteTokenizer() if tokenizer is None else tokenizer,
            credit=GRPOCredit(),
            sampling=Sampling(max_tokens=talk.tokens),
            max_concurrency=concurrency,
        )
        self.arena.add_actor(Actor("player"))
        self.arena.add_episode(Chat(talk))
        self.arena.add_episode(Lead())

    def play(self, workload: str, episodes: int) -> list[GenerateResult]:
        requests = [EpisodeRequest(workload, number, group_id=number // GROUP) for number in range(episodes)]
        return asyncio.run(self.arena.generate_rollouts(requests))

    def rewards(self, results: list[GenerateResult]) -> list[float]:
        return sorted(node.rollout.rewards["player"] for top in results for node in top.walk())


def completion(talk: Talk) -> dict[str, Any]:
    """Return a response as vLLM sends it for training, with token ids and log-probabilities."""
    logprobs = [{"token": "t", "logprob": -0.5, "top_logprobs": []} for _ in talk.reply_ids]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": talk.reply_ids,
        "message": {"role": "assistant", "content": talk.reply},
        "logprobs": {"content": logprobs},
    }
    return {
        "id": "1",
        "created": 0,
        "model": "m",
        "object": "chat.completion",
        "prompt_token_ids": [],
        "choices": [choice],
    }


class Verifiers:
    """The same episodes with ``MultiTurnEnv`` of ``verifiers`` 0.3; later versions don't have this class.

    ``run_rollout`` plays them, as in prime-rl; ``generate`` would do additional work. Its OpenAI client returns a
    parsed response with the prompt's token ids, which it copies: reading JSON is left out, as our client reads none. A
    lead is an environment that plays chats before it ends, because the package can't nest environments.
    """

    def __init__(self, module: Any, talk: Talk = Talk()) -> None:  # noqa: B008
        from openai.types.chat import ChatCompletion

        self.talk = talk
        made = ChatCompletion.model_validate(completion(talk))
        turn = ByteTokenizer().encode(f"assistant: {talk.reply}\nuser: {talk.answer}\n")
        first = ByteTokenizer().encode(f"user: {question(0)}\nassistant: ")
        answers = [made.model_copy(update={"prompt_token_ids": first + turn * number}) for number in range(talk.turns)]
        peer = self

        class Client(module.clients.OpenAIChatCompletionsClient):  # type: ignore[misc, name-defined]
            async def get_native_response(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
                peer.calls += 1
                if peer.asked is not None:
                    peer.asked[tuple((m["role"], m["content"]) for m in prompt)] += 1
                return answers[len(prompt) // 2]

        self.calls = 0
        self.asked: Asked | None = None
        self.client = Client(None)
        self.environments = environments(module, self)

    async def run(self, workload: str, number: Any) -> Any:
        prompt = topic(number) if workload == "lead" else question(number)
        row = {"prompt": [{"role": "user", "content": prompt}], "example_id": 0, "info": {"number": number}}
        environment = self.environments[workload]
        kept = ["trajectory", "children"] if workload == "lead" else ["trajectory"]
        return await environment.run_rollout(
            row, self.client, "m", {"max_tokens": self.talk.tokens}, state_columns=kept
        )

    def play(self, workload: str, episodes: int) -> list[Any]:
        async def every() -> list[Any]:
            return list(await asyncio.gather(*(self.run(workload, number) for number in range(episodes))))

        return asyncio.run(every())

    def rewards(self, results: list[Any]) -> list[float]:
        children = [child for result in results for child in result.get("children", ())]
        return sorted(result["reward"] for result in (*results, *children))


def environments(module: Any, peer: Verifiers) -> dict[str, Any]:
    """Build the two environments of ``peer``. The class requires a dataset."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()

    class ChatEnv(module.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [module.UserMessage(content=peer.talk.answer)]

    class LeadEnv(ChatEnv):
        async def render_completion(self, state: Any) -> None:
            number = state["info"]["number"]
            state["children"] = await asyncio.gather(
                *(peer.run("chat", f"{number}.{child}") for child in range(CHILDREN))
            )
            await super().render_completion(state)

    async def said(completion: Any, **kwargs: Any) -> float:
        return float(len(completion[-1].content if hasattr(completion[-1], "content") else completion[-1]["content"]))

    async def mean(state: Any, **kwargs: Any) -> float:
        return sum(child["reward"] for child in state["children"]) / CHILDREN

    rows = Dataset.from_list([{"question": "?", "answer": ""}])
    chat = ChatEnv(dataset=rows, rubric=module.Rubric(funcs=[said]), max_turns=peer.talk.turns)
    lead = LeadEnv(dataset=rows, rubric=module.Rubric(funcs=[mean]), max_turns=1)
    return {"chat": chat, "lead": lead}
