"""Text for one seat alone: how it is marked, and the check that no other actor's prompt ever held it.

    observation = "Your move.\\n" + private("Your card: K.", to="player0")

marks the sentence for the running episode and returns it as it is, so it may be joined and formatted like any text. A
``MultiTurnEpisode`` marks by itself what ``get_observation`` returns, and what ``public`` hides of a completion. The
report shows marked text in the prompt of whom it is for. With ``Arena(check_private=True)`` three things are proved of
every episode, or :class:`LeakError` stops the batch with the rollout and the step:

- no prompt of another actor holds a marked text, neither when the call is made nor by what is known at the end;
- each recorded completion of an actor is one that the client sampled for that very actor;
- in the training batch nothing but such completions trains: prompts, and opponents' words in them, have mask 0.

Texts are compared without regard to case and white space, and as whole words: "You hold 1" is not in "You hold 12". So
mark sentences, not single letters. What an actor may see (its own texts, its own completions) it may see parts of; but
a marked text that is a statement by itself in another's marked text was copied there.

What the check can't see: a secret in other words; an observation that nobody marked, in another's observation, since a
board that all may see stands in both; and fewer than four words that ``public`` hides, unless the tags around them
(``<think>fold</think>``) were copied too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.types import GenerateResult, Messages, Step, TrainingBatch

if TYPE_CHECKING:
    from turnwise.arena.context import EpisodeContext

MIN_HIDDEN_WORDS = 4
"""Fewer words that ``public`` hides of a completion may stand anywhere by chance: only the tags around them tell."""

MIN_STATED_WORDS = 3
"""Fewer words are no statement that must have been copied: they may be an item of two lists."""

_TAG = re.compile(r"</?\w[^<>]*>|<\|[^<>]*\|>|\[/?\w+\]")
_TAGGED = re.compile(r"<(\w+)[^<>]*>(?P<a>.*?)</\1>|\[(\w+)\](?P<b>.*?)\[/\3\]")


class LeakError(RuntimeError):
    """An actor was shown another one's private text, or would train on tokens that it did not sample.

    A fault of the episode, not of one play: it stops the whole call of ``generate_rollouts``, whatever
    ``failure_threshold`` allows.
    """


@dataclass(slots=True)
class Mark:
    """A private text as it was written, and who may see it; ``None`` is everybody, since it was revealed.

    ``observation`` texts were not marked by the episode: they are what ``get_observation`` returned, and may hold
    anything, another's secret among it.
    """

    text: str
    readers: frozenset[str] | None
    observation: bool = False


@dataclass(slots=True)
class PrivateTexts:
    """What is private in an episode, or in a branch of it. Keys are texts as they are compared."""

    marks: dict[str, Mark] = field(default_factory=dict)

    def copy(self) -> PrivateTexts:
        return PrivateTexts({key: replace(mark) for key, mark in self.marks.items()})

    def add(self, text: str, readers: Iterable[str], *, observation: bool = False) -> None:
        """Mark ``text`` for ``readers``; a text that is marked twice is for all of them, a revealed one stays so."""
        key = comparable(text)
        known = self.marks.setdefault(key, Mark(text, frozenset(readers), observation))
        known.observation &= observation
        if known.readers is not None:
            known.readers |= frozenset(readers)

    def reveal(self, text: str) -> None:
        self.marks[comparable(text)] = Mark(text, None)

    def take(self, other: PrivateTexts) -> None:
        """Add the marks of a nested episode that has ended."""
        for mark in other.marks.values():
            if mark.readers is None:
                self.reveal(mark.text)
            else:
                self.add(mark.text, mark.readers, observation=mark.observation)

    def spoken(self, speaker: str, heard: Mapping[str, str]) -> None:
        """What ``speaker`` may see and says aloud is known to whoever hears it; ``heard`` is reader -> words."""
        for reader, words in heard.items():
            said = comparable(words)
            for key, mark in self.marks.items():
                if mark.readers is not None and speaker in mark.readers and holds(said, key):
                    mark.readers |= {reader}

    def shown(self, actor: str | None, messages: Messages) -> list[str]:
        """The texts marked for ``actor`` that stand in ``messages``, letter for letter: what a report marks."""
        mine = [mark.text for mark in self.marks.values() if mark.readers is not None and actor in mark.readers]
        return [text for text in mine if any(text in text_of(message["content"]) for message in messages)]

    def leak(self, actor: str, messages: Messages, steps: Iterable[Step | None]) -> Mark | None:
        """A mark that ``actor`` may not see and ``messages`` hold; of ``steps`` its own completions it may see."""
        hidden = {
            key: mark for key, mark in self.marks.items() if mark.readers is not None and actor not in mark.readers
        }
        if not hidden:
            return None
        prompt = "\0".join(comparable(text_of(message["content"])) for message in messages)
        found = [key for key in hidden if holds(prompt, key)]
        if not found:
            return None
        own = {step.completion for step in steps if step is not None and step.actor_id == actor}
        said = [comparable(text) for text in own]
        seen = {key: mark for key, mark in self.marks.items() if key not in hidden}
        for key in found:
            # What may be seen may be seen in part; but an observation can't make another's marked secret its own.
            marked = not hidden[key].observation
            excuses = [text for text in said if key in text]
            excuses += [
                text
                for text, mark in seen.items()
                if key in text and not (marked and (mark.observation or is_stated(mark.text, key)))
            ]
            if holds(without(prompt, excuses), key):
                return hidden[key]
        return None

    def is_open(self, text: str, messages: Messages) -> bool:
        """Whether ``messages`` hold ``text`` outside of what is private in them, as the format of an answer."""
        shut = [key for key, mark in self.marks.items() if mark.readers is not None]
        key = comparable(text)
        return any(holds(without(comparable(text_of(message["content"])), shut), key) for message in messages)


def private(text: str, to: str | Collection[str]) -> str:
    """Mark ``text`` as for the actor ``to`` (or several) alone, in the running episode; returns ``text`` itself.

    Outside of an episode there is nobody to keep it from, and it is only returned. Raises ``ValueError`` for a blank
    text, or without readers.

    Example: ``f"{board}\\n{private('Your card: K.', to=state.current_actor)}"``
    """
    from turnwise.arena.context import current_context

    readers = [to] if isinstance(to, str) else list(to)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text={text!r}: expected a text that is not blank")
    if not readers or not all(isinstance(reader, str) and reader for reader in readers):
        raise ValueError(f"to={to!r}: expected the id of an actor, or several")
    context = current_context()
    if context is not None:
        context.private.add(text, readers)
    return text


def reveal(text: str) -> str:
    """From now on ``text`` is for everybody, as at a showdown; returns ``text`` itself."""
    from turnwise.arena.context import current_context

    context = current_context()
    if context is not None:
        context.private.reveal(text)
    return text


def hidden_parts(text: str, shown: str) -> list[str]:
    """What ``shown`` lacks of ``text``: runs of ``MIN_HIDDEN_WORDS`` or more between tags; fewer with their tags.

    Example: ``hidden_parts("<think>He may hold the king.</think> fold", "fold") == ["He may hold the king"]``, and
    ``hidden_parts("<think>the king</think> fold", "fold") == ["<think>the king</think>"]``
    """
    if shown and shown in text:
        before, _, after = text.partition(shown)
        runs = [before.split(), after.split()]
    else:
        words, left = text.split(), shown.split()
        codes = difflib.SequenceMatcher(None, words, left, autojunk=False).get_opcodes()
        runs = [words[start:end] for kind, start, end, _, _ in codes if kind in ("delete", "replace")]
    return [part for run in runs for part in _parts_of(" ".join(run))]


def _parts_of(run: str) -> list[str]:
    """What of a hidden run of words can be told from ordinary words, wherever it stands."""
    between = [re.sub(r"^\W+|\W+$", "", words) for words in _TAG.split(run)]
    if long := [words for words in between if len(words.split()) >= MIN_HIDDEN_WORDS]:
        return long
    if len(run.split()) >= MIN_HIDDEN_WORDS:
        return [run]
    return [found[0] for found in _TAGGED.finditer(run) if re.search(r"\w", found["a"] or found["b"] or "")]


# ---------------------------------------------------------------------------------------------------------------------
# The checks; the arena calls them
# ---------------------------------------------------------------------------------------------------------------------
def check_prompt(context: EpisodeContext, actor: str | None, messages: Messages) -> None:
    """Raise :class:`LeakError` if ``actor`` is about to be shown a text that is not for it. Judges see all."""
    if actor is None:
        return
    mark = context.private.leak(actor, messages, (*context.state.trajectory, *context.steps))
    if mark is not None:
        raise LeakError(_tell(context, len(context.steps), actor, mark))


def check_episode_end(context: EpisodeContext) -> None:
    """Raise :class:`LeakError` for a prompt that held what was marked later, or a completion of somebody else's."""
    if context.ends:
        # Each has marks of its own: what is secret on one way through a game may be open on another.
        for end in context.ends:
            check_way(context, end.context.private, end.steps)
    else:
        check_way(context, context.private, context.rollout.steps)
    for index, step in enumerate(context.rollout.steps):
        if step.actor_id is None:
            continue
        if step.trainable and sampled_key(step.actor_id, step.completion_token_ids) not in context.sampled:
            raise LeakError(
                f"step {index} of rollout {context.rollout.id!r}: the completion of actor {step.actor_id!r} was not "
                "sampled for it, and it would train on it"
            )


