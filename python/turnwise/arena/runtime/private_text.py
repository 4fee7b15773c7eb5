"""Private text: text for some actors only, and the comparison of prompts with it.

    observation = "Your move.\\n" + private("Your card: K.", to="player0")

marks the sentence in the running episode and returns it unchanged. The thought of each completion is marked, too. A
``MultiTurnEpisode`` marks the text of ``get_observation`` and the parts of a completion that ``public`` hides. The
report shows marked text in its reader's prompts. With ``Arena(check_private=True)``, :class:`LeakError` stops the batch
unless all of this holds:

- no prompt of another actor holds a marked text, neither at the call nor according to the marks known at the end;
- the client sampled each recorded completion of an actor for that actor;
- the training batch trains on no other tokens: prompts, and opponents' words in them, have mask 0.

Texts are compared as whole words, ignoring case and white space: "You hold 1" is not in "You hold 12". So mark
sentences, not single letters. An actor may see parts of its own texts and completions. If a marked text appears as a
whole statement inside another actor's marked text, the check treats it as copied.

The check can't detect a paraphrased secret. It ignores an unmarked observation inside another observation, because a
public board is part of both. It ignores fewer than four hidden words, unless their tags (``<think>fold</think>``) were
copied too.
"""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.types import Chat, Message, Step
from turnwise.types.prompts import Prefix, shared_length

MIN_HIDDEN_WORDS = 4
"""Fewer hidden words of a completion may occur anywhere by chance, so only the tags around them identify them."""

MIN_STATED_WORDS = 3
"""Fewer words do not count as a copied statement: they may be an item in two lists."""

_TAG = re.compile(r"</?\w[^<>]*>|<\|[^<>]*\|>|\[/?\w+\]")
_OPEN = re.compile(r"<(\w++)[^<>]*+>|\[(\w++)\]")
_CLOSE = re.compile(r"</(\w++)>|\[/(\w++)\]")
MAX_PAIRS = 1_000_000
"""Pairs of words of a text and of what is shown of it that are compared. Its time grows with them, or faster."""


class LeakError(RuntimeError):
    """An actor saw another one's private text, or would train on tokens that it did not sample.

    It is a bug in the episode's code, so it stops the whole ``generate_rollouts`` call at any ``failure_threshold``.
    """


@dataclass(slots=True)
class Mark:
    """A private text as it was written, and its readers; ``None`` means all actors, after it was revealed.

    ``observation`` texts come from ``get_observation``. The author did not mark them, so they may hold another actor's
    secret.
    """

    text: str
    readers: frozenset[str] | None
    observation: bool = False


@dataclass(slots=True)
class _Seen:
    """What was found in the latest prompt of an actor."""

    chat: Prefix[Message]
    places: dict[str, int] = field(default_factory=dict)
    """By the key of a text: the first message that holds it."""
    changes: int = 0
    """Changes of marks that it knows."""


