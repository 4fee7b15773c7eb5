"""The code duel (AT-GRPO's coder and tester): one writes a program, the other writes tests to find its faults."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from pydantic import Field, field_validator

from turnwise.arena import Episode, TreeSampler, record_input
from turnwise.sandbox import Sandbox, SandboxLimits
from turnwise.tasks.base import Demonstration, Player, Split, with_round
from turnwise.tasks.code_duel.problems import FAMILIES, catalogue, draw_problems, find_family, find_problem, in_turns
from turnwise.tasks.code_duel.prompts import (
    SYSTEM_PROMPTS,
    CodeDuelView,
    demonstrations,
    read_view,
    view_message,
    write_cases,
)
from turnwise.tasks.code_duel.scoring import (
    best_cases,
    describe_failures,
    format_case,
    judge_cases,
    parse_cases,
    parse_program,
    passed_share,
)
from turnwise.tasks.generated import texts_of
from turnwise.tasks.teams import ActingEpisode, TeamOptions, TeamTask, valid_format
from turnwise.types import EpisodeState, Messages

Role = Literal["coder", "tester"]
TEAM: tuple[Role, ...] = ("coder", "tester")


def _of(actor: str, values: dict[str, float]) -> dict[str, float]:
    return {actor: values[actor]} if actor in values else {}


def hidden_tests(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the hidden tests that the coder's last program passes."""
    return _of("coder", extras["own"])


def discernment(extras: dict[str, Any]) -> dict[str, float]:
    """Share of right test cases times share of wrong programs detected, for the tester's last action."""
    return _of("tester", extras["own"])


def right_cases(extras: dict[str, Any]) -> dict[str, float]:
    """The share of the tester's last test cases that are right."""
    return _of("tester", extras["right"])


def contained(extras: dict[str, Any]) -> dict[str, float]:
    """Number of the coder's programs that the sandbox stopped."""
    return {"coder": float(len(extras["stopped"]))}


