"""The base class of every section of the config file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from turnwise.utils.registry import problem as problem

Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What sections ask about the run that they are part of, before a model is loaded.

    ``config`` is the whole config, ``ranks`` the number of processes that train, and ``grammars`` tells whether calls
    of the task are sampled under grammars.
    """

    config: Any
    ranks: int = 1
    grammars: bool = False


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
        use_attribute_docstrings=True,
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


def conflicts_of(run: RunFacts) -> list[str]:
    """Return one line for each problem of settings that are valid alone but don't fit together."""

    def below(key: str, value: Any) -> Iterator[str]:
        if isinstance(value, Section):
            yield from value.conflicts(run, key)
            for name in type(value).model_fields:
                yield from below(f"{key}.{name}".removeprefix("."), getattr(value, name))
        elif isinstance(value, dict):
            for name, each in value.items():
                yield from below(f"{key}.{name}", each)

    return list(dict.fromkeys(below("", run.config)))
