"""Token ids of the rows of a supervised warm start, rendered as model calls are, and a batch of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.chat import ChatFormat, ChatRenderer
from turnwise.chat.known_formats import chat_format
from turnwise.chat.messages import SYSTEM_ROLES, Tool, with_system
from turnwise.chat.tools import schemas
from turnwise.train.config.toml import ConfigError
from turnwise.train.update.sft_rows import SFTRow
from turnwise.types import Actor, Messages, ToolSource, TrainingBatch

NAME = "warm start"
"""Name of the actor and of the policy in a batch of demonstrations."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of one prompt and its completion, the stop token included."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)


def tokenize(format: ChatFormat, row: SFTRow, prompt: Sequence[int] | None = None) -> Demonstration:
    """Tokenize the prompt as a model call would, and the completion as a model would sample it, with its end.

    ``prompt`` are the prompt's ids, if they are known.
    """
    if prompt is None:
        prompt = _Look(format).prompt_ids(row.prompt)
    if row.recorded:
        message = {"content": _without_end(format, row.completion), "reasoning_content": row.thought}
        return Demonstration(prompt, [*format.begun_ids(message, prompt), *format.end_token_ids])
    return Demonstration(prompt, _ended_once(format, format.encode(row.completion)))


def _ended_once(format: ChatFormat, completion: Sequence[int]) -> list[int]:
    """Return the ids of ``completion`` with one end: its own, if it is written in it, else the format's.

    Whitespace after a written end, as in ``"4<|im_end|>\\n"``, is no part of the turn.
    """
    ids, stops, ends = list(completion), set(format.stop_token_ids), len(completion)
    for index in reversed(range(len(ids))):
        if ids[index] in stops:
            ends = index
        elif format.tokenizer.decode(ids[index:ends]).strip():
            break
    if ends < len(ids):
        return ids[: ends + 1]
    closing = list(format.end_token_ids)  # of several, the first ones may be written
    written = next((n for n in range(len(closing), 0, -1) if ids[-n:] == closing[:n]), 0)
    return [*ids, *closing[written:]]


def _without_end(format: ChatFormat, text: str) -> str:
    """Return the text of a completion without an end of turn that is written out at its end."""
    for token in format.stop_token_ids:
        bare = text.rstrip().removesuffix(format.tokenizer.decode([token], skip_special_tokens=False))
        if len(bare) < len(text.rstrip()):
            return _without_end(format, bare)
    return text


def fitting(
    tokenizer: Any,
    rows: Sequence[SFTRow],
    max_context: int | None,
    note: Callable[[str], None] = lambda line: None,
    actors: Sequence[Actor] = (),
) -> list[Demonstration]:
    """Tokenize ``rows``, and leave out those longer than ``max_context`` tokens; ``note`` gets a line about these.

    ``max_context=None`` leaves out none. A row of one of ``actors`` is rendered as that actor's calls are, with its
    system prompt, tools and template options. So is a row of no actor where all ``actors`` have the same ones; it lacks
    those in which they differ. A recorded row keeps its tokens if this ``tokenizer`` wrote them. ``note`` also gets the
    number of rows that lack something, and of recorded ones that are rendered again. Raises :class:`ConfigError` if no
    row fits.
    """
    looks = _Looks(tokenizer, actors)
    every: list[Demonstration] = []
    rendered: tuple[SFTRow, Sequence[int]] | None = None
    ambiguous, again, goes_on = Counter[str](), 0, list[SFTRow]()
    for row in rows:
        look = looks.of(row)
        if (seen := _as_recorded(look, row)) is not None:
            every.append(seen)
            continue
        # Rendering a template takes a millisecond, so successive rows with equal prompts share its tokens.
        if rendered is None or (rendered[0].prompt, rendered[0].actor) != (row.prompt, row.actor):
            rendered = row, look.prompt_ids(row.prompt)
        every.append(tokenize(look.format, row, rendered[1]))
        if set(every[-1].completion_token_ids[:-1]) & set(look.format.stop_token_ids):
            goes_on.append(row)
        again += row.recorded and list(rendered[1]) != list(row.prompt_token_ids)
        if look.differing and not isinstance(row.prompt, str):
            ambiguous[look.differing] += 1
    for differing, count in ambiguous.items():
        note(
            f"warm start: {count} of {len(every)} rows may be of several actors, whose {differing} differ: they are "
            "rendered without these. Set 'actor' in each row, or begin its messages with the system message"
        )
    if goes_on:
        note(
            f"warm start: {len(goes_on)} of {len(every)} rows go on after a token that ends the turn, where sampling "
            f"stops: expected one turn in each, as in {goes_on[0].source}"
        )
    if again:
        note(
            f"warm start: {again} of {len(every)} rows are recorded without token ids of this model's tokenizer: their "
            "prompts are rendered again, and may differ from those that the actors saw"
        )
    fit = [demonstration for demonstration in every if max_context is None or len(demonstration) <= max_context]
    if len(fit) == len(every):
        return fit
    longest = max(range(len(every)), key=lambda i: len(every[i]))
    text = (
        f"warm start: {len(every) - len(fit)} of {len(every)} rows left out, longer than the model's context of "
        f"{max_context} tokens; the longest, {rows[longest].source}, has {len(every[longest])}"
    )
    if not fit:
        raise ConfigError(f"{text}; no row is left")
    note(text)
    return fit


