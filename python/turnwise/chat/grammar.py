"""Grammars: JSON schemas and tool calls as a completion's form, and the tokens that it allows at each position.

The package ``llguidance`` compiles them. JSON is written as Python's ``json.dumps`` writes it: one space after a colon
and a comma, no other white space. The opening of a call is the template's own tokens, one allowed at each position.
"""

from __future__ import annotations

import json
import marshal
import random
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import ChatError, Tool, tool_names
from turnwise.chat.tokenizers import own_copy
from turnwise.sandbox.limited import LimitedProcess, LimitError, Limits
from turnwise.types import AllowedTokens, DeadEndError, Grammar

MAX_SCHEMA = 1 << 16
"""Characters of a schema."""
COMPILER: dict[str, Any] = {"verbose_errors": False, "max_lexer_states": 50_000}
"""The compiler's own limits. They don't bound how it joins regular expressions, as in ``allOf``."""
CHECK = Limits(seconds=2.0, memory=512 << 20, output=1 << 20)
"""Limits of a first compilation, in another process. What fits there is compiled here, too."""
CACHED_GRAMMARS = 64
"""Compiled grammars that are kept, the latest of all tokenizers."""
WALKS, WALK_TOKENS = 12, 64
"""Random completions by which a grammar is searched for dead ends, and the most tokens of each."""
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ValueError):
    """A grammar can't be compiled, or the package that compiles it is missing."""


# -- writing grammars --------------------------------------------------------------------------------------------------
def json_grammar(format: ChatFormat, schema: Mapping[str, Any] | None) -> Grammar:
    """Return the grammar of a JSON text that fits ``schema`` (``None``: any object), and then the end of the turn."""
    return answer_grammar(format, [schema], [], [])


def call_grammar(format: ChatFormat, tools: Sequence[Tool], names: Sequence[str]) -> Grammar:
    """Return the grammar of one call of one of the tools ``names``, and then the end of the turn."""
    return answer_grammar(format, [], tools, names)


def answer_grammar(
    format: ChatFormat, schemas: Sequence[Mapping[str, Any] | None], tools: Sequence[Tool], names: Sequence[str]
) -> Grammar:
    """Return the grammar of a JSON text that fits one of ``schemas``, or of one call of one of the tools ``names``.

    Raises :class:`ChatError` for a format whose calls are not written as
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, and :class:`GrammarError` for a schema that is too
    long, or no JSON.
    """
    rules = [f"text{number}: %json {_schema_text(schema)}" for number, schema in enumerate(schemas)]
    parts = [f"text{number}" for number in range(len(schemas))]
    by_name = dict(zip(tool_names(tools), tools, strict=True))
    close = format.tokenizer.encode("</tool_call>", add_special_tokens=False)
    # llguidance takes a token of its own for a special one, which matches no text.
    closing = rf'"}}\n" <[{close[0]}]>' if len(close) == 1 else r'"}\n</tool_call>"'
    for number, name in enumerate(names):
        opening = format.tokenizer.encode(
            f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments":', add_special_tokens=False
        )
        _check_calls(format, name, by_name[name], opening)
        forced = " ".join(f"<[{token}]>" for token in opening)
        rules.append(f'call{number}: {forced} " " arguments{number} {closing}')
        rules.append(f"arguments{number}: %json {_schema_text(_parameters_of(by_name[name]))}")
        parts.append(f"call{number}")
    return Grammar("\n".join([f"start: ({' | '.join(parts)}) {_ends(format)}", *rules, ""]))


def _parameters_of(tool: Tool) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return {"type": "object", **(function.get("parameters") or {})}


def _check_calls(format: ChatFormat, name: str, tool: Tool, opening: Sequence[int]) -> None:
    """Raise :class:`ChatError` unless ``format`` reads a call with this ``opening``."""
    rest = format.tokenizer.encode(" {}}\n</tool_call>", add_special_tokens=False)
    calls = format.parse([*opening, *rest, *format.stop_token_ids[:1]], [tool]).good_calls
    if [call.name for call in calls] != [name]:
        raise ChatError(
            "tool_choice",
            f"the chat format {format.name!r} doesn't write calls as <tool_call>"
            '{"name": ..., "arguments": {...}}</tool_call>, so gateway.structured = "constrained" can\'t force them',
        )


def _ends(format: ChatFormat) -> str:
    """Return the choice of the tokens that end a turn."""
    return "(" + " | ".join(f"<[{token}]>" for token in format.stop_token_ids) + ")"


