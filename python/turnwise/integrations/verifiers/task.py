"""A verifiers environment as a task: ``task = "verifiers:my_taskset"`` or ``"verifiers:my_module:load_env"``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import Episode, TreeSampler
from turnwise.integrations.gateway.settings import MAX_TOKENS, read_settings
from turnwise.tasks.own import OwnOptions, OwnTask
from turnwise.tasks.questions import identity_of
from turnwise.types import TaskCapabilities
from turnwise.utils.registry import import_by_name

NEEDED = "expected verifiers 0.4: pip install 'turnwise[verifiers]', in an environment without openai 3"


def check_version() -> None:
    """Raise ``ImportError`` unless verifiers 0.4 is installed. Its API v1 is new, and older versions lack it."""
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ImportError(f"verifiers is not installed; {NEEDED}") from None
    if version.split(".")[:2] != ["0", "4"]:
        raise ImportError(f"verifiers {version} is installed; {NEEDED}")


class VerifiersOptions(OwnOptions):
    """Options in ``[task_options]`` of a verifiers environment.

    ``name`` is a taskset, as ``--env.taskset.id`` of verifiers names it, or a function ``"module:function"`` that
    returns an ``Env`` or an ``EnvConfig``. ``env`` is verifiers' own table ``[env]``, or the function's arguments.
    ``size`` is the number of tasks to read, from which all splits are drawn. ``success_metric`` is the metric that
    counts as success; by default the mean of the agents' rewards. ``timeout`` is in seconds, for each episode.
    ``gateway`` has settings of :class:`~turnwise.integrations.gateway.GatewaySettings`, such as ``renderer``.
    """

    max_tokens: int = Field(default=MAX_TOKENS, ge=1)
    name: str = ""
    env: dict[str, Any] = Field(default_factory=dict)
    size: int = Field(default=10_000, ge=1)
    success_metric: str = ""
    timeout: float = Field(default=600.0, gt=0)
    gateway: dict[str, Any] = Field(default_factory=dict)


class VerifiersTask(OwnTask):
    """Trains the agents of a verifiers v1 environment. An agent whose config sets a client uses that one instead.

    The default credit gives each actor one advantage per attempt: two attempts at one task needn't make the same
    calls.
    """

    name = "verifiers"
    success_metric = "reported_reward"
    system_prompts: ClassVar[dict[str, str]] = {"agent": ""}
    options_type = VerifiersOptions
    capabilities = TaskCapabilities(credit_rule="hierarchy", credit_options={"ddof": 1})

    def __init__(self, options: VerifiersOptions | None = None) -> None:
        check_version()
        super().__init__(options)
        options = self.options
        self.name = options.name  # type: ignore[misc]  # your own class names its task once
        self.settings = read_settings(options.gateway)
        self.env = _env(options.name, options.env)
        self._tasks = list(self.env.taskset.take(options.size))
        self._places: dict[str, int] = {}
        for index, task in enumerate(self._tasks):
            self._places.setdefault(_key(task), index)
        if not self._tasks:
            raise ValueError(f"task='verifiers:{self.name}': its taskset is empty")
        names = _actors(self.env)
        self.system_prompts = dict.fromkeys(names, "")  # type: ignore[misc]
        self.success_metric = options.success_metric or "reported_reward"  # type: ignore[misc]

    def questions(self) -> Sequence[str]:
        """The keys of all tasks; equal tasks count once."""
        return list(self._places)

    def identity(self, question: str) -> Any:
        return identity_of(self._tasks[self._places[question]].data.model_dump(mode="json", exclude_none=True))

    def artifact(self, question: str) -> Any:
        index = self._places[question]
        return {"index": index, "key": question, "prompt": self._tasks[index].data.prompt_text}

    def texts(self) -> list[str]:
        """The prompts of the training tasks."""
        tasks = [self._tasks[self._places[key]].data for key in self.question_set.listed("train", 2000)]
        return [text for data in tasks for text in (data.prompt_text, data.system_prompt) if text]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        from turnwise.integrations.verifiers.episode import VerifiersEpisode

        if tree is not None:
            raise ValueError(
                "a verifiers environment can't be forked: expected rollout.branches = 1; several attempts at a task "
                "(rollout.group_size) form the groups"
            )
        options = {"settings": self.settings, "timeout": self.options.timeout}
        episode = VerifiersEpisode(self.env, self._tasks, list(self.system_prompts), **options)
        episode.episode_type = self.name
        return {self.name: episode}


def _env(name: str, given: dict[str, Any]) -> Any:
    """Return the environment ``name``: a taskset's id, or a function's place."""
    import verifiers.v1 as vf

    if ":" in name:
        source = import_by_name({}, name, "task")
        made = source(**given) if callable(source) else source
    else:
        taskset = {"id": name, **given.get("taskset", {})}
        made = vf.resolve_env_config({**given, "taskset": taskset})
    if isinstance(made, vf.EnvConfig):
        made = vf.load_environment(made)
    if not isinstance(made, vf.Env):
        raise TypeError(f"task='verifiers:{name}' gave {made!r}: expected a verifiers.v1.Env or EnvConfig")
    return made


def _actors(env: Any) -> list[str]:
    """Return the agents that the arena's model plays: those without a client of their own."""
    from verifiers.v1.configs.agent import agent_config_fields

    actors = []
    for name, config in agent_config_fields(env.config).items():
        if config.client is not None:
            continue
        if config.model is not None:
            raise ValueError(
                f"agent {name!r} pins model={config.model!r} and no client: expected both, for a model elsewhere, or "
                "neither, for an actor that trains"
            )
        actors.append(name)
    if not actors:
        raise ValueError(f"{type(env).__name__}: each of its agents pins a client: expected one to train")
    return actors


def _key(task: Any) -> str:
    """Return the task's content as a key. Its position doesn't count, so that equal tasks are in one split."""
    from verifiers.v1.task import task_key

    return task_key(task.data.model_dump(mode="json", exclude={"idx"}, exclude_none=True))