@dataclass(slots=True)
class PrivateTexts:
    """The private texts of an episode or branch, by their normalized form."""

    marks: dict[str, Mark] = field(default_factory=dict)
    _changed: list[str] = field(default_factory=list, repr=False, compare=False)
    """Keys of marks, each time that one was added or got a reader."""
    _by_word: dict[str, list[str]] = field(default_factory=dict, repr=False, compare=False)
    """Keys of marks by a word in the middle of their text, which a message with the text has too. Branches share it."""
    _seen: dict[str | None, _Seen] = field(default_factory=dict, repr=False, compare=False)
    """By actor."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PrivateTexts.of_marks, (self.marks,)

    @property
    def changes(self) -> int:
        """Times that a mark was added or got a reader."""
        return len(self._changed)

    def marks_since(self, changes: int) -> dict[str, Mark]:
        """Return the marks that changed after the first ``changes`` times."""
        return {key: self.marks[key] for key in self._changed[changes:]}

    @classmethod
    def of_marks(cls, marks: dict[str, Mark]) -> PrivateTexts:
        texts = cls(marks)
        for key, mark in marks.items():
            texts._note(key, mark.text)
        return texts

    def _note(self, key: str, text: str | None) -> None:
        """Note that a mark changed. ``text`` is that of a new one."""
        self._changed.append(key)
        if text is not None:
            # Few marks share the rarest word; a text of fewer than three words may begin and end inside of words.
            words = text.split()[1:-1] or [""]
            found = min((self._by_word.setdefault(word, []) for word in words), key=len)
            found.append(key)

    def copy(self) -> PrivateTexts:
        marks = {key: replace(mark) for key, mark in self.marks.items()}
        return PrivateTexts(marks, list(self._changed), self._by_word)

    def add(self, text: str, readers: Iterable[str], *, observation: bool = False) -> None:
        """Mark ``text`` for ``readers``. A text marked twice is for all its readers; a revealed text stays public."""
        key = normalize_text(text)
        known = self.marks.get(key)
        if known is None:
            self.marks[key] = Mark(text, frozenset(readers), observation)
            self._note(key, text)
            return
        known.observation &= observation
        if known.readers is not None and not known.readers.issuperset(readers):
            known.readers |= frozenset(readers)
            self._note(key, None)

    def add_thought(self, thought: str, actor: str, said: str, prompt: Chat) -> None:
        """Mark what ``actor`` thought, unless it also ``said`` it, or quotes its prompt, whose secrets have marks."""
        known = [normalize_text(text) for text in (said, *(text_of(message["content"]) for message in prompt))]
        for part in hidden_parts(thought, ""):
            if not any(contains_phrase(text, normalize_text(part)) for text in known):
                self.add(part, [actor])

    def reveal(self, text: str) -> None:
        key = normalize_text(text)
        is_new = key not in self.marks
        self.marks[key] = Mark(text, None)
        self._note(key, text if is_new else None)

    def merge(self, other: PrivateTexts) -> None:
        """Add the marks of a finished nested episode."""
        for mark in other.marks.values():
            if mark.readers is None:
                self.reveal(mark.text)
            else:
                self.add(mark.text, mark.readers, observation=mark.observation)

    def mark_heard(self, speaker: str, heard: Mapping[str, str]) -> None:
        """Add readers to the texts that ``speaker`` said to them; ``heard`` maps a reader to the words it heard."""
        for reader, words in heard.items():
            said = normalize_text(words)
            for key, mark in self.marks.items():
                if mark.readers is not None and speaker in mark.readers and contains_phrase(said, key):
                    mark.readers |= {reader}
                    self._note(key, None)

    def shown(self, actor: str | None, messages: Chat) -> list[str]:
        """Return the texts marked for ``actor`` that occur literally in ``messages``, for the report.

        What an earlier prompt of the actor shares with this one is searched for new marks alone.
        """
        if not self.marks:
            return []
        messages = messages if isinstance(messages, Prefix) else Prefix.of_messages(messages)
        seen = self._seen.get(actor)
        known = 0 if seen is None else shared_length(seen.chat, messages)
        places = {} if seen is None else {key: place for key, place in seen.places.items() if place < known}
        changes = self._changed[0 if seen is None else seen.changes :]
        if changes and known:
            before = [text_of(message["content"]) for message in messages[:known]]
            for key in changes:
                text = self.marks[key].text
                place = next((place for place, shown in enumerate(before) if text in shown), None)
                if place is not None:
                    places[key] = place
        for place, message in enumerate(messages[known:], known):
            content = text_of(message["content"])
            for word in {"", *content.split()}:
                for key in self._by_word.get(word, ()):
                    mark = self.marks.get(key)  # it may be another branch's
                    if mark is not None and mark.text in content:
                        places.setdefault(key, place)
        self._seen[actor] = _Seen(messages, places, len(self._changed))
        mine = {key for key in places if actor in (self.marks[key].readers or ())}
        return [mark.text for key, mark in self.marks.items() if key in mine] if mine else []

    def leak(self, actor: str, messages: Chat, steps: Iterable[Step | None]) -> Mark | None:
        """Return a mark in ``messages`` that ``actor`` may not see. Its own completions in ``steps`` are allowed."""
        hidden = {
            key: mark for key, mark in self.marks.items() if mark.readers is not None and actor not in mark.readers
        }
        if not hidden:
            return None
        # Find the hidden texts in the prompt.
        prompt = "\0".join(normalize_text(text_of(message["content"])) for message in messages)
        present = [key for key in hidden if contains_phrase(prompt, key)]
        if not present:
            return None
        # A hidden text is no leak where it is part of the actor's own completions or of texts that it may see.
        own = {step.completion for step in steps if step is not None and step.actor_id == actor}
        said = [normalize_text(text) for text in own]
        seen = {key: mark for key, mark in self.marks.items() if key not in hidden}
        for key in present:
            # An actor may see any part of a text that it may see. But an observation does not excuse a marked secret.
            marked = not hidden[key].observation
            excuses = [text for text in said if key in text]
            excuses += [
                text
                for text, mark in seen.items()
                if key in text and not (marked and (mark.observation or is_stated(mark.text, key)))
            ]
            if contains_phrase(remove_phrases(prompt, excuses), key):
                return hidden[key]
        return None

    def is_open(self, text: str, messages: Chat) -> bool:
        """True if ``messages`` hold ``text`` outside of private texts, for example in a format instruction."""
        shut = [key for key, mark in self.marks.items() if mark.readers is not None]
        key = normalize_text(text)
        return any(
            contains_phrase(remove_phrases(normalize_text(text_of(message["content"])), shut), key)
            for message in messages
        )


def hidden_parts(text: str, shown: str) -> list[str]:
    """Return the parts of ``text`` missing from ``shown``: ``MIN_HIDDEN_WORDS`` or more words, fewer with their tags.

    Example: ``hidden_parts("<think>He may hold the king.</think> fold", "fold") == ["He may hold the king"]``, and
    ``hidden_parts("<think>the king</think> fold", "fold") == ["<think>the king</think>"]``
    """
    if shown and shown in text:
        before, _, after = text.partition(shown)
        runs = [before.split(), after.split()]
    else:
        words, left = text.split(), shown.split()
        if len(words) * len(left) > MAX_PAIRS:
            words, left = _middles(words, left)
        codes = difflib.SequenceMatcher(None, words, left, autojunk=False).get_opcodes()
        runs = [words[start:end] for kind, start, end, _, _ in codes if kind in ("delete", "replace")]
    return [part for run in runs for part in _parts_of(" ".join(run))]


def _parts_of(run: str) -> list[str]:
    """Return the parts of a hidden run of words that can't be mistaken for ordinary words."""
    between = [re.sub(r"^\W+|(?<!\W)\W++$", "", words) for words in _TAG.split(run)]
    if long := [words for words in between if len(words.split()) >= MIN_HIDDEN_WORDS]:
        return long
    if len(run.split()) >= MIN_HIDDEN_WORDS:
        return [run]
    closes: dict[tuple[str | None, ...], list[tuple[int, int]]] = {}
    for close in _CLOSE.finditer(run):
        closes.setdefault(close.groups(), []).append(close.span())
    tagged, at = [], 0
    for opened in _OPEN.finditer(run):
        found = closes.get(opened.groups(), [])
        place = bisect.bisect_left(found, (opened.end(), 0))
        if opened.start() >= at and place < len(found):
            start, at = found[place]
            if re.search(r"\w", run[opened.end() : start]):
                tagged.append(run[opened.start() : at])
    return tagged