def _schema_text(schema: Mapping[str, Any] | None) -> str:
    try:
        text = json.dumps({**({"type": "object"} if schema is None else schema), "x-guidance": _JSON_STYLE})
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {type(error).__name__}: {error}") from error
    if len(text) > MAX_SCHEMA:
        raise GrammarError(f"the schema has {len(text)} characters: expected at most {MAX_SCHEMA}")
    return text


# -- matching ----------------------------------------------------------------------------------------------------------
class GrammarMatcher:
    """Follows one completion through its grammar.

    Example::

        matcher = GrammarMatcher(tokenizer, json_grammar(format, {"type": "object"}))
        matcher.allowed()  # the first token's mask
        matcher.accept(token)
    """

    def __init__(self, tokenizer: Any, grammar: Grammar) -> None:
        """Start before the first token. Raises :class:`GrammarError` for a grammar that can't be compiled."""
        compiled = _compiled(tokenizer, grammar)
        self._matcher = compiled.matcher.deep_copy()
        self._forced = compiled.forced[::-1]  # the run of forced tokens ahead, last one first; the matcher is behind it
        self.write_to(np.zeros(compiled.words, dtype=np.uint32))

    def forced_token(self) -> int:
        """Return the next token if the grammar allows no other, else -1.

        A run of such tokens, as in a JSON key, is found at once. So they cost much less than their masks.
        """
        if not self._forced:
            self._forced = _forced_run(self._matcher)[::-1]
        return self._forced[-1] if self._forced else -1

    def take_forced(self) -> list[int]:
        """Go on past the run of forced tokens that :meth:`forced_token` found, and return it."""
        run, self._forced = self._forced[::-1], []
        return run

    def write_to(self, mask: np.ndarray) -> None:
        """Write later masks into ``mask``, which has the shape and type of the present one: ``[words]`` uint32."""
        self.mask, self._address, self._bytes = mask, mask.ctypes.data, mask.nbytes

    def write_mask(self) -> None:
        """Write the next token's mask into ``mask``, where no token is forced. It is empty if no token is allowed."""
        if not self._matcher.is_stopped():  # also true after an error
            self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
            if not self._matcher.is_stopped():
                return
        self.mask[:] = 0

    def allowed(self) -> np.ndarray:
        """Return the mask ``[W]`` uint8 of the next token, as in :class:`AllowedTokens`. The next call overwrites it.

        It is empty where the grammar leads nowhere, or where the compiler's limits end.
        """
        if (token := self.forced_token()) < 0:
            self.write_mask()
        else:
            self.mask[:] = 0
            self.mask[token // 32] = 1 << token % 32
        return self.mask.view(np.uint8)

    @property
    def is_complete(self) -> bool:
        """Where no token is allowed: True if the completion has the grammar's form, False in a dead end."""
        return not self._forced and bool(self._matcher.is_accepting())

    def accept(self, token: int) -> bool:
        """Go on past ``token``. Return False if the grammar doesn't allow it."""
        if self._forced:
            return self._forced.pop() == token
        return bool(self._matcher.consume_token(token))


def check_grammar(tokenizer: Any, grammar: Grammar) -> None:
    """Compile ``grammar``, and keep it. It can take a second, without Python's lock: call it in a thread.

    Raises :class:`GrammarError` naming the part that can't be compiled, and for a grammar in which a random completion
    runs into a dead end. Rare dead ends show only while sampling (:func:`check_end`).
    """
    if not GrammarMatcher(tokenizer, grammar).allowed().any():
        raise GrammarError("no completion has the grammar's form")
    compiled = _compiled(tokenizer, grammar)
    if compiled.dead_end is None:
        compiled.dead_end = _walk(tokenizer, grammar)
    if compiled.dead_end:
        raise GrammarError(
            f"it leads into a dead end: no token may follow {compiled.dead_end!r}, which is not complete"
        )


def _walk(tokenizer: Any, grammar: Grammar) -> str:
    """Return a text after which no token is allowed although it is not complete; ``""`` if none is found.

    Half of the tokens are the marks of JSON where they are allowed, so that the walks don't stay in one text or number.
    """
    rng = random.Random(0)
    marks = [ids[0] for mark in '{["]},:' if len(ids := tokenizer.encode(mark, add_special_tokens=False)) == 1]
    for _ in range(WALKS):
        matcher, walked = GrammarMatcher(tokenizer, grammar), list[int]()
        while len(walked) < WALK_TOKENS:
            if matcher.forced_token() >= 0:
                walked += matcher.take_forced()
                continue
            bits = np.unpackbits(matcher.allowed(), bitorder="little")
            if not (allowed := np.flatnonzero(bits)).size:
                if matcher.is_complete:
                    break
                return str(tokenizer.decode(walked))
            of_json = [token for token in marks if bits[token]] if rng.random() < 0.5 else []
            walked.append(int(rng.choice(of_json or allowed)))
            matcher.accept(walked[-1])
    return ""


def check_end(tokenizer: Any, grammar: Grammar, completion: Sequence[int]) -> None:
    """Raise :class:`DeadEndError` if ``completion``, sampled under ``grammar``, came where no token is allowed.

    Servers then end it, or sample the end of the sequence.
    """
    matcher = GrammarMatcher(tokenizer, grammar)
    place = next((place for place, token in enumerate(completion) if not matcher.accept(token)), None)
    if place is not None:  # the matcher has failed
        matcher, completion = GrammarMatcher(tokenizer, grammar), completion[:place]
        for token in completion:
            matcher.accept(token)
    if not matcher.allowed().any() and not matcher.is_complete:
        raise dead_end(tokenizer, completion)


def dead_end(tokenizer: Any, completion: Sequence[int]) -> DeadEndError:
    """Return the error for a ``completion`` behind which its grammar allows no token."""
    text = tokenizer.decode(completion[-20:], skip_special_tokens=False)
    return DeadEndError(
        f"the grammar allows no token behind {text!r}, although the completion is not complete: change the schema, in "
        "which two rules exclude each other there"
    )


def allowed_tokens(tokenizer: Any, grammar: Grammar, completion: Sequence[int]) -> AllowedTokens:
    """Return the masks of all positions of a ``completion`` that was sampled under ``grammar``.

    Raises :class:`GrammarError` if the grammar doesn't allow one of its tokens.
    """
    matcher, rows = GrammarMatcher(tokenizer, grammar), dict[bytes, int]()
    index = np.empty(len(completion), dtype=np.int64)
    for position, token in enumerate(completion):
        mask = matcher.allowed()
        byte, bit = divmod(token, 8)
        if byte >= len(mask) or not mask[byte] >> bit & 1 or not matcher.accept(token):
            raise GrammarError(f"position {position}: the grammar doesn't allow token {token}")
        index[position] = rows.setdefault(mask.tobytes(), len(rows))
    return AllowedTokens(index, np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1))


