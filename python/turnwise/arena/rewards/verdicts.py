"""Read a judge's verdict as a person does, or refuse it: a wrong reward is worse than none.

Both readers take the text after the reasoning, without Markdown. They read only an unambiguous value:

    a labelled value     ``Score: 7 (see rule 2)``, ``{"score": 8}``, ``<score>8</score>``, ``[[8]]``, ``Verdict: B``
    else the only value  ``I give it an 8.``, ``8/10``, ``A is better than B``

Counted things (``2 errors``), references (``rule 2``), scales (``from 1 to 10``), dates and names (``GPT-4``) are not
values. Ranges, bounds (``at least 7``), sums, and different values without a label are refused.

The time grows with the length of the text alone: white space is single, words are short, and each number is read with
the characters near it.
"""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass

from turnwise.chat.thoughts import spoken

# --- both -------------------------------------------------------------------------------------------------------------
_REASONING = re.compile(r"</?(thinking|reasoning|thought|analysis)>", re.IGNORECASE)
_SPACES = re.compile(r"[^\S\n]*+(\n)\s*+|\s++")
_LONG_WORD = re.compile(r"\w{65,}+")
_SAME = str.maketrans("−‐‑⁄∕：\u00a0\u202f\u2009０１２３４５６７８９", "---//:   0123456789")


def _plain(text: str) -> str:
    """Return the text after the reasoning, with tags as labels, and without Markdown, quotes and LaTeX.

    It has no empty lines, single spaces, and no words of more than 64 letters or digits.
    """
    text = spoken(text)
    tags = list(_REASONING.finditer(text))
    if tags:
        text = text[tags[-1].end() :] if tags[-1][0].startswith("</") else ""
    text = text.translate(_SAME)
    text = re.sub(r"\\(?:boxed|fbox)\s*\{(?:\\text\s*\{)?([^{}]*)\}+", r"[[\1]]", text)
    text = re.sub(r"\[\[([^\[\]]*)\]\]|【([^【】]*)】", r"\nverdict: \1\2\n", text)
    text = re.sub(r"</\w+>", "\n", re.sub(r"<(\w+)>", r"\n\1: ", text))
    text = re.sub(r"(?m)^#+[ \t]|[*`\"“”{}\\$|]|(?<!\w)_+|(?<!_)_++(?!\w)|(?<!\w)['‘’]|['‘’](?!\w)", "", text)
    return _SPACES.sub(lambda spaces: spaces[1] or " ", _LONG_WORD.sub("…", text))


# --- numbers ----------------------------------------------------------------------------------------------------------
_NUMBER = (
    r"(?:\d{1,3}(?:,\d{3}){1,9}(?!\d)(?:\.\d+)?|\d{1,3}(?: \d{3}){1,9}(?!\d)(?:\.\d+)?|\d+\.\d+|\.\d+|\d+)"
    r"(?:[eE][+-]?\d+)?"
)
_RANGE = rf"{_NUMBER}[ \t]*(?:-|–|—|\.{{2,3}}|…|to|through|and|or|,)[ \t]*{_NUMBER}"
_NO_VALUES = re.compile(
    rf"\b(?:scale|range|interval)\b[^.\n\d]{{0,20}}[(\[]?\s*{_RANGE}[)\]]?|{_RANGE}[ \t]+(?:scale|range|interval)\b"
    rf"|\bfrom\s+{_NUMBER}\s+to\s+{_NUMBER}|[(\[]\s*{_RANGE}\s*[)\]](?=\s*[:=])"
    r"|\b\d+([-/.:])\d+\1\d+(?:\1\d+)*\b|\b\d{1,2}:\d\d\b"
    r"|^[ \t]*(?:[-+•][ \t]+)?(?:\d{1,2}[.)]|\(\d{1,2}\))[ \t]+(?=[^\W\d])",
    re.IGNORECASE | re.MULTILINE,
)
"""Scales, dates, times, versions, and the numbers of a list."""

_VALUE = re.compile(
    rf"(?<![\w^.])(?<!\w-)(?<!\d[,/:])(?P<sign>[+-](?=[\d.]))?(?P<number>{_NUMBER})"
    rf"(?:\s*(?P<percent>%|percent\b|per cent\b)|[ \t]*(?:points?|stars?|marks?)?[ \t]*[(\[]?[ \t]*"
    rf"(?P<of>/|\bout\s+of\b|\bof\b)[ \t]*(?P<whole>{_NUMBER})(?![\w%]))?",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    rf"\w|[.,:/]\d|[ \t]*(?:[-–—~]|\.\.+|…|to|through|or|±|\+/?-)[ \t]*[+-]?{_NUMBER}|[ \t]*(?:[+*×^=±½¼¾→]|[-=]>)"
    rf"|[ \t]*(?:,|and|&)[ \t]*{_NUMBER}[ \t]*(?:[.;\n]|$)",
    re.IGNORECASE,
)
"""Continuations of a first number: a range, a sum or a list."""

