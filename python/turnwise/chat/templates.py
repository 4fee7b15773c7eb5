"""Chat templates: how a tokenizer applies its own, and example chats that show what one does."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Set
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from turnwise.chat.messages import Tool
from turnwise.sandbox.templates import render_template
from turnwise.types import Messages, Tokenizer
from turnwise.utils.files import read_regular
from turnwise.utils.registry import did_you_mean

EXAMPLE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "x",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
EXAMPLE_CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
EXAMPLE_CHAT: Messages = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "x", "reasoning_content": "x", "tool_calls": [EXAMPLE_CALL]},
    {"role": "tool", "content": "x", "tool_call_id": "call_0", "name": "look"},
]
"""A harmless chat that contains every mark of a template: roles, reasoning, a tool, a call and its result."""

NEIGHBOURS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("user", "user"): (("user",), (("user", "user"), 0, 1), (("user", "assistant", "user", "user"), 2, 3)),
    ("assistant", "assistant"): (("user", "assistant", "user"), (("user", "assistant", "assistant", "user"), 1, 2)),
    ("tool", "user"): (("user", "call", "tool"), (("user", "call", "tool", "user"), 2, 3)),
    ("", "assistant"): (("user", "assistant", "user"), (("assistant", "user"), 0)),
}
"""Roles behind each other that some templates refuse, ``""`` for the beginning of a chat: the roles of a chat without
them, and chats with them, each with the places of the messages that must be in the prompt."""

CONTENTS: tuple[Callable[[str], Any], ...] = (str, lambda text: [{"type": "text", "text": text}])
"""A text as the content of a message. Templates of models that see images may take only the second form."""


def template_text(tokenizer: Any, messages: Messages, add_generation_prompt: bool = True, **options: Any) -> str | None:
    """Return the text of a chat by a Hugging Face tokenizer's template, which is bounded in time, memory and length.

    Returns ``None`` for other tokenizers, and for those with an ``apply_chat_template`` of their own, which is code.
    """
    apply: Any = getattr(tokenizer, "apply_chat_template", None)
    base: Any = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", None)
    if base is None or getattr(apply, "__func__", None) is not base.apply_chat_template:
        return None
    tools = options.get("tools")
    template = tokenizer.get_chat_template(options.pop("chat_template", None), tools)
    if unknown := [name for name in options if name in _taken(base) and name not in ("tools", "documents")]:
        raise ValueError(f"chat_template_kwargs={unknown}: expected variables of the template")
    variables = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **options}
    variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    return render_template(str(template), variables, tokenizer.name_or_path or type(tokenizer).__name__)


@cache
def _taken(base: Any) -> Set[str]:
    """Return the names of the arguments of ``apply_chat_template`` of Hugging Face's tokenizers."""
    return inspect.signature(cast(Callable[..., Any], base.apply_chat_template)).parameters.keys()


def rendered(tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool = True, **options: Any) -> list[int]:
    """Return the template's ids of a chat, from tokenizers that return a list and from those that return a mapping."""
    ids: Any
    if (text := template_text(tokenizer, messages, add_generation_prompt, **options)) is not None:
        ids = tokenizer(text, add_special_tokens=False)  # type: ignore[operator]
    else:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, **options
        )
    if type(ids) is not list and isinstance(ids, Mapping):
        ids = ids["input_ids"]
    ids = list(ids)
    if len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = list(ids[0])
    return ids if set(map(type, ids)) == {int} else [int(token) for token in ids]


# ---- a template that a config names, in place of the tokenizer's ----
SHIPPED = ("chatml",)
"""Names of the templates in the folder ``shipped``."""

_TOKENS = re.compile(r"<\|\w+\|>")
"""A control token, as the shipped templates write them."""


def use_template(tokenizer: Any, chosen: str) -> None:
    """Give ``tokenizer`` the template of this name of :data:`SHIPPED`, or in this file.

    Raises ``ValueError`` for another name, for a file that can't be read, for control tokens of a shipped template
    that the tokenizer doesn't have, and for a template that fails on a plain chat.
    """
    if chosen in SHIPPED:
        text = (resources.files("turnwise.chat") / "shipped" / f"{chosen}.jinja").read_text(encoding="utf-8")
        missing = sorted(set(_TOKENS.findall(text)) - set(tokenizer.get_vocab()))
        if missing:
            raise ValueError(f"the tokenizer has no {' and no '.join(missing)}, which this template writes")
    elif not Path(chosen).is_file():
        raise ValueError(f"expected a file with a Jinja template, or a name; {did_you_mean(chosen, SHIPPED)}")
    else:
        text = read_regular(chosen).decode("utf-8")
    tokenizer.chat_template = text
    try:
        rendered(tokenizer, [{"role": "user", "content": "x"}])
    except Exception as error:  # whatever a template raises
        raise ValueError(f"the template fails on a plain chat: {str(error).strip().splitlines()[0]}") from error
