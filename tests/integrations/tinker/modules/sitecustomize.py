"""Lets SkyRL's server start on Python 3.11, where pydantic wants the TypedDict of ``typing_extensions``."""

import sys
import typing

if sys.version_info < (3, 12):
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
