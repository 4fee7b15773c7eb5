"""The base class of every section of the config file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from turnwise.types import Actor, CreditAssigner, EpisodeRequest
from turnwise.utils.values import problem

SERVER_DECIDES = "the server decides this: expected no setting here"

Share = Annotated[float, Field(ge=0, lt=1)]


class TaskFacts(Protocol):
    """What sections ask about a task. Each answer is found when it is first asked for, and may raise ``ValueError``."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def seats(self) -> Sequence[str]:
        """Actors that play against each other."""
        ...

    @property
    def actors(self) -> Sequence[Actor]:
        """The actors, with the policies that play them."""
        ...

    @property
    def parts(self) -> Mapping[str, tuple[Any, TaskFacts]]:
        """Each of several tasks with its own config, by name; empty for one task."""
        ...

    @property
    def credit(self) -> CreditAssigner:
        """The credit rule."""
        ...

    @property
    def episodes(self) -> Mapping[str, Any]:
        """The episodes by type, with the tree of the config."""
        ...

    @property
    def questions(self) -> Sequence[EpisodeRequest]:
        """The training questions of a step."""
        ...

    @property
    def held_out(self) -> tuple[Sequence[EpisodeRequest], Sequence[EpisodeRequest]]:
        """The questions of the evaluation and of a validation."""
        ...

    @property
    def ablations(self) -> Sequence[Any]:
        """The sub-teams of ``eval.ablate``."""
        ...

    @property
    def demonstrations(self) -> Sequence[Any]:
        """A demonstration for the warm start."""
        ...

    @property
    def decisions(self) -> Sequence[Any] | None:
        """The decisions of a game that is solved exactly; ``None`` for other tasks."""
        ...

    def problems(self, questions: Sequence[EpisodeRequest], *, measured: bool = True) -> list[str]:
        """List the problems that would stop ``questions`` in play."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What sections ask about the run that they are part of, before a model is loaded.

    ``config`` is the whole config, and ``ranks`` the number of processes that train. With a ``task`` the config has a
    policy for every actor. ``trains`` asks also for what would stop the first step, and ``trains_alone`` is True if the
    loss trains an attempt that credit compares with no other.
    """

    config: Any
    ranks: int = 1
    task: TaskFacts | None = None
    trains: bool = False
    trains_alone: bool = False
    within: str = ""
    """Start of each line about one task of several."""

    @property
    def each(self) -> list[RunFacts]:
        """The facts of each task alone, with its own credit rule and rewards."""
        parts = {} if self.task is None else self.task.parts
        return [
            replace(self, config=config, task=task, within=f"config section 'tasks.{name}': ")
            for name, (config, task) in parts.items()
        ] or [self]

    @property
    def credit(self) -> CreditAssigner | None:
        """The credit rule of one task; ``None`` where it can't be built, which ``[credit]`` tells, or isn't known."""
        with suppress(ValueError):
            return None if self.task is None else self.task.credit
        return None

    @property
    def episodes(self) -> Mapping[str, Any]:
        """The episodes of one task; none where they can't be built, which ``[rollout]`` tells."""
        with suppress(ValueError):
            return {} if self.task is None else self.task.episodes
        return {}

    @property
    def questions(self) -> Sequence[EpisodeRequest]:
        """The training questions of a step of one task; none where it has too few, which ``[rollout]`` tells."""
        with suppress(ValueError):
            return () if self.task is None else self.task.questions
        return ()

    @property
    def server(self) -> Any:
        """Properties of the Tinker server that trains; ``None`` without one, and without a task."""
        learner = self.config.learner
        return learner.server if learner.is_remote and self.task is not None else None

    @property
    def actors(self) -> Sequence[Actor]:
        """The actors, with the policies that play them."""
        return () if self.task is None else self.task.actors


@dataclass(frozen=True, slots=True)
class Change:
    """A key at a resume whose value is not that of the checkpoint. ``saved`` and ``run`` are the whole configs."""

    key: str
    before: Any
    now: Any
    saved: Any
    run: Any


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change does at a resume, and why. Of what is ``kept`` the run goes on with the checkpoint's value."""

    kind: Literal["applies", "kept", "refused"]
    reason: str = ""


APPLIES = Effect("applies")


def kept(reason: str) -> Effect:
    """Return the effect of a key that goes on with the checkpoint's value.

    The run says ``kept from the checkpoint: <key> = <its value>, <reason>``.
    """
    return Effect("kept", reason)


def refused(reason: str) -> Effect:
    """Return the effect of a key that can't change at a resume.

    The error is ``config key <key> = <now>: it was <before>: <reason>``.
    """
    return Effect("refused", reason)


Effects = Mapping[str, Effect | Callable[[Change], Effect]]


class Section(BaseModel):
    """A section of the config file, described by its docstring; the string below a field describes the field."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        allow_inf_nan=False,  # in typed fields; tables of options may hold inf and nan,
        ser_json_inf_nan="constants",  # which dumps keep: the default would make them None
        defer_build=True,  # the first validation builds the classes that it needs; most commands validate nothing
    )

    at_resume: ClassVar[Effects] = {}
    """What a change of a key does at a resume, by the field's name, where it does not just apply: :func:`kept`,
    :func:`refused`, or a function of the :class:`Change` that returns an effect. ``"*"`` is the rule of the keys
    without one. For a table of sections the rule decides about new and missing names."""

    def conflicts(self, run: RunFacts, key: str) -> Iterator[str]:
        """Yield a line for each value that is valid alone but doesn't fit ``run``. ``key`` is that of the section."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject ``true`` and ``false`` for a number: ``eval.every = true`` must not mean 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError("expected a number")
        return value


def trial(key: str, value: Any, ask: Callable[[], object]) -> Iterator[str]:
    """Yield a line for ``key`` if ``ask()`` raises ``ValueError``."""
    try:
        ask()
    except ValueError as error:
        yield problem(key, error, value)


def conflicts_of(run: RunFacts) -> list[str]:
    """Return one line for each problem of settings that are valid alone but don't fit together."""

    def below(key: str, value: Any) -> Iterator[str]:
        if isinstance(value, Section):
            yield from value.conflicts(run, key)
            for name in type(value).model_fields:
                yield from below(f"{key}.{name}".removeprefix("."), getattr(value, name))
        elif isinstance(value, dict | list):
            named: dict[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
            for name, each in named.items():
                yield from below(f"{key}.{name}", each)

    return list(dict.fromkeys(below("", run.config)))
