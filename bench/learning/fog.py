"""Fog of war: a way through two walls with a gap each, of which each agent of the team sees one."""

from __future__ import annotations

from itertools import islice
from random import Random
from typing import Any, ClassVar

from pydantic import Field
from tasks import Drawn, chat, outcome, solved

from turnwise.arena import MultiTurnEpisode, Rubric, TreeSampler
from turnwise.tasks import Demonstration, OwnOptions
from turnwise.tasks.routes import format_route, parse_route
from turnwise.types import EpisodeState, Messages

WIDTH, HEIGHT = 6, 5
FOG = "?" * WIDTH
PROMPTS = {"scout": "Where is the gap?", "walker": "Walk from A to G.", "solver": "Walk alone from A to G."}


class FogOptions(OwnOptions):
    """``solver`` is a lone agent that sees the lower wall, or with ``seen = 2`` both."""

    actors: tuple[str, ...] = ("scout", "walker")
    seen: int = Field(default=2, ge=1, le=2)
    quality: float = 0.45
    max_tokens: int = 24


class FogEpisode(MultiTurnEpisode):
    """The scout sees the upper wall and sends a row that marks its gap; the walker sees the lower one and walks.

    Half of the outcome is for a way that reaches the goal, and a quarter for each wall that it passes.
    """

    episode_type = "fog"

    def __init__(self, options: FogOptions, sampler: TreeSampler | None) -> None:
        super().__init__(sampler=sampler, max_turns=1)
        self.actors, self.options = options.actors, options
        self.rubric = Rubric([outcome, solved], [1.0, 0.0])

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"question": artifact["question"], "sent": "", "row": 0, "solved": False}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        return [fog_messages(state.current_actor, state.data["question"], state.data["sent"], self.options.seen)[-1]]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        said = state.last_completion_text.strip()
        if state.current_actor == "scout":
            state.data["sent"] = said if sorted(said) == sorted(marked(0)) else ""
        else:
            state.data["row"], state.data["solved"] = walked(state.data["question"], parse_route(said) or "")

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        earned = ((state.data["row"] > 1) + (state.data["row"] > 3)) / 4 + state.data["solved"] / 2
        return {
            "outcome": dict.fromkeys(self.actors, earned),
            "solved": dict.fromkeys(self.actors, float(state.data["solved"])),
        }


def marked(column: int, mark: str = "x", other: str = ".") -> str:
    return other * column + mark + other * (WIDTH - 1 - column)


def columns(question: str) -> tuple[int, int, int, int]:
    """Columns of the start, of the two gaps and of the goal: ``"0312"`` has its start in the upper left corner."""
    start, first, second, goal = map(int, question)
    return start, first, second, goal


def route(question: str) -> str:
    start, *stops = columns(question)
    moves = ""
    for stop in stops:
        moves += ("R" * (stop - start) or "L" * (start - stop)) + "DD"
        start = stop
    return moves[:-2]


def walked(question: str, moves: str) -> tuple[int, bool]:
    """Walk until a wall, the edge or the goal. Returns the row of the end, and whether it is the goal."""
    column, first, second, goal = columns(question)
    row = 0
    for move in moves:
        across, down = {"U": (0, -1), "D": (0, 1), "L": (-1, 0), "R": (1, 0)}[move]
        to_row, to_column = row + down, column + across
        gap = {1: first, 3: second}.get(to_row, to_column)
        if not (0 <= to_row < HEIGHT and 0 <= to_column < WIDTH) or gap != to_column:
            break
        row, column = to_row, to_column
        if (row, column) == (HEIGHT - 1, goal):
            return row, True
    return row, False


def fog_messages(actor: str, question: str, sent: str, seen: int) -> Messages:
    start, first, second, goal = columns(question)
    top, middle = marked(start, "A"), "." * WIDTH
    upper, lower = marked(first, ".", "#"), [marked(second, ".", "#"), marked(goal, "G")]
    if actor == "scout":
        return chat(PROMPTS[actor], "\n".join([top, upper, middle, FOG, FOG]))
    if actor == "walker":
        return chat(PROMPTS[actor], "\n".join([sent or FOG, top, FOG, middle, *lower]))
    return chat(PROMPTS[actor], "\n".join([top, upper if seen == 2 else FOG, middle, *lower]))


class Fog(Drawn):
    name = "fog"
    success_metric = "solved/walker"
    system_prompts: ClassVar[dict[str, str]] = {}
    options_type = FogOptions

    def __init__(self, options: FogOptions | None = None) -> None:
        options = options or FogOptions()
        self.system_prompts = {actor: PROMPTS[actor] for actor in options.actors}
        self.success_metric = f"solved/{options.actors[-1]}"
        super().__init__(options)

    def question(self, rng: Random) -> str:
        return "".join(str(rng.randrange(WIDTH)) for _ in range(4))

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, FogEpisode]:
        return {"fog": FogEpisode(self.options, tree)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """The scout marks the gap with chance ``quality``, else the start's column. Whoever walks goes through the gap
        that is marked, or that it sees, with this chance, and else straight down from the start, then through the lower
        gap. Half of the marks shown to a walker are right. A solver that sees one wall guesses the other's gap."""
        rng, made, options = Random(f"fog-demonstrations/{seed}"), [], self.options
        for index, question in enumerate(islice(self.stream("train", f"demonstrations/{seed}"), n)):
            actor = options.actors[index % len(options.actors)]
            start, gap, *_ = columns(question)
            is_right = rng.random() < options.quality
            if actor == "scout":
                said = marked(gap if is_right else start)
                made.append((actor, fog_messages(actor, question, "", 1), said))
                continue
            shown = gap if actor == "solver" or rng.random() < 0.5 else rng.randrange(WIDTH)
            seen = 1 + (index // len(options.actors)) % 2
            if actor == "solver" and seen == 1:
                shown = rng.randrange(WIDTH)
            through = shown if is_right else start
            walk = format_route(route(f"{question[0]}{through}{question[2:]}"))
            made.append((actor, fog_messages(actor, question, marked(shown), seen), walk))
        return made

    def texts(self) -> list[str]:
        boards = [fog_messages(actor, "0123", marked(2), 2)[-1]["content"] for actor in PROMPTS]
        return [*PROMPTS.values(), *boards, FOG, format_route("UDLR"), format_route("RRDD")]
