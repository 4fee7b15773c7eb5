"""The dialects that agents speak: OpenAI's Chat Completions and Responses, and Anthropic's Messages.

Read in this order: bodies, chats, request, openai_chat, openai_responses, anthropic_messages.
May import: types, chat.
"""