def check_way(context: EpisodeContext, private: PrivateTexts, steps: Sequence[Step]) -> None:
    """Raise :class:`LeakError` for a prompt of ``steps`` that held what ``private`` now keeps from its reader."""
    for step in steps:
        mark = None if step.actor_id is None else private.leak(step.actor_id, step.prompt, steps)
        if mark is not None:
            known = (other for other in context.steps if other is not None)
            number = next(place for place, other in enumerate(known) if other is step)
            raise LeakError(_tell(context, number, str(step.actor_id), mark))


def check_batch(batch: TrainingBatch, results: Sequence[GenerateResult]) -> None:
    """Raise :class:`LeakError` unless each row of ``batch`` trains on tokens that its own actor sampled.

    A row is the prompt and the completion of one recorded call of the row's actor, and its mask is 0 on the prompt.
    """
    prompts: dict[Hashable, set[int]] = {}
    for step in (step for top in results for result in top.walk() for step in result.rollout.steps):
        key = (step.actor_id, tuple(step.prompt_token_ids) + tuple(step.completion_token_ids))
        prompts.setdefault(key, set()).add(len(step.prompt_token_ids))
    for row in range(len(batch)):
        start, end = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        actor = batch.actors[int(batch.actor_index[row])]
        lengths = prompts.get((actor, tuple(batch.token_ids[start:end].tolist())))
        if lengths is None:
            raise LeakError(f"row {row} of the batch: no recorded call of actor {actor!r} has its tokens")
        trained = np.flatnonzero(batch.loss_mask[start:end])
        if len(trained) and trained[0] < min(lengths):
            raise LeakError(
                f"row {row} of the batch: actor {actor!r} would train on token {int(trained[0])}, and its own "
                f"completion begins at {min(lengths)}"
            )


