"""The libraries that ``bench_grammars.py`` compares: how each compiles a JSON schema and follows a document."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from packaging.requirements import Requirement

from turnwise.chat import ChatFormat
from turnwise.chat.grammar import GrammarMatcher, check_grammar, json_grammar
from turnwise.chat.tokenizers import TokenBytes


def special_tokens(tokenizer: Any) -> set[int]:
    return {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}


class Matcher(NamedTuple):
    """Follows one document: the mask of the next token as 32-bit words, a step past a token, and if it is foreseen."""

    mask: Callable[[], np.ndarray]
    accept: Callable[[int], Any]
    forces: Callable[[int], bool]


class Method(NamedTuple):
    """A library with a tokenizer: compiles a schema, and starts a document. ``compile`` raises on what it can't."""

    name: str
    compile: Callable[[dict[str, Any]], Any]
    start: Callable[[Any], Matcher]


def turnwise(tokenizer: Any, threads: int) -> Method:
    format = ChatFormat(tokenizer)

    def compile(schema: dict[str, Any]) -> Any:
        grammar = json_grammar(format, schema)
        check_grammar(format.tokenizer, grammar)
        return grammar

    def start(grammar: Any) -> Matcher:
        matcher = GrammarMatcher(format.tokenizer, grammar)
        return Matcher(matcher.allowed, matcher.accept, lambda token: matcher.forced_token() == token)

    return Method("turnwise", compile, start)


def llguidance(tokenizer: Any, threads: int) -> Method:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    vocabulary = from_tokenizer(tokenizer)
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

    def compile(schema: dict[str, Any]) -> Any:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema({**schema, "x-guidance": style}))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(compiled: Any) -> Matcher:
        matcher, words = compiled.deep_copy(), np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.uint32)

        def mask() -> np.ndarray:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return words

        return Matcher(mask, matcher.consume_token, lambda token: matcher.compute_ff_tokens()[:1] == [token])

    return Method("llguidance", compile, start)


def xgrammar(tokenizer: Any, threads: int) -> Method:
    import xgrammar as library

    info = library.TokenizerInfo.from_huggingface(tokenizer)
    compiler = library.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
    bytes_of = TokenBytes(tokenizer)

    def start(compiled: Any) -> Matcher:
        matcher, words = library.GrammarMatcher(compiled), library.allocate_token_bitmask(1, info.vocab_size)
        view = words.numpy()[0]

        def mask() -> np.ndarray:
            matcher.fill_next_token_bitmask(words)
            return view

        def forces(token: int) -> bool:
            return matcher.find_jump_forward_string().encode().startswith(bytes_of(token))

        return Matcher(mask, matcher.accept_token, forces)

    return Method("xgrammar", lambda schema: compiler.compile_json_schema(schema, any_whitespace=False), start)


def outlines_core(tokenizer: Any, threads: int) -> Method:
    from outlines_core import Guide, Index, Vocabulary, json_schema

    bytes_of, texts = TokenBytes(tokenizer), dict[bytes, list[int]]()
    for token in sorted(set(range(len(tokenizer))) - special_tokens(tokenizer)):
        texts.setdefault(bytes_of(token), []).append(token)
    vocabulary = Vocabulary(tokenizer.eos_token_id, texts)

    def compile(schema: dict[str, Any]) -> Any:
        return Index(json_schema.build_regex_from_schema(json.dumps(schema)), vocabulary)

    def start(compiled: Any) -> Matcher:
        guide, words = Guide(compiled), np.zeros(-(-len(tokenizer) // 32), dtype=np.uint32)

        def mask() -> np.ndarray:
            guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)
            return words

        def accept(token: int) -> bool:
            if token != tokenizer.eos_token_id:  # which a mask allows, and no step takes
                guide.advance(token, False)
            return True

        return Matcher(mask, accept, lambda token: False)

    return Method("outlines-core", compile, start)


PEERS = {"turnwise": turnwise, "llguidance": llguidance, "xgrammar": xgrammar, "outlines-core": outlines_core}


def missing(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is None


# -- compiling, and following documents ------------------------------------------------------------------------------
LIMIT_S = 20
"""Seconds that a schema may take to compile."""


def compiles(method: Method, schema: dict[str, Any]) -> bool:
    """Compile ``schema`` in a process of its own first, as a library may take hours."""
    child = multiprocessing.get_context("fork").Process(target=method.compile, args=(schema,))
    child.start()
    child.join(LIMIT_S)
    child.kill()
    child.join()
    return child.exitcode == 0


def follow(method: Method, compiled: Any, tokens: Sequence[int]) -> tuple[np.ndarray, list[bool], bool]:
    """Return the masks ``[T, W]``, if each token is foreseen, and if all are allowed: it ends at one that isn't."""
    matcher, masks, forced = method.start(compiled), list[np.ndarray](), list[bool]()
    for token in tokens:
        forced.append(matcher.forces(token))
        masks.append(matcher.mask().view(np.uint32).copy())
        if not masks[-1][token // 32] >> token % 32 & 1:
            return np.stack(masks), forced, False
        assert matcher.accept(token), f"{method.name}: the mask allows token {token}, and the step doesn't"
    return np.stack(masks), forced, True


def step_times(method: Method, compiled: Any, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return the nanoseconds of each mask, and of each step."""
    matcher, times = method.start(compiled), []
    for token in tokens:
        start = time.thread_time_ns()
        matcher.mask()
        masked = time.thread_time_ns()
        matcher.accept(token)
        times.append((masked - start, time.thread_time_ns() - start))
    return times


# -- packages ----------------------------------------------------------------------------------------------------------
def installed(package: str) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=package)), None)


def needs(package: str) -> list[str]:
    """Return the packages that ``package`` requires here, without its extras."""
    found = installed(package)
    lines = map(Requirement, (found and found.requires) or [])
    return [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]


def needs_of_all(package: str, seen: set[str]) -> set[str]:
    """Add the packages that ``package`` requires, directly or not, to ``seen``, and return it."""
    for name in map(str.lower, needs(package)):
        if name not in seen:
            seen.add(name)
            needs_of_all(name, seen)
    return seen


def megabytes(package: str) -> float:
    """Return the size of the installed files."""
    found = installed(package)
    return sum(file.size or 0 for file in (found and found.files) or []) / 1e6


def package_row(package: str) -> dict[str, Any]:
    """Return what installing ``package`` beside turnwise brings."""
    found = importlib.metadata.distribution(package)
    added = sorted(needs_of_all(package, set()) - needs_of_all("turnwise", set()))
    tags = [line.split(": ")[1] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    return {
        "method": package, "version": found.version, "requires": len(needs(package)), "MB": megabytes(package),
        "brings": ", ".join(f"{name} ({megabytes(name):.0f} MB)" for name in added), "wheel": tags[-1],
    }  # fmt: skip
