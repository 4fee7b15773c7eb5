"""Converts chats to token ids and completions back to messages, and continues a chat on its sampled tokens.

Read in this order: render, messages, formats, known_formats, continuation, tools.
May import: types, utils.
"""

from turnwise.chat.render import ChatRenderer

__all__ = ["ChatRenderer"]