_BOUNDED = re.compile(
    r"(?:(?<![-=])[<>]|[≤≥~±^+×]|\b(?:at\s+(?:least|most)|(?:less|more|lower|higher|fewer|greater|better|worse)\s+than|under"
    r"|over|above|below|between|up\s+to|(?:not|n't)(?:\s+an?)?|minus|plus|instead\s+of|rather\s+than))\s*$",
    re.IGNORECASE,
)
_REFERENCE = re.compile(
    r"(?:[#№]|\b(?:rules?|steps?|sections?|lines?|questions?|items?|parts?|figures?|tables?|chapters?|criteri(?:on|a)|examples?"
    r"|versions?|pages?|paragraphs?|sentences?|options?|responses?|candidates?|assistants?|cases?|tests?|attempts?|rounds?"
    r"|turns?|levels?|no\.?|nr\.?|year|in|january|february|march|april|may|june|july|august|september|october|november"
    r"|december))\s*$",
    re.IGNORECASE,
)
_AFTER = frozenset(
    "points point stars star marks mark because since as for and but or on in overall given due with to from if when "  # noqa: SIM905
    "that which although though while is was would seems at by here so out of total not".split()
)
"""Words that may follow a score. Another word is what the number counts."""

_LABEL = re.compile(
    r"(?:\b[^\W\d]+[ \t]+){0,2}\b(?:scores?|ratings?|grades?|marks?|verdict|points|reward|rank|evaluation|judge?ment"
    r"|(?:overall|final|total)(?=[ \t]*[:=]))\b(?:[ \t]+[^\W\d]+){0,5}?[ \t]*(?:\([^()\n]*\))?[ \t]*"
    r"(?:(?:[:=→]|[=-]>|–|—|-(?=\s)|\b(?:is|of|was|be|at|as)\b)"
    r"[ \t]*(?:\b(?:an?|the|about|around|roughly|approximately|probably|maybe)\b)?)?\s*$",
    re.IGNORECASE,
)
_CONNECTED = re.compile(
    r"(?:[:=→>–—-]|\b(?:is|of|was|be|at|as|an?|the|about|around|roughly|approximately|probably|maybe"
    r"|scores?|ratings?|grades?|marks?))\s*$",
    re.IGNORECASE,
)
_NEAR = 160
"""Characters before and after a number that say what it is."""