def sampled_key(actor: str | None, token_ids: Sequence[int]) -> Hashable:
    return actor, tuple(token_ids)


def _tell(context: EpisodeContext, index: int, actor: str, mark: Mark) -> str:
    readers = ", ".join(repr(reader) for reader in sorted(mark.readers or ()))
    return (
        f"step {index} of rollout {context.rollout.id!r} ({context.rollout.episode_type}{context.scope}): the prompt "
        f"of actor {actor!r} holds what is private to {readers}: {mark.text!r}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# How texts are compared
# ---------------------------------------------------------------------------------------------------------------------
def comparable(text: str) -> str:
    """``text`` without what a reader overlooks: runs of white space are one blank, letters are small."""
    return " ".join(text.split()).casefold()


def holds(text: str, part: str) -> bool:
    """Whether ``part`` stands in ``text`` as whole words and whole numbers; both :func:`comparable`."""
    if part not in text:
        return False
    before = r"(?<!\w)" * part[0].isalnum() + r"(?<!\d[.,])" * part[0].isdigit()
    after = r"(?!\w)" * part[-1].isalnum() + r"(?![.,]\d)" * part[-1].isdigit()
    return re.search(before + re.escape(part) + after, text) is not None


def is_stated(text: str, part: str) -> bool:
    """Whether ``part`` (comparable) stands in ``text`` as a statement: sentences or lines, with nothing beside them."""
    words = part.split()
    if len(words) < MIN_STATED_WORDS:
        return False
    pattern = r"\s+".join(map(re.escape, words))
    end = r"(?!\w|[.,]\d)" if words[-1][-1] in ".!?;" else r"\s*(?:$|[\n.!?;)\]>\"'<](?!\d))"
    return re.search(rf"(?:^|[\n.!?:;(\[>\"'])\s*{pattern}{end}", text.casefold()) is not None


def without(text: str, parts: Iterable[str]) -> str:
    """``text`` with each of ``parts`` cut out, longest first."""
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, "\0")
    return text


def text_of(content: Any) -> str:
    """The words of a message's content, which may be a text or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    return "\n".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in parts)
