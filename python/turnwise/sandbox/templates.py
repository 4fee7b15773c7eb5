"""Render the chat templates of model folders in a process with limits of time, memory and output.

A template is a program: ``{% set x = x ~ x %}`` in a loop doubles a text, and ``'%999999999d' % 1`` is one long call.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any

from turnwise.sandbox.limited import LimitedProcess, LimitError, Limits

MAX_TEMPLATE = 1 << 20
"""Characters of a template. The longest of known models have 30,000."""
SECONDS, SECONDS_PER_MIB = 1.0, 2.0
"""CPU time of a rendering, and more of it for each MiB of its chat."""
MEMORY, MEMORY_PER_BYTE = 128 << 20, 32
"""Bytes of a rendering beyond the interpreter's own, and more of them for each byte of its chat."""
OUTPUT, OUTPUT_PER_BYTE = 4 << 20, 16
"""Bytes of the text, and more of them for each byte of its chat."""
_renderer = LimitedProcess()


class TemplateError(ValueError):
    """A chat template refuses a chat, or can't be compiled."""


class TemplateLimitError(TemplateError):
    """A chat template takes more time or memory than a chat's length justifies, or writes more."""


def render_template(template: str, variables: Mapping[str, Any], owner: str) -> str:
    """Return the text of a chat ``template`` with ``variables``, as ``transformers`` renders it.

    ``owner`` is the folder of the template, for errors. Raises :class:`TemplateError`, :class:`TemplateLimitError`, and
    ``TypeError`` for variables that are no plain numbers, texts, lists and mappings.
    """
    if len(template) > MAX_TEMPLATE:
        raise TemplateLimitError(
            f"the chat template of {owner!r} has {len(template)} characters: expected at most {MAX_TEMPLATE}"
        )
    try:
        content = marshal.dumps(dict(variables))
    except ValueError:  # it takes only the types themselves
        content = marshal.dumps(_plain(variables))
    size = len(content)
    limits = Limits(
        SECONDS + SECONDS_PER_MIB * size / 2**20,
        MEMORY + MEMORY_PER_BYTE * size,
        OUTPUT + OUTPUT_PER_BYTE * size,
    )
    try:
        is_text, text = _renderer.ask("template", template, content, limits)
    except LimitError as error:
        raise TemplateLimitError(f"the chat template of {owner!r} {error}. Use only templates that you trust") from None
    if not is_text:
        raise TemplateError(f"the chat template of {owner!r}: {text}")
    return text


def _plain(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None:
        return None
    raise TypeError(f"a chat template got {value!r:.200}: expected a number, a text, a list or a mapping")
