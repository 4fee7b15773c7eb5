"""The task of split clues: a reader and a writer each see one row of digits, and the writer answers for both."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from pydantic import Field, field_validator

from turnwise.arena import Episode, RewardMix, RewardParts, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split
from turnwise.tasks.generated import texts_of
from turnwise.tasks.split_clues.demonstrations import demonstrations
from turnwise.tasks.split_clues.prompts import SYSTEM_PROMPTS, read_messages, rows_message
from turnwise.tasks.split_clues.rows import (
    DIGITS,
    MAX_DIGITS,
    draw_questions,
    maximum,
    parse_digits,
    parse_question,
    right_share,
)
from turnwise.tasks.teams import TeamEpisode, TeamOptions, TeamTask
from turnwise.types import EpisodeState, Messages

Role = Literal["reader", "writer", "solver"]
TEAM: tuple[Role, ...] = ("reader", "writer")


def solved(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 for every actor of the team if the answer is right."""
    return extras["solved"]


def right_digits(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the answer's digits that are right, the same for every actor of the team."""
    return extras["right_digits"]


def valid_format(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 for each actor whose reply held as many digits as a row."""
    return extras["valid"]


class SplitCluesEpisode(TeamEpisode):
    """One question, played once by ``actors`` in order; the last actor's digits are the answer.

    The artifact is ``{"rows": "195/278"}``. The reader sees the first row, the writer the second one and what the
    reader sent, the solver both. A reply without that many digits sends nothing. ``rubric`` pays every actor the mix of
    the outcome and the share of right digits. No step has a reward of its own, as the answer alone shows what a message
    was worth. In a tree the answer earns that reward, and a message 0: estimate its value by ``rollout.tree.playouts``.

    Example: ``SplitCluesEpisode()`` for the team, ``SplitCluesEpisode(actors=("writer",))`` for half the view, and
    ``SplitCluesEpisode(actors=("solver",))`` for one agent that sees everything.
    """

    episode_type = "split_clues"
    mix = RewardMix()
    team = TEAM
    outcomes, own_parts, measures = (solved,), (right_digits,), (valid_format,)

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
        """The share of right digits, if what was said last were the answer."""
        return self._right(state)

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[str, list[bool]] | None:
        """The digits that were said last, each right or wrong as an answer."""
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