_FINAL = re.compile(r"\b(?:final|overall|total)\b", re.IGNORECASE)
_ALONE = re.compile(r"(?:^|\n|\b(?:so|thus|hence|therefore|finally)\b[^\w\n]*)[^\w\n]*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Value:
    """A number of the text: ``whole`` is its denominator, ``label`` the words before it if they name a score."""

    number: float
    whole: float | None
    is_percent: bool
    is_part: bool
    """True for a part of a range, a sum or a bound."""
    label: str | None
    is_alone: bool
    """True if it is the only thing on its line."""


def read_number(text: str, low: float | None = None, high: float | None = None) -> float:
    """Return the score in a judge's answer.

    ``low`` and ``high`` bound it. A denominator must be ``high``, if that is given; with ``high`` 1 the score is the
    fraction. Without ``high``, ``8/10`` is 8, and percentages are refused. Raises ``ValueError`` for a text without a
    score, with several, or with one that is not a single number or is beyond the bounds.

    Example: ``read_number("Clear, but too long. Score: 7.5 out of 10")`` is 7.5.
    """
    plain = _plain(text)
    score = _scored(_values(plain), text) if re.search(r"\d", plain) else _stars(plain, text)
    number = score.number
    if score.is_percent:
        if high is None:
            raise _refused(text, "a number, as a percentage has no scale without high=")
        number = number / 100 if high <= 1 else number
    if score.whole is not None:
        if not 0 <= number <= score.whole or score.whole == 0:
            raise _refused(text, f"a score from 0 to {score.whole:g}")
        if high == 1 and score.whole != 1:
            number /= score.whole
        elif high is not None and score.whole != high:
            raise _refused(text, f"a score out of high={high:g}, got one out of {score.whole:g}")
    if not math.isfinite(number):
        raise _refused(text, "a finite number")
    if (low is not None and number < low) or (high is not None and number > high):
        raise _refused(text, f"a score within low={low} and high={high}")
    return number


def _values(text: str) -> list[_Value]:
    """Return the numbers of ``text`` that may be scores."""
    text = _NO_VALUES.sub(" ", text)
    matches = []
    for match in _VALUE.finditer(text):
        # A letter stands for the text beyond, so that no line begins or ends there.
        first, last = match.start() - _NEAR, match.end() + _NEAR
        before = ("x" if first > 0 else "") + text[max(first, 0) : match.start()]
        after = text[match.end() : last] + ("x" if last < len(text) else "")
        if re.search(r"\bout\s+of\s*$", before, re.IGNORECASE):  # a scale, or the denominator of a word
            continue
        label = _LABEL.search(before[-120:])
        name = " ".join(re.findall(r"[^\W\d]+", label[0].lower())) if label and _CONNECTED.search(label[0]) else None
        # Without a label, what follows says whether the number counts something.
        if name is None:
            counted = re.match(r"[ \t]*[)\]]?[ \t]*([^\W\d]+)", after)
            weak = match["whole"] is None or match["of"].lower() == "of"
            if weak and (_REFERENCE.search(before) or (counted and counted[1].lower() not in _AFTER)):
                continue
        matches.append(
            _Value(
                _number(match["number"]) * (-1 if match["sign"] == "-" else 1),
                None if match["whole"] is None else _number(match["whole"]),
                is_percent=match["percent"] is not None,
                is_part=bool(_GOES_ON.match(after) or _BOUNDED.search(before)),
                label=name,
                is_alone=bool(_ALONE.search(before) and re.match(r"[^\w\n]*(?:\n|$)", after)),
            )
        )
    return matches


def _number(text: str) -> float:
    return float(re.sub(r"[, ]", "", text))


def _scored(values: list[_Value], text: str) -> _Value:
    """Return the one score among ``values``: a labelled one, else one on a line of its own, else the only one."""
    labelled = [value for value in values if value.label is not None]
    final = [value for value in labelled if _FINAL.search(str(value.label))]
    chosen = final or labelled or [value for value in values if value.is_alone]
    if not chosen:
        strong = [value for value in values if value.whole is not None and not value.is_part]
        chosen = strong if len(strong) == len(values) else values
    elif len({value.label for value in chosen}) == 1 and chosen[-1].label is not None:
        chosen = chosen[-1:]  # a repeated label is a correction
    if any(value.is_part for value in chosen):
        raise _refused(text, "a single number, not a range, a bound or a sum")
    if len({(value.number, value.is_percent) for value in chosen}) != 1:
        raise _refused(text, "one score as a number, such as 'Score: 7'")
    return next((value for value in chosen if value.whole is not None), chosen[0])


def _stars(plain: str, text: str) -> _Value:
    """Return the score of a row of stars."""
    rows = re.findall(r"[★⭐🌟☆✩✰]\ufe0f?(?:\s?[★⭐🌟☆✩✰]\ufe0f?)*", plain)
    if len(rows) != 1:
        raise _refused(text, "a number")
    full, empty = len(re.findall("[★⭐🌟]", rows[0])), len(re.findall("[☆✩✰]", rows[0]))
    return _Value(float(full), float(full + empty) if empty else None, False, False, None, True)


def _refused(text: str, expected: str) -> ValueError:
    return ValueError(f"the judge said {text!r:.300}: expected {expected}")


# --- choices ----------------------------------------------------------------------------------------------------------
_KIND = r"(?i:(?:the\s+)?(?:answer|response|assistant|option|candidate|model|text|solution|output|version|choice)\s+)?"
_LETTER = rf"{_KIND}[(\[]?\b([AB])\b[)\]]?(?:['’]s\s+\w+)?"
_WORDS = r"(?:\s+(?:\w+ly|much|far|an?|the|bit|little|also|still|to|be))*"
_IS = rf"\s+(?:is|was|seems|looks|appears|would\s+be){_WORDS}"
_MERIT = r"accurate|helpful|correct|concise|complete|convincing|useful|relevant"

_NAMED = re.compile(
    r"\b(?i:verdict|winner|choice|answer|decision|preference|preferred|better|best|result|conclusion|judge?ment|final|vote|pick)\b"
    rf"(?:[ \t]+\w+){{0,4}}?[ \t]*(?:[:=]|[=-]>|\b(?i:is)\b)[ \t]*{_KIND}[(\[]?"
    r"(?:([AB])\b(?!\s*[=/<&]|\s+(?:or|and|vs)\b|['’]\w)(?!\s+(?!(?:because|since|as|is|was|over|by|for|with|wins|due|but)\b)[a-z])"
    r"|([ab])(?=\W*$)|(?:an?\s+)?((?i:tie|draw))\b)",
)
_ONLY = re.compile(rf"^[^\w\n]*+(?:{_KIND.removesuffix('?')}\W*+)?([ABab])[^\w\n]*+$", re.MULTILINE)
_FIRST = re.compile(rf"^[^\w\n]*+{_KIND}([AB])\b[)\]]?[ \t]*[.,;–—-]", re.MULTILINE)
_COMPARED = (
    (
        re.compile(
            rf"{_LETTER}{_IS}\s+(?:better|best|superior|stronger|preferable|preferred|clearer|winner|more\s+(?:{_MERIT}))\b"
        ),
        1,
    ),
    (re.compile(rf"{_LETTER}{_IS}\s+(?:worse|worst|inferior|weaker|loser|less\s+(?:{_MERIT}))\b"), -1),
    (re.compile(rf"\b(?i:prefer|choose|pick|favou?r|select|vote\s+for|go\s+with)\s+{_LETTER}"), 1),
    (re.compile(rf"\b(?i:say|think)\s+{_LETTER}\s*(?:[.!,;]|$)"), 1),
    (re.compile(rf"{_LETTER}\s+(?:\w+ly\s+)?(?:wins|beats|outperforms|surpasses)\b"), 1),
    (re.compile(rf"{_LETTER}\s+(?:\w+ly\s+)?loses\b"), -1),
    (re.compile(rf"{_LETTER}\s*>+\s*{_KIND}[AB]\b"), 1),
    (re.compile(rf"{_LETTER}\s*<+\s*{_KIND}[AB]\b"), -1),
)
_JUDGED = (
    (re.compile(rf"{_LETTER}{_IS}\s+(?:right|correct|good)\b"), 1),
    (re.compile(rf"{_LETTER}{_IS}\s+(?:wrong|incorrect|bad)\b"), -1),
)
"""Statements about one of the two, and whether they are for it (1) or against it (-1)."""

_TIE = re.compile(
    r"\b(?:tie|tied|draw)\b(?!-)|\bequally\s+(?:good|bad|strong|correct|clear)\b|\b[AB]\s*=+\s*[AB]\b"
    r"|\bneither\s+(?:\w+\s+)?(?:is|was)\s+better\b",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"\b(?:not|no|never|neither|nor|cannot|hardly)\b|n't\b", re.IGNORECASE)


def read_choice(text: str) -> float:
    """Return 1 if a judge prefers ``A``, 0 if ``B``, 0.5 for a tie.

    A named verdict (``Verdict: B``, ``[[A]]``, a line with the letter alone) goes before statements such as ``A is
    better than B``. Raises ``ValueError`` for a text without a verdict, or with several different ones.

    Example: ``read_choice("Both are short, A is right. Verdict: A")`` is 1.
    """
    plain = _plain(text).strip()
    named = [name for match in _NAMED.finditer(plain) for name in match.groups() if name]
    named += _ONLY.findall(plain)
    if not named and len(set(first := _FIRST.findall(plain))) == 1:
        named = first
    verdicts = {{"A": 1.0, "B": 0.0}.get(name.upper(), 0.5) for name in named}
    negations = _Negations(plain)
    ties = [tie for tie in _TIE.finditer(plain) if not negations.reach(tie.start(), tie.start())]
    if not verdicts:
        verdicts = _stated(plain, _COMPARED, negations) | {0.5 for _ in ties} or _stated(plain, _JUDGED, negations)
    if len(verdicts) != 1:
        raise _refused(text, "one verdict: A, B or tie")
    return verdicts.pop()


def _stated(text: str, statements: tuple[tuple[re.Pattern[str], int], ...], negations: _Negations) -> set[float]:
    """Return the verdicts, 1 for A and 0 for B, that ``statements`` give, without negated ones."""
    return {
        float((match[1] == "A") == (side > 0))
        for pattern, side in statements
        for match in pattern.finditer(text)
        if not negations.reach(match.start(), match.end())
    }


class _Negations:
    """The negations of a text, by the clauses in which they stand."""

    def __init__(self, text: str) -> None:
        self._clauses = [mark.end() for mark in re.finditer(r"[.!?;:\n]", text)]
        found = [match.span() for match in _NEGATED.finditer(text)]
        self._starts, self._ends = [start for start, _ in found], [end for _, end in found]

    def reach(self, start: int, end: int) -> bool:
        """True if the clause that ``start`` is in has a negation up to ``end``."""
        clause = bisect.bisect_right(self._clauses, start)
        begin = self._clauses[clause - 1] if clause else 0
        place = bisect.bisect_left(self._starts, begin)
        return place < len(self._ends) and self._ends[place] <= end
