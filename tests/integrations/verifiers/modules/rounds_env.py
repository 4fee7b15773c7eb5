"""A turnwise task of two rounds as an environment: the solver answers, hears a hint of a checker, answers again."""

from __future__ import annotations

from typing import ClassVar

from turnwise.arena import Episode, Rubric
from turnwise.integrations.verifiers import export_task
from turnwise.tasks import OwnTask


def right(extras, artifact):
    return {"solver": float(extras["last"] == artifact["question"][-1]), "checker": 0.25}


class Rounds(Episode):
    episode_type = "rounds"
    rubric = Rubric([right])

    async def rollout(self, arena, artifact, state=None):
        chat = [{"role": "user", "content": artifact["question"]}]
        first = await self.call_model("solver", chat, arena)
        hint = await self.call_model("checker", first.text, arena)
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": hint.text}]
        state.data["last"] = (await self.call_model("solver", chat, arena)).text
        return state

    def get_extras(self, state):
        return {"last": state.data["last"]}


class RoundsTask(OwnTask):
    name = "rounds"
    success_metric = "right/solver"
    system_prompts: ClassVar = {"solver": "Say the last digit.", "checker": ""}

    def questions(self):
        return [f"{number:03d}" for number in range(60)]

    def episodes(self, tree=None):
        return {"rounds": Rounds()}


Taskset, Env, Harness = export_task(RoundsTask())
__all__ = ["Env", "Harness", "Taskset"]
