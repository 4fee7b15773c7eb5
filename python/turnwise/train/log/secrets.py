"""Hides keys and passwords of a config where it leaves the run folder: in reports, and at Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "<hidden>"
_SHORT = 6

_NAME = re.compile(
    r"(.*[_-])?(api[_-]?key|(secret|access|private)[_-]?key|(auth|access|api|bearer|hf|refresh)[_-]?token|token|secret|"
    r"password|passwd|passphrase|credentials?|authorization)",
    re.IGNORECASE,
)
"""Names of options that hold a key. ``api_key_env`` names a variable, and ``pad_token`` is a word of a tokenizer."""
_NO_NAME = re.compile(r"(pad|eos|bos|unk|sep|cls|mask|end|start|stop)[_-]token", re.IGNORECASE)
_VALUE = re.compile(r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|xox[abp]-|AKIA)[\w-]{16,}|\bBearer\s+\S+")
_USER = re.compile(r"://[^/@\s]+@")
_QUERY = re.compile(r"(?<=[?&])[\w-]*(?:key|token|secret|password|signature|sig)=[^&\s]+", re.IGNORECASE)


def secrets_in(settings: Any, name: str = "") -> Iterator[str]:
    """Yield each text in ``settings``, the data of a config, that is a secret by its name, its form or its place."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from secrets_in(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from secrets_in(value, name)
    elif isinstance(settings, str) and settings:
        if _NAME.fullmatch(name) and not _NO_NAME.fullmatch(name):
            yield settings
        yield from _VALUE.findall(settings)
        yield from _USER.findall(settings)
        yield from _QUERY.findall(settings)


def hide_secrets(settings: Any, name: str = "") -> Any:
    """Return a copy of ``settings`` with :data:`HIDDEN` in the place of each secret.

    Example: ``hide_secrets({"judge": {"api_key": "abc"}}) == {"judge": {"api_key": "<hidden>"}}``
    """
    if isinstance(settings, Mapping):
        return {key: hide_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [hide_secrets(value, name) for value in settings]
    return hide_in(settings, secrets_in(settings, name)) if isinstance(settings, str) else settings


def hide_in(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with :data:`HIDDEN` in the place of ``secrets``; short ones only where they are whole texts."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORT or secret == text:
            text = text.replace(secret, HIDDEN)
        text = text.replace(f'"{secret}"', f'"{HIDDEN}"')
    return text
