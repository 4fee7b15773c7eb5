"""An agent loop with a solver and a verifier, whose rewards depend on the session alone."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from turnwise.integrations.verl import call_fields

REWARDS = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
"""Rewards of solver and verifier, by session."""


class TeamLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], *, session_id: int, **kwargs: Any) -> list[AgentLoopOutput]:
        ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        outputs = []
        for agent, reward in zip(("solver", "verifier"), REWARDS[session_id], strict=True):
            answer = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
            )
            fields = call_fields(agent, reward=reward)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=answer.token_ids,
                    response_mask=[1] * len(answer.token_ids),
                    response_logprobs=answer.log_probs,
                    reward_score=reward,
                    num_turns=2,
                    metrics={},
                    extra_fields={**answer.extra_fields, **fields},
                )
            )
            ids = [*ids, *answer.token_ids]
        return outputs
