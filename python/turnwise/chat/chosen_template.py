"""A chat template that a config names, in place of the one that the tokenizer has: shipped with turnwise, or a file."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from turnwise.chat.templates import rendered
from turnwise.utils.files import read_regular
from turnwise.utils.registry import did_you_mean

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