def _middles(words: list[str], left: list[str]) -> tuple[list[str], list[str]]:
    """Return what differs between the equal beginnings and ends of two long texts, the second one empty.

    So all words of the first one count as hidden there.
    """
    pairs = enumerate(zip(words, left, strict=False))
    first = next((place for place, (word, other) in pairs if word != other), min(len(words), len(left)))
    most = min(len(words), len(left)) - first
    pairs = enumerate(zip(reversed(words), reversed(left), strict=False))
    last = min(most, next((place for place, (word, other) in pairs if word != other), most))
    return words[first : len(words) - last], []


# ---------------------------------------------------------------------------------------------------------------------
# How texts are compared
# ---------------------------------------------------------------------------------------------------------------------
def normalize_text(text: str) -> str:
    """Return ``text`` in lower case, with single blanks for white space."""
    return " ".join(text.split()).casefold()


def contains_phrase(text: str, part: str) -> bool:
    """True if ``part`` occurs in ``text`` as whole words and numbers; both normalized."""
    if part not in text:
        return False
    before = r"(?<!\w)" * part[0].isalnum() + r"(?<!\d[.,])" * part[0].isdigit()
    after = r"(?!\w)" * part[-1].isalnum() + r"(?![.,]\d)" * part[-1].isdigit()
    return re.search(before + re.escape(part) + after, text) is not None


def is_stated(text: str, part: str) -> bool:
    """True if ``part`` (normalized) is a statement in ``text``: whole sentences or lines."""
    words = part.split()
    if len(words) < MIN_STATED_WORDS:
        return False
    pattern = r"\s+".join(map(re.escape, words))
    end = r"(?!\w|[.,]\d)" if words[-1][-1] in ".!?;" else r"\s*(?:$|[\n.!?;)\]>\"'<](?!\d))"
    lines = (" ".join(line.split()) for line in text.casefold().split("\n"))
    text = "\n".join(line for line in lines if line)
    return re.search(rf"(?:^|[\n.!?:;(\[>\"'])\s*{pattern}{end}", text) is not None


def remove_phrases(text: str, parts: Iterable[str]) -> str:
    """Return ``text`` without ``parts``, removed longest first, each replaced by a NUL."""
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, "\0")
    return text


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    return "\n".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in parts)
