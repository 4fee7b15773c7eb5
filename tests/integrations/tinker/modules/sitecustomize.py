"""Lets SkyRL's server start on Python 3.11: pydantic wants ``typing_extensions``' TypedDict there, and SkyRL has Python's."""

import sys
import typing

if sys.version_info < (3, 12):
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