@dataclass(frozen=True, slots=True)
class _Look:
    """The way in which prompts of some actors are rendered, without the parts in which these are ``differing``."""

    format: ChatFormat
    system_prompt: str = ""
    tools: Sequence[Tool] = ()
    differing: str = ""
    opens_with_control: bool = False
    """True if every prompt begins with a control token."""

    def prompt_ids(self, prompt: Messages | str) -> list[int]:
        """Return the ids of a prompt as a model call would send it."""
        if isinstance(prompt, str):
            return list(self.format.tokenizer.encode(prompt))
        return self.format.prompt_ids(with_system(prompt, self.system_prompt), self.tools)


class _Looks:
    """Finds the :class:`_Look` of a row: that of its actor, or the one that ``actors`` share."""

    def __init__(self, tokenizer: Any, actors: Sequence[Actor]) -> None:
        self.tokenizer, self.actors = tokenizer, actors
        self._looks: dict[tuple[str | None, bool], _Look] = {}
        self._formats: dict[tuple[bool, str], ChatFormat] = {}
        self._listings: dict[ToolSource, list[Tool]] = {}

    def of(self, row: SFTRow) -> _Look:
        lacks_system = not isinstance(row.prompt, str) and row.prompt[0]["role"] not in SYSTEM_ROLES
        key = row.actor, lacks_system
        if key not in self._looks:
            actors = [actor for actor in self.actors if row.actor in (None, actor.id)]
            self._looks[key] = self._shared(actors, lacks_system)
        return self._looks[key]

    def _tools_of(self, actor: Actor) -> list[Tool]:
        """Return the schemas of an actor's tools. A source is opened once for them."""
        own = [tool for tool in actor.tools if not isinstance(tool, ToolSource)]
        for source in (tool for tool in actor.tools if isinstance(tool, ToolSource)):
            if source not in self._listings:
                self._listings[source] = source.schemas()
            own += self._listings[source]
        return schemas(own)

    def _shared(self, actors: Sequence[Actor], lacks_system: bool) -> _Look:
        parts: dict[str, list[Any]] = {
            "system prompts": [actor.system_prompt for actor in actors] if lacks_system else [],
            "tools": [self._tools_of(actor) for actor in actors],
            "chat_template_kwargs": [dict(actor.chat_template_kwargs) for actor in actors],
        }
        differing = [name for name, values in parts.items() if any(value != values[0] for value in values)]
        shared = {name: values[0] for name, values in parts.items() if values and name not in differing}
        tools, options = shared.get("tools", []), shared.get("chat_template_kwargs", {})
        key = bool(tools), repr(sorted(options.items()))
        if key not in self._formats:
            known = chat_format(self.tokenizer, template_kwargs=options) if tools else None
            self._formats[key] = known or ChatRenderer(self.tokenizer, options)
        format = self._formats[key]
        opens = format.prompt_ids([{"role": "user", "content": "x"}])[0] in format.control.values()
        return _Look(format, shared.get("system prompts", ""), tools, " and ".join(differing), opens)


def _as_recorded(look: _Look, row: SFTRow) -> Demonstration | None:
    """Return the tokens that the model saw and sampled; ``None`` if the row has none of this tokenizer.

    The record doesn't name its tokenizer. It is this one if the tokens read as the recorded texts, whitespace
    aside, and the prompt begins with a control token if those of this run do. Answers and results of tools in the
    prompt don't count, as templates may change them.
    """
    prompt, completion, decode = row.prompt_token_ids, row.completion_token_ids, look.format.tokenizer.decode
    if not (prompt and completion) or isinstance(row.prompt, str):
        return None
    texts = [message["content"] for message in row.prompt if message["role"] in (*SYSTEM_ROLES, "user")]
    shown, sampled = decode(prompt, skip_special_tokens=False), decode(completion, skip_special_tokens=True)
    reads = all("".join(text.split()) in "".join(shown.split()) for text in texts)
    # The answer may go on behind a later thought.
    reads = reads and all(_is_within("".join(text.split()), sampled) for text in (row.thought, row.completion))
    if not reads or (look.opens_with_control and prompt[0] not in look.format.control.values()):
        return None
    ends = [] if completion[-1] in look.format.stop_token_ids else look.format.end_token_ids
    return Demonstration(list(prompt), [*completion, *ends])


def _is_within(text: str, whole: str) -> bool:
    """True if the characters of ``text`` stand in ``whole`` in their order."""
    characters = iter(whole)
    return all(character in characters for character in text)


def constant_credit(demonstrations: Sequence[Demonstration]) -> TrainingBatch:
    """Build a batch in which every completion has advantage 1 and reward 1."""
    lengths = np.array([len(row) for row in demonstrations])
    prompts = np.array([len(row.prompt_token_ids) for row in demonstrations])
    starts = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    tokens = [
        token for row in demonstrations for ids in (row.prompt_token_ids, row.completion_token_ids) for token in ids
    ]
    rows = len(demonstrations)
    return TrainingBatch.of_rows(
        token_ids=np.array(tokens, dtype=np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        loss_mask=(within >= np.repeat(prompts, lengths)).astype(np.uint8),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        advantages=np.ones(rows, dtype=np.float32),
        rewards=np.ones(rows, dtype=np.float32),
        temperatures=np.ones(rows, dtype=np.float32),
        actor_index=np.zeros(rows, dtype=np.int64),
        policy_index=np.zeros(rows, dtype=np.int64),
        min_version=np.zeros(rows, dtype=np.int64),
        actors=[NAME],
        policies=[NAME],
    )