class CodeDuelEpisode(ActingEpisode):
    """One problem, played by ``actors`` in order for up to ``max_turns`` rounds, until program and test cases agree.

    The artifact is ``{"problem": "Return the sum of ..."}``. The coder's program runs in ``sandbox``. The tester sees
    the program, and the first ``max_cases`` of its test cases run on it. The coder sees the failed cases next. An
    unreadable reply leaves program and report unchanged and has a cost. The team's part of a step is 1 if the current
    program passes all hidden tests. The coder's own part is the share that it passes, which is also the team's value.
    The tester's own part is the score of its cases (:func:`~turnwise.tasks.code_duel.scoring.judge_cases`). ``rubric``
    has the same parts for the whole episode: the outcome for every actor, and the own part of its last action. No actor
    sees another one's thought.

    Example: ``CodeDuelEpisode(Sandbox(), sampler=TreeSampler(branches=8))`` for the team,
    ``CodeDuelEpisode(Sandbox(), actors=("coder",), max_turns=1)`` for one agent.
    """

    episode_type = "code_duel"
    team = TEAM
    own_parts = (hidden_tests, discernment)
    measures = (valid_format, right_cases, contained)

    def __init__(self, sandbox: Sandbox, *, max_cases: int = 4, **team: Any) -> None:
        super().__init__(**team)
        self.sandbox, self.max_cases = sandbox, max_cases

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        find_problem(artifact["problem"])  # an unknown problem raises here, with its statement
        state.data = {
            "problem": artifact["problem"],
            "program": None,
            "failed": None,
            "agreed": False,
            "passed": 0.0,
            "acts": {},
            "stopped": [],
        }

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        """Build the prompt from statement, program, round and, for the coder, the failed cases. It has no history."""
        data, actor = state.data, state.current_actor
        view = CodeDuelView(data["problem"], data["program"], data["failed"] if actor == "coder" else None)
        return [with_round(view_message(view), state.turn, unread=self.is_unread(state))]

    async def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        self.add_act(state, await (self._code if state.current_actor == "coder" else self._test)(state))

    async def _code(self, state: EpisodeState) -> dict[str, Any]:
        data, problem = state.data, find_problem(state.data["problem"])
        program = parse_program(state.last_completion_text)
        if program is not None:
            run = await record_input("sandbox", self.sandbox.call, program, "f", problem.hidden)
            data["program"], data["failed"], data["agreed"] = program, None, False
            data["passed"] = passed_share(run.results, problem.expected)
            if run.reason not in ("ok", "error"):
                data["stopped"].append(run.reason)
        return {"valid": program is not None, "own": data["passed"], "right": 0.0}

    async def _test(self, state: EpisodeState) -> dict[str, Any]:
        data, problem = state.data, find_problem(state.data["problem"])
        cases = parse_cases(state.last_completion_text, self.max_cases)
        judged = judge_cases(problem, cases)
        if cases and data["program"] is not None:
            inputs = [case.arguments for case in cases]
            run = await record_input("sandbox", self.sandbox.call, data["program"], "f", inputs)
            data["failed"] = describe_failures(cases, run.results)
            data["agreed"] = data["failed"] is None
        return {"valid": bool(cases), "own": judged.score, "right": judged.right}

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        """The share of the hidden tests that the current program passes. A tester's action leaves it unchanged."""
        return float(state.data["passed"])

    def is_solved(self, state: EpisodeState) -> bool:
        return state.data["passed"] == 1.0

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return state.data["agreed"]

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[str, bool] | None:
        """The program, right if it passes all hidden tests; ``None`` for the tester."""
        program = state.data["program"] if state.current_actor == "coder" else None
        return None if program is None else (program, self.is_solved(state))

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved`` by actor; ``own``, ``valid`` and ``right`` by actor that acted; ``program``, ``rounds``.

        ``stopped`` lists why the sandbox stopped a program, once per stopped program: ``["cpu", "forbidden"]``.
        ``agreed`` is true if the program passed the tester's last cases.
        """
        return {
            **self.team_extras(state),
            "right": {actor: done[-1]["right"] for actor, done in state.data["acts"].items()},
            "program": state.data["program"],
            "stopped": list(state.data["stopped"]),
            "agreed": state.data["agreed"],
        }


class CodeDuelOptions(TeamOptions):
    """Options of the task ``code_duel``. ``actors = ["coder"]`` with ``max_turns = 1`` is the single agent.

    ``families`` are the kinds of problems, ``demonstrated`` those of the demonstrations, by default the same. The first
    ``max_cases`` test cases of a reply count. ``quality`` is the chance that a demonstrated program or case is right.
    The first demonstrations, a share ``clean`` of them, have quality 1. ``cpu_seconds`` limits a program over all
    inputs together.
    ``strict = false`` runs programs even if they can't be locked in: see :mod:`turnwise.sandbox.sandbox`.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=2, ge=1)
    families: tuple[str, ...] = Field(default=tuple(FAMILIES), min_length=1)
    demonstrated: tuple[str, ...] | None = Field(default=None, min_length=1)
    max_cases: int = Field(default=4, ge=1)
    cpu_seconds: int = Field(default=1, ge=1)
    strict: bool = True
    clean: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int = Field(default=160, ge=1)

    @field_validator("actors")
    @classmethod
    def _a_coder(cls, actors: tuple[Role, ...]) -> tuple[Role, ...]:
        if actors[:1] != ("coder",):
            raise ValueError("expected the coder first, whose program is tested")
        return actors

    @field_validator("families", "demonstrated")
    @classmethod
    def _known(cls, families: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if unknown := set(families or ()) - set(FAMILIES):
            raise ValueError(f"{sorted(unknown)} unknown, expected some of {', '.join(FAMILIES)}")
        return families


class CodeDuelTask(TeamTask):
    """Programs and tests that detect their faults; see :class:`turnwise.tasks.base.Task` for the methods.

    Example: ``CodeDuelTask(CodeDuelOptions(families=("lists",)))``
    """

    name = "code_duel"
    key = "problem"
    system_prompts = SYSTEM_PROMPTS
    options_type = CodeDuelOptions
    options: CodeDuelOptions

    def episode(self, tree: TreeSampler | None = None) -> Episode:
        options = self.options
        sandbox = Sandbox(SandboxLimits(cpu_seconds=options.cpu_seconds), strict=options.strict)
        return CodeDuelEpisode(sandbox, max_cases=options.max_cases, **options.of_episode(), sampler=tree)

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return draw_problems(split, n, seed, self.options.families)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Demonstrate on training problems. If ``n`` exceeds their number, they repeat in another order."""
        options = self.options
        rounds, quality, clean = options.max_turns, options.quality, options.clean
        return self._demonstrate(n, options.actors, f"{seed}", rounds=rounds, quality=quality, clean=clean)

    def texts(self) -> list[str]:
        """Every role's prompts and replies. They don't depend on the chosen actors."""
        shown = self._demonstrate(120, tuple(SYSTEM_PROMPTS), "texts", rounds=2, quality=0.4)
        return texts_of(shown)

    def oracle(self) -> Player:
        """A player that writes the problem's own program, and the cases of :func:`best_cases`."""

        def play(actor_id: str, messages: Messages) -> str:
            problem = find_problem(read_view(messages).statement)
            if actor_id == "coder":
                return problem.program
            return "\n".join(map(format_case, best_cases(problem, self.options.max_cases)))

        return play

    def random_player(self, seed: int) -> Player:
        """A player that writes a random program of the problem's family, and cases that expect its results."""
        rng = Random(f"code-duel-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            statement = read_view(messages).statement
            other = find_problem(rng.choice(list(catalogue(find_family(statement).name))))
            if actor_id == "coder":
                return other.program
            return "\n".join(map(format_case, write_cases(other, self.options.max_cases, 1.0, rng)))

        return play

    def _demonstrate(self, n: int, actors: Sequence[str], seed: str, **options: Any) -> list[Demonstration]:
        statements: list[str] = []
        families = self.options.demonstrated or self.options.families
        while len(statements) < n:
            statements += in_turns("train", f"demonstrations/{seed}/{len(statements)}", families)
        return demonstrations(statements[:n], actors, seed, cases=self.options.max_cases, **options)
