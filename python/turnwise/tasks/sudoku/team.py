"""The sudoku task: round by round a proposer fills the grid and a reviser repairs it, or one solver plays alone."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from pydantic import Field, field_validator

from turnwise.arena import Episode, RewardParts, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split
from turnwise.tasks.sudoku.grid import (
    BLANK,
    DIGITS,
    MAX_BLANKS,
    format_grid,
    is_solved,
    parse_grid,
    right_units,
    satisfied_share,
    solve,
)
from turnwise.tasks.sudoku.grid import sudoku_puzzles as draw_puzzles
from turnwise.tasks.sudoku.prompts import SYSTEM_PROMPTS, board_message, demonstrations, read_messages
from turnwise.tasks.teams import TeamEpisode, TeamOptions, TeamTask
from turnwise.types import EpisodeState, Messages

Role = Literal["proposer", "reviser", "solver"]
TEAM: tuple[Role, ...] = ("proposer", "reviser")


def satisfied(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the 12 units that were right after each actor's last action."""
    return extras["satisfied"]


class SudokuEpisode(TeamEpisode):
    """One puzzle, played by ``actors`` in order for up to ``max_turns`` rounds, until the grid is solved.

    The artifact is ``{"puzzle": "1_3_..."}``, 16 characters. Each action is a whole grid. It becomes the draft that the
    next actor sees, together with its wrong units. An unreadable action leaves the draft unchanged and has a cost, and
    the actor's next prompt says so. The team's part of a step is 1 if the grid after it is solved. The own part is the
    satisfied share of its 12 units, which is also the team's value. ``rubric`` has the same two parts for the whole
    episode: the outcome for every actor, and the share after its last action.

    Example: ``SudokuEpisode(sampler=TreeSampler(branches=8))`` for the team,
    ``SudokuEpisode(actors=("solver",), max_turns=1)`` for one agent.
    """

    episode_type = "sudoku"
    team = TEAM
    own_parts = (satisfied,)

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"puzzle": artifact["puzzle"], "draft": None, "valid": True, "satisfied": {}, "read": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        """Build the user message: the board and how the last replies failed. The arena adds the system prompt."""
        data = state.data
        unread = not all(data["read"].get(state.current_actor, [True])[-1:])
        return [board_message(data["puzzle"], data["draft"], state.turn, unread=unread)]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data, actor = state.data, state.current_actor
        grid = parse_grid(state.last_completion_text)
        data["valid"] = grid is not None
        # After an unreadable first reply, the puzzle itself is the draft.
        data["draft"] = grid or data["draft"] or data["puzzle"]
        data["satisfied"][actor] = satisfied_share(data["puzzle"], data["draft"])
        data["read"].setdefault(actor, []).append(data["valid"])

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts:
        data = state.data
        return RewardParts(float(_is_solved(state)), data["satisfied"][state.current_actor], data["valid"])

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        """The share of the 12 units that are right in the draft, or in the puzzle before the first."""
        return satisfied_share(state.data["puzzle"], state.data["draft"] or state.data["puzzle"])

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return _is_solved(state)

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[str, list[bool]] | None:
        """The draft; its parts are the 12 units, as an episode ends with the first draft that is right as a whole."""
        draft = state.data["draft"]
        return None if draft is None else (draft, right_units(state.data["puzzle"], draft))

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved`` by actor; ``satisfied`` and ``valid`` by actor that acted; the last ``draft``; ``rounds``."""
        return {
            "solved": dict.fromkeys(self.actors, float(_is_solved(state))),
            "satisfied": dict(state.data["satisfied"]),
            "valid": {actor: sum(read) / len(read) for actor, read in state.data["read"].items()},
            "draft": state.data["draft"],
            "rounds": self.rounds(state),
        }


def _is_solved(state: EpisodeState) -> bool:
    return state.data["draft"] is not None and is_solved(state.data["puzzle"], state.data["draft"])


class SudokuOptions(TeamOptions):
    """Options of the task ``sudoku``. ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``blanks`` are the fewest and the most blank cells of a puzzle. ``quality`` is the chance that a demonstrated row is
    right. ``answers`` is the number of demonstrations of each prompt. ``max_tokens`` limits one completion; if each
    digit is a token, a grid takes 19 tokens and one for the end of turn.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=2, ge=1)
    blanks: tuple[int, int] = (6, 8)
    answers: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=24, ge=1)

    @field_validator("blanks")
    @classmethod
    def _in_order(cls, blanks: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= blanks[0] <= blanks[1] <= MAX_BLANKS:
            raise ValueError(f"expected [low, high] with 1 <= low <= high <= {MAX_BLANKS}")
        return blanks


class SudokuTask(TeamTask):
    """Solve 4x4 sudokus; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Example: ``SudokuTask(SudokuOptions(actors=("solver",), max_turns=1))``
    """

    name = "sudoku"
    key = "puzzle"
    system_prompts = SYSTEM_PROMPTS
    options_type = SudokuOptions
    options: SudokuOptions

    def episode(self, tree: TreeSampler | None = None) -> Episode:
        return SudokuEpisode(**self.options.of_episode(), sampler=tree)

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return [puzzle.givens for puzzle in draw_puzzles(split, n, seed, self.options.blanks)]

    def level(self, question: str) -> int:
        """The number of blank cells."""
        return question.count(BLANK)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        options = self.options
        puzzles = draw_puzzles("train", -(-n // options.answers), f"demonstrations/{seed}", options.blanks)
        made = demonstrations(puzzles, options.actors, seed, options.quality, options.max_turns, options.answers)
        return made[:n]

    def texts(self) -> list[str]:
        """Every role's prompts. They don't depend on the chosen actors, so one tokenizer serves all."""
        shown = demonstrations(draw_puzzles("train", 60, "texts", self.options.blanks), tuple(SYSTEM_PROMPTS), "texts")
        return [message["content"] for _, messages, _ in shown for message in messages]

    def oracle(self) -> Player:
        def play(actor_id: str, messages: Messages) -> str:
            return format_grid(solve(read_messages(messages)[0])[0])

        return play

    def random_player(self, seed: int) -> Player:
        """A player that keeps the givens and fills every blank with a random digit."""
        rng = Random(f"sudoku-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            givens, _ = read_messages(messages)
            return format_grid("".join(rng.choice(DIGITS) if cell == BLANK else cell for cell in givens))

        return play
