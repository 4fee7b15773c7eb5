"""The task of an agent of any framework: ``task = "gateway:my_agent:agent"``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import Episode, Rubric, TreeSampler
from turnwise.integrations.gateway.episode import AgentEpisode, reported_reward
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.process import ProcessEpisode
from turnwise.integrations.gateway.replay import ReplayedEpisode
from turnwise.integrations.gateway.settings import MAX_TOKENS, read_settings
from turnwise.tasks.own import OwnOptions, OwnTask, texts_in
from turnwise.types import TaskCapabilities
from turnwise.utils.files import PathText, read_json_lines
from turnwise.utils.registry import import_by_name
from turnwise.utils.values import check_texts

PROCESS = "process"
"""Name of the task whose agent is the command in ``gateway.command``."""
_OF_PROCESS = ("command", "stdin", "env", "files", "collect", "container", "grace", "processes", "children")


class GatewayOptions(OwnOptions):
    """Options in ``[task_options]`` of an agent.

    ``questions`` names a list, or a function that returns one, as ``"module:name"``, or a JSON Lines file; by default
    ``questions`` in the agent's module. A question is a text or a JSON object; the agent gets it as it is.
    ``actors`` are the models that the agent calls; by default ``actors`` in its module, or one called ``"agent"``.
    ``untrained`` are further ones whose answers don't train, such as one for titles.
    ``rubric`` names a Rubric as ``"module:name"``; without one the agent's result is its reward.
    ``success_metric`` is the metric that counts as success; by default the reward, or its mean over the actors that the
    attempt asked. ``max_tokens`` is the limit of each answer, which the context may lower. ``timeout`` is in seconds,
    for each episode. ``replayable`` says that the agent's calls depend on its question and its answers alone; trees
    need that.
    """

    max_tokens: int = Field(default=MAX_TOKENS, ge=1)
    name: str = ""
    gateway: dict[str, Any] = Field(default_factory=dict)
    questions: PathText = ""
    actors: list[str] = Field(default_factory=list)
    untrained: list[str] = Field(default_factory=list)
    rubric: str = ""
    success_metric: str = ""
    timeout: float = Field(default=600.0, gt=0)
    replayable: bool = False


class GatewayTask(OwnTask):
    """Trains an agent through a gateway: a function ``"module:function"``, or ``"process"``, the command in
    ``[gateway]``.

    The default credit gives each actor one advantage per attempt: two attempts at one question needn't make the same
    calls, so calls are not compared one by one.
    """

    name = "gateway"
    success_metric = "reported_reward"
    system_prompts: ClassVar[dict[str, str]] = {"agent": ""}
    options_type = GatewayOptions
    capabilities = TaskCapabilities(credit_rule="hierarchy", credit_options={"ddof": 1})

    def __init__(self, options: GatewayOptions | None = None) -> None:
        super().__init__(options)
        options = self.options
        self.name = options.name  # type: ignore[misc]  # your own class names its task once
        given = dict(options.gateway)
        self._process = {name: given.pop(name) for name in _OF_PROCESS if name in given}
        self.gateway = Gateway(read_settings(given, also=_OF_PROCESS))
        self.is_process = self.name == PROCESS
        if self.is_process != ("command" in self._process):
            raise ValueError(
                f"task='gateway:{self.name}', gateway.command={self._process.get('command')!r}: expected "
                f"'gateway:{PROCESS}' with a command, or 'gateway:module:function' without one"
            )
        self.agent = None if self.is_process else import_by_name({}, self.name, "task")
        module = self.name.partition(":")[0]
        self._questions = _questions(options.questions, module, self.is_process)
        names = list(options.actors or ([] if self.is_process else _of_module(module, "actors", [])) or ["agent"])
        self.system_prompts = dict.fromkeys((*names, *options.untrained), "")  # type: ignore[misc]
        self.rubric: Rubric | None = None
        if options.rubric:
            self.rubric = import_by_name({}, options.rubric, "task_options.rubric")
            if not isinstance(self.rubric, Rubric):
                raise ValueError(f"task_options.rubric={options.rubric!r}: expected a Rubric, got {self.rubric!r}")
        scored = reported_reward.__name__ if self.rubric is None else self.rubric.names[0]
        self.success_metric = options.success_metric or scored  # type: ignore[misc]

    def questions(self) -> Sequence[str]:
        return self._questions

    def identity(self, question: str) -> Any:
        return super().identity(json.loads(question))

    def artifact(self, question: str) -> Any:
        return json.loads(question)

    def level(self, question: str) -> int:
        """The number under the question's key ``level``; 0 without one."""
        value = json.loads(question)
        level = value.get("level") if isinstance(value, dict) else None
        return level if isinstance(level, int) else 0

    def texts(self) -> list[str]:
        """The texts in the training questions."""
        train = self.question_set.listed("train", 2000)
        return [text for question in train for text in texts_in(json.loads(question))]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        common = {"actors": list(self.system_prompts), "rubric": self.rubric, "timeout": self.options.timeout}
        episode: Episode
        if tree is not None and self.options.untrained:
            raise ValueError(f"task_options.untrained={self.options.untrained!r}: expected none, as each call branches")
        if tree is not None:
            episode = self._branched(tree, common)
            episode.episode_type = self.name
            return {self.name: episode}
        common["untrained"] = self.options.untrained
        if self.is_process:
            options = dict(self._process)
            episode = ProcessEpisode(options.pop("command"), self.gateway, **options, **common)
        else:
            assert self.agent is not None
            episode = AgentEpisode(self.agent, self.gateway, **common)
        episode.episode_type = self.name
        return {self.name: episode}

    def _branched(self, tree: TreeSampler, common: dict[str, Any]) -> ReplayedEpisode:
        if self.agent is None or not self.options.replayable:
            raise ValueError(
                "a branch runs the agent again: expected task_options.replayable = true for a function whose calls "
                "depend on its question and its answers alone, or rollout.branches = 1 with rollout.group_size > 1"
            )
        return ReplayedEpisode(self.agent, self.gateway, sampler=tree, **common)


def _questions(given: str, module: str, is_process: bool) -> list[str]:
    """Return the questions as canonical JSON, each once. Raises ``ValueError`` that names where they should be."""
    if not given and is_process:
        raise ValueError("task_options.questions: expected a JSON Lines file, or 'module:name' of a list or function")
    if given and ":" not in given:
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"task_options.questions={given!r}: no such file")
        try:
            found = list(read_json_lines(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"task_options.questions={given!r}: {error}") from None
    else:
        where = given or f"{module}:questions"
        found = import_by_name({}, where, "task_options.questions")
        found = found() if callable(found) else found
        if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
            raise ValueError(f"task_options.questions={given!r}: expected a list of questions, got {found!r:.80}")
        found = [(f"{where}, question {index}", question) for index, question in enumerate(found)]
    if not found:
        raise ValueError(f"task_options.questions={given!r}: expected a list of at least one question")
    questions: dict[str, None] = {}
    for place, question in found:
        try:
            check_texts(question)
            questions[json.dumps(question, sort_keys=True, allow_nan=False)] = None
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{place}: expected a text or a JSON object: {error}") from None
    return list(questions)


def _of_module(module: str, name: str, default: Any) -> Any:
    return getattr(importlib.import_module(module), name, default)