_compiler = LimitedProcess()
_lock = Lock()
_tokenizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""llguidance's form of each tokenizer, which takes a second to make."""
_grammars: OrderedDict[tuple[int, str], _Compiled] = OrderedDict()
"""Compiled grammars, the latest used last, by the identity of llguidance's tokenizer, which each entry keeps."""


@dataclass(eq=False, slots=True)
class _Compiled:
    """A matcher behind its first ``forced`` tokens, to be copied. ``words`` counts the 32-bit words of a mask."""

    matcher: Any
    forced: list[int]
    vocabulary: Any
    words: int
    dead_end: str | None = None
    """The text of a dead end, ``""`` if none was found, ``None`` before the search."""


def _compiled(tokenizer: Any, grammar: Grammar) -> _Compiled:
    with _lock:
        vocabulary = _vocabulary_of(own_copy(tokenizer))
        key = id(vocabulary), grammar.text
        if key in _grammars:
            _grammars.move_to_end(key)
            return _grammars[key]
    from llguidance import LLMatcher, LLParserLimits

    try:
        _compiler.ask("grammar", grammar.text, marshal.dumps(COMPILER), CHECK)
    except LimitError as error:
        raise GrammarError(f"the grammar {error}") from None
    matcher = LLMatcher(vocabulary, grammar.text, log_level=0, limits=LLParserLimits(**COMPILER))
    if matcher.is_error():
        reason = re.sub(r"^at \d+\(\d+\): ", "", matcher.get_error().splitlines()[0])
        raise GrammarError(reason[:500])
    compiled = _Compiled(matcher, _forced_run(matcher), vocabulary, -(-vocabulary.vocab_size // 32))
    with _lock:
        _grammars[key] = compiled
        while len(_grammars) > CACHED_GRAMMARS:
            _grammars.popitem(last=False)
    return compiled


def _forced_run(matcher: Any) -> list[int]:
    """Return the tokens up to the next choice, and move the matcher past them."""
    if run := matcher.compute_ff_tokens():
        matcher.consume_tokens(run)
    return run


def _vocabulary_of(tokenizer: Any) -> Any:
    if tokenizer not in _tokenizers:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise GrammarError(
                "gateway.structured = \"constrained\" needs llguidance: pip install 'turnwise[gateway]'"
            ) from error
        try:
            _tokenizers[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:  # Rust's errors have no common type
            raise GrammarError(f"{type(tokenizer).__name__}: llguidance can't read it: {error}") from error
    return _tokenizers[tokenizer]
