"""The base class of every section of the config file."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of the config file, described by its docstring; the string below a field describes the field."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        allow_inf_nan=False,  # in typed fields; tables of options may hold inf and nan,
        ser_json_inf_nan="constants",  # which dumps keep: the default would make them None
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject ``true`` and ``false`` for a number: ``eval.every = true`` must not mean 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError("expected a number")
        return value
