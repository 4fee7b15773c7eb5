"""Converts chats to token ids and completions back to messages, and continues a chat on its sampled tokens.

Read in this order: messages, parts, tokenizers, templates, render, thoughts, calls, formats, known_formats,
histories, continuation, tools, grammar.
May import: types, utils, sandbox.
"""

from turnwise.chat.formats import ChatFormat, ChatRenderer
from turnwise.chat.tokenizers import keep_ends

__all__ = ["ChatFormat", "ChatRenderer", "keep_ends"]
