"""Split clues: a reader and a writer each see one row of digits, and the writer answers for both.

The answer is the digit-wise maximum of the rows, which no actor with one view can find.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from turnwise.arena import Episode, RewardMix, RewardParts, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split, check_demonstrations
from turnwise.tasks.generated import draw_distinct, texts_of
from turnwise.tasks.teams import TeamEpisode, TeamOptions, TeamTask
from turnwise.types import EpisodeState, Message, Messages

DIGITS = "0123456789"
MAX_DIGITS = 8


class RowPair(NamedTuple):
    """Two rows of equally many digits. Example: ``RowPair("195", "278")``, whose answer is ``"298"``."""

    reader: str
    writer: str

    @property
    def answer(self) -> str:
        return maximum(self.reader, self.writer)


def maximum(first: str, second: str) -> str:
    """Return the digit-wise maximum. Example: ``maximum("195", "278") == "298"``."""
    return "".join(map(max, zip(first, second, strict=True)))


def right_share(given: str | None, answer: str) -> float:
    """Return the share of the digits of ``answer`` that ``given`` has in their places; 0 for ``None``."""
    return sum(map(str.__eq__, given, answer)) / len(answer) if given else 0.0


def format_question(rows: RowPair) -> str:
    """Write a question as text. Example: ``format_question(RowPair("195", "278")) == "195/278"``."""
    return "/".join(rows)


def parse_question(question: str) -> RowPair:
    """Parse the text of :func:`format_question`. Raises ``ValueError`` for any other text."""
    rows = question.split("/")
    if len(rows) != 2 or len(rows[0]) != len(rows[1]) or not all(re.fullmatch(r"[0-9]+", row) for row in rows):
        raise ValueError(f"question={question!r}: expected two rows of equally many digits, such as '195/278'")
    return RowPair(*rows)


def parse_digits(text: str, count: int) -> str | None:
    """Parse the last line of ``text`` that holds ``count`` digits and nothing else but blanks; ``None`` without one.

    Example: ``parse_digits("I see\\n1 9 5", 3) == "195"``
    """
    for line in reversed(text.splitlines()):
        digits = line.replace(" ", "")
        if len(digits) == count and not set(digits) - set(DIGITS):
            return digits
    return None


def draw_questions(split: Split, n: int, seed: int | str, digits: int) -> list[str]:
    """Draw ``n`` different questions of ``split`` with ``digits`` digits in a row.

    Equal arguments give equal questions, and a longer list begins with the shorter one. Raises ``ValueError`` if the
    split holds too few.
    """
    rng = Random(f"split-clues/{split}/{seed}/{digits}")

    def draw() -> str:
        return format_question(RowPair(*("".join(rng.choices(DIGITS, k=digits)) for _ in range(2))))

    return draw_distinct(split, n, draw, f"questions of {digits} digits")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------
_REPLY = "Reply with digits only."

SYSTEM_PROMPTS = {
    "reader": f"Only you see this row. Tell the writer what it holds. {_REPLY}",
    "writer": f"Take the larger digit at each place: your row is last, the reader's message is above. {_REPLY}",
    "solver": f"Take the larger digit of both rows at each place. {_REPLY}",
}

NO_MESSAGE = "-"


def rows_message(actor_id: str, rows: RowPair, said: str | None = None) -> Message:
    """Write what the actor sees: the reader its row, the writer the message and its row, the solver both rows."""
    above = {"reader": [], "writer": [said or NO_MESSAGE * len(rows.writer)], "solver": [rows.reader]}[actor_id]
    own = rows.reader if actor_id == "reader" else rows.writer
    return {"role": "user", "content": "\n".join([*above, own])}


def split_clues_messages(actor_id: str, rows: RowPair, said: str | None = None) -> Messages:
    """Build the whole prompt of one call: the instruction, and the rows that the actor sees."""
    return [{"role": "system", "content": SYSTEM_PROMPTS[actor_id]}, rows_message(actor_id, rows, said)]


def read_messages(messages: Messages) -> tuple[str | None, str]:
    """Parse a prompt: the line above the actor's row, or ``None`` if it holds no digits, and the row."""
    *above, own = messages[-1]["content"].splitlines()
    return parse_digits(above[0], len(own)) if above else None, own


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations
# ---------------------------------------------------------------------------------------------------------------------
UNREAD = 0.15  # share of the writer's demonstrations without a message
SILENT = "0"  # sent for a digit that the reader keeps to itself


def demonstrations(
    questions: Sequence[RowPair], actors: Sequence[str], seed: int | str, quality: float = 0.45
) -> list[Demonstration]:
    """Make one ``(actor id, messages, completion)`` per question. The actors take turns.

    ``quality`` in [0, 1] is the chance that a digit is right. Otherwise the reader sends 0, and writer and solver
    repeat the digit of the row in front of them. Below one half this wrong digit is the likeliest answer. A model that
    has learnt the demonstrations well then fails when greedy and sometimes succeeds when sampled. Reinforcement
    learning starts from there.
    """
    check_demonstrations(actors, quality)
    rng = Random(f"split-clues-demonstrations/{seed}")

    def mixed(right: str, habit: str) -> str:
        return "".join(good if rng.random() < quality else bad for good, bad in zip(right, habit, strict=True))

    made: list[Demonstration] = []
    for index, rows in enumerate(questions):
        actor, said, above = actors[index % len(actors)], None, rows.reader
        if actor == "reader":
            answer = mixed(rows.reader, SILENT * len(rows.reader))
        else:
            if actor == "writer":
                said = None if rng.random() < UNREAD else mixed(rows.reader, SILENT * len(rows.reader))
                above = said or SILENT * len(rows.writer)
            answer = mixed(maximum(above, rows.writer), rows.writer)
        made.append((actor, split_clues_messages(actor, rows, said), answer))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Play
