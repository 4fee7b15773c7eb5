"""The grammar of one request under ``gateway.structured = "constrained"``: its schema, its forced call, or both."""

from __future__ import annotations

from turnwise.chat.continuation import Prompt
from turnwise.chat.formats import ChatFormat
from turnwise.chat.grammar import GrammarError, answer_grammar, check_grammar
from turnwise.chat.messages import ChatError, tool_names
from turnwise.integrations.gateway.wire.request import ParsedRequest, unsupported
from turnwise.types import ClientCapabilities, Grammar, capabilities_of
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.threads import to_thread


def form_field(request: ParsedRequest) -> str:
    """Return the field that asks for the form of the answer."""
    return "tool_choice" if request.choice.forced else "response_format"


async def build_grammar(
    request: ParsedRequest, prompt: Prompt, format: ChatFormat, arena: ArenaForHooks
) -> Grammar | None:
    """Return the grammar of a request's answer; ``None`` if it asks for no form.

    Raises :class:`WireError` 400 ``unsupported`` naming the field for a form that can't be constrained.
    """
    if request.output is None and not request.choice.forced:
        return None
    field = form_field(request)
    if not capabilities_of(arena.client, ClientCapabilities).grammars:
        raise unsupported(field, f"{type(arena.client).__name__} can't constrain tokens")
    if format.opens_thought(prompt.ids):
        raise unsupported(field, "the prompt opens the model's reasoning, and a grammar allows none")
    if request.messages[-1]["role"] == "assistant" and request.continues_answer:
        raise unsupported(field, "the chat ends with a begun answer, and a grammar describes whole ones")
    tools = request.readable_tools
    schemas = [] if request.output is None or request.choice.forced else [request.output.schema]
    try:
        grammar = answer_grammar(format, schemas, tools, tool_names(tools))
        await to_thread(check_grammar, format.tokenizer, grammar)
    except ChatError as error:
        raise unsupported(field, str(error)) from error
    except GrammarError as error:
        raise unsupported(field, f"the schema can't be constrained: {error}") from error
    return grammar