# ---------------------------------------------------------------------------------------------------------------------
Role = Literal["reader", "writer", "solver"]
TEAM: tuple[Role, ...] = ("reader", "writer")


def right_digits(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the answer's digits that are right, the same for every actor of the team."""
    return extras["right_digits"]


class SplitCluesEpisode(TeamEpisode):
    """One question, played once by ``actors`` in order; the last actor's digits are the answer.

    The artifact is ``{"rows": "195/278"}``. The reader sees the first row, the writer the second one and what the
    reader sent, the solver both rows. A reply without a whole row of digits sends nothing. ``rubric`` pays every actor
    the mix of the outcome and the share of right digits. No step has its own reward, as only the answer shows the value
    of a message. In a tree the answer earns that reward, and a message 0: estimate its value by
    ``rollout.tree.playouts``.

    Example: ``SplitCluesEpisode()`` for the team, ``SplitCluesEpisode(actors=("writer",))`` for half the view, and
    ``SplitCluesEpisode(actors=("solver",))`` for one agent that sees everything.
    """

    episode_type = "split_clues"
    mix = RewardMix()
    team = TEAM
    own_parts = (right_digits,)

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"rows": artifact["rows"], "said": None, "valid": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        """Build the user message; the arena adds the system prompt."""
        return [rows_message(state.current_actor, parse_question(state.data["rows"]), state.data["said"])]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data = state.data
        data["said"] = parse_digits(state.last_completion_text, len(parse_question(data["rows"]).reader))
        data["valid"][state.current_actor] = float(data["said"] is not None)

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts | None:
        if self.sampler is None:
            return None
        if state.current_actor != self.actors[-1]:
            return RewardParts(0.0)
        right = self._right(state)
        return RewardParts(float(right == 1.0), right)

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        """The share of right digits if the digits sent last were the answer."""
        return self._right(state)

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[str, list[bool]] | None:
        """The digits sent last, each right or wrong as a part of the answer."""
        said, answer = state.data["said"], parse_question(state.data["rows"]).answer
        return None if said is None else (said, list(map(str.__eq__, said, answer)))

    def _right(self, state: EpisodeState) -> float:
        return right_share(state.data["said"], parse_question(state.data["rows"]).answer)

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved`` and ``right_digits`` by actor of the team; ``valid`` by actor that acted; the ``answer``."""
        right = self._right(state)
        return {
            "solved": dict.fromkeys(self.actors, float(right == 1.0)),
            "right_digits": dict.fromkeys(self.actors, right),
            "valid": dict(state.data["valid"]),
            "answer": state.data["said"],
        }


class SplitCluesOptions(TeamOptions):
    """Options of the task ``split_clues``.

    ``actors = ["writer"]`` answers with half the view, ``actors = ["solver"]`` sees both rows. ``digits`` is the length
    of a row. ``quality`` is the chance that a demonstrated digit is right.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=1, ge=1, le=1)
    digits: int = Field(default=3, ge=2, le=MAX_DIGITS)
    quality: float = Field(default=0.45, ge=0, le=1)
    max_tokens: int = Field(default=12, ge=1)

    @field_validator("actors")
    @classmethod
    def _an_answer_last(cls, actors: tuple[Role, ...]) -> tuple[Role, ...]:
        if actors[-1] == "reader":
            raise ValueError("expected the writer or the solver last, who answers")
        return actors


class SplitCluesTask(TeamTask):
    """Merge two rows that two actors see; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Example: ``SplitCluesTask(SplitCluesOptions(digits=4))``
    """

    name = "split_clues"
    key = "rows"
    system_prompts = SYSTEM_PROMPTS
    options_type = SplitCluesOptions
    options: SplitCluesOptions

    def episode(self, tree: TreeSampler | None = None) -> Episode:
        return SplitCluesEpisode(**self.options.of_episode(), sampler=tree)

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return draw_questions(split, n, seed, self.options.digits)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        return self._demonstrate(n, f"{seed}", self.options.actors)

    def texts(self) -> list[str]:
        """Every role's prompts and replies. They don't depend on the chosen actors, so one tokenizer serves all."""
        return texts_of(self._demonstrate(60, "texts", tuple(SYSTEM_PROMPTS)))

    def oracle(self) -> Player:
        """A player that sends its whole row, and answers with the maximum of what it sees."""

        def play(actor_id: str, messages: Messages) -> str:
            above, own = read_messages(messages)
            return maximum(above, own) if above else own

        return play

    def random_player(self, seed: int) -> Player:
        rng = Random(f"split-clues-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            return "".join(rng.choices(DIGITS, k=len(read_messages(messages)[1])))

        return play

    def _demonstrate(self, n: int, seed: str, actors: Sequence[str]) -> list[Demonstration]:
        questions = draw_questions("train", n, f"demonstrations/{seed}", self.options.digits)
        return demonstrations([parse_question(each) for each in questions], actors, seed, self.options.quality)
