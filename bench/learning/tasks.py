"""Tasks that only the learning table plays: a relay of digits, a drill of independent calls, a curriculum of sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from turnwise.arena import MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.tasks import Demonstration, OwnOptions, OwnTask, Player, Split
from turnwise.tasks.base import key_of, split_of
from turnwise.tasks.proposer_solver import (
    ProposeEpisode,
    ProposerSolverOptions,
    ProposerSolverTask,
    Size,
    value_of,
)
from turnwise.tasks.proposer_solver.arithmetic import draw_problem
from turnwise.tasks.proposer_solver.episodes import PROPOSER, SOLVE, SOLVER, SYSTEM_PROMPTS, propose_message
from turnwise.types import EpisodeRequest, EpisodeState, Message, Messages


def chat(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def solved(extras: dict[str, Any]) -> dict[str, float]:
    return extras["solved"]


def right(extras: dict[str, Any]) -> dict[str, float]:
    return extras["right"]


class Drawn(OwnTask):
    """A task whose questions are drawn, not listed."""

    def questions(self) -> Sequence[str]:
        raise NotImplementedError("questions are drawn")

    def question(self, rng: Random) -> str:
        raise NotImplementedError

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[str]:
        found = dict[str, None]()
        for question in self.stream(split, seed):
            if len(found) == n:
                break
            found[question] = None
        return list(found)

    def stream(self, split: Split, seed: int | str) -> Iterator[str]:
        """Draw questions of ``split`` without end; some come again."""
        rng = Random(f"{self.name}/{split}/{seed}")
        while True:
            if split_of(question := self.question(rng)) == split:
                yield question

    def key_of(self, question: str) -> str:
        return key_of(question)

    def oracle(self) -> Player:
        raise NotImplementedError

    def random_player(self, seed: int) -> Player:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------------------------
# Relay: three rows of digits, one for each agent of a chain
# ---------------------------------------------------------------------------------------------------------------------
DIGITS = "0123456789"
WIDTH = 3
OPERATIONS: dict[str, Callable[[str, str], str]] = {"hop2": max, "hop3": min}
"""What a hop does with a digit of its row and the digit that it was sent. The first one sends its row."""


class RelayOptions(OwnOptions):
    """``actors`` see a row each. ``solver`` is a lone agent that sees the last ``seen`` rows."""

    actors: tuple[str, ...] = ("hop1", "hop2", "hop3")
    seen: int = Field(default=3, ge=1, le=3)
    quality: float = 0.45
    max_tokens: int = 5


class RelayEpisode(MultiTurnEpisode):
    """Three digits pass from hop to hop: the first row, then the larger of them and the second row, then the smaller of
    those and the third row. The answer earns half for all digits, and half for the share of right ones."""

    episode_type = "relay"

    def __init__(self, options: RelayOptions, sampler: TreeSampler | None) -> None:
        super().__init__(sampler=sampler, max_turns=1)
        self.actors, self.options = options.actors, options
        self.rubric = Rubric([outcome, solved], [1.0, 0.0])

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"question": artifact["question"], "sent": ""}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        return [relay_messages(state.current_actor, state.data["question"], state.data["sent"], self.options)[-1]]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        said = state.last_completion_text.strip()
        state.data["sent"] = said if len(said) == WIDTH and set(said) <= set(DIGITS) else ""

    def step_reward(self, state: EpisodeState, arena: Any, artifact: Any) -> float | None:
        if self.sampler is None:
            return None
        return self._earned(state) if state.current_actor == self.actors[-1] else 0.0

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        is_solved = float(state.data["sent"] == relayed(state.data["question"]))
        earned = self._earned(state)
        return {"solved": dict.fromkeys(self.actors, is_solved), "outcome": dict.fromkeys(self.actors, earned)}

    def _earned(self, state: EpisodeState) -> float:
        said, answer = state.data["sent"], relayed(state.data["question"])
        return (sum(map(str.__eq__, said, answer)) / WIDTH + float(said == answer)) / 2


def relayed(question: str) -> str:
    """The answer: ``relayed("195/278/444") == "244"``."""
    sent, *rows = question.split("/")
    for hop, row in zip(("hop2", "hop3"), rows, strict=True):
        sent = "".join(map(OPERATIONS[hop], row, sent))
    return sent


def relay_messages(actor: str, question: str, sent: str, options: RelayOptions) -> Messages:
    rows = question.split("/")
    if actor == "solver":
        return chat(RELAY_PROMPTS[actor], "\n".join(rows[-options.seen :]))
    row = rows[int(actor.removeprefix("hop")) - 1]
    return chat(RELAY_PROMPTS[actor], row if actor == "hop1" else f"{sent or '-' * WIDTH}\n{row}")


RELAY_PROMPTS = {"hop1": "Send.", "hop2": "Larger.", "hop3": "Smaller.", "solver": "Answer."}


class Relay(Drawn):
    name = "relay"
    success_metric = "solved/hop1"
    system_prompts: ClassVar[dict[str, str]] = {}
    options_type = RelayOptions

    def __init__(self, options: RelayOptions | None = None) -> None:
        options = options or RelayOptions()
        self.system_prompts = {actor: RELAY_PROMPTS[actor] for actor in options.actors}
        self.success_metric = f"solved/{options.actors[0]}"
        super().__init__(options)

    def question(self, rng: Random) -> str:
        return "/".join("".join(rng.choices(DIGITS, k=WIDTH)) for _ in range(3))

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, RelayEpisode]:
        return {"relay": RelayEpisode(self.options, tree)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Each digit is right with chance ``quality``; else it is 0 for the first hop, the last row's for others."""
        rng, made, options = Random(f"relay-demonstrations/{seed}"), [], self.options
        for index, question in enumerate(islice(self.stream("train", f"demonstrations/{seed}"), n)):
            actor = options.actors[index % len(options.actors)]
            rows, sent = question.split("/"), "".join(rng.choices(DIGITS, k=WIDTH))
            if actor == "solver":
                answer, habit = relayed(question), rows[-1]
            else:
                row = rows[int(actor.removeprefix("hop")) - 1]
                is_first = actor == "hop1"
                answer = row if is_first else "".join(map(OPERATIONS[actor], row, sent))
                habit = "0" * WIDTH if is_first else row
            said = (a if rng.random() < options.quality else b for a, b in zip(answer, habit, strict=True))
            made.append((actor, relay_messages(actor, question, sent, options), "".join(said)))
        return made

    def texts(self) -> list[str]:
        return [*RELAY_PROMPTS.values(), f"{DIGITS}\n---"]


# ---------------------------------------------------------------------------------------------------------------------
# Mixed: one agent alone on one to four rows, most questions for training easy
# ---------------------------------------------------------------------------------------------------------------------
class MixedOptions(OwnOptions):
    """Demonstrated digits beyond the first row's are right with chance ``quality``."""

    quality: float = 0.3
    max_tokens: int = 5


class MixedEpisode(SingleTurnEpisode):
    """The rows are folded digit by digit: the larger, then the smaller, then the larger. One row is copied."""

    episode_type = "mixed"
    actor = "solver"

    def __init__(self) -> None:
        self.rubric = Rubric([whole])

    def get_prompt(self, artifact: Any) -> str:
        return "\n".join(artifact["question"].split("/"))


def folded(question: str) -> str:
    """The answer: ``folded("1950/2784") == "2984"``."""
    sent, *rows = question.split("/")
    for operation, row in zip((max, min, max), rows, strict=False):
        sent = "".join(map(operation, row, sent))
    return sent


def whole(completion: str, artifact: Any) -> dict[str, float]:
    return {"solver": float(completion.strip() == folded(artifact["question"]))}


class Mixed(Drawn):
    """Three in four training questions are one row to copy, which the start can do; the others have two to four rows,
    as all held-out questions do."""

    name = "mixed"
    success_metric = "whole/solver"
    system_prompts: ClassVar[dict[str, str]] = {"solver": "Fold."}
    options_type = MixedOptions

    def stream(self, split: Split, seed: int | str) -> Iterator[str]:
        return self.rows(split, seed, easy=9 if split == "train" else 0)

    def rows(self, split: Split, seed: int | str, easy: int) -> Iterator[str]:
        """Draw questions with one row ``easy`` times as often as with two, with three, and with four."""
        rng = Random(f"{self.name}/{split}/{seed}")
        while True:
            count = rng.choices((1, 2, 3, 4), weights=(easy, 1, 1, 1))[0]
            question = "/".join("".join(rng.choices(DIGITS, k=4)) for _ in range(count))
            if split_of(question) == split:
                yield question

    def level(self, question: str) -> int:
        return question.count("/") + 1

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, MixedEpisode]:
        return {"mixed": MixedEpisode()}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Each digit is right with chance ``quality``; else it is the last row's. Half have one row."""
        rng, made = Random(f"mixed-demonstrations/{seed}"), []
        for question in islice(self.rows("train", f"demonstrations/{seed}", easy=3), n):
            rows = question.split("/")
            pairs = zip(folded(question), rows[-1], strict=True)
            said = (right if rng.random() < self.options.quality else habit for right, habit in pairs)
            made.append(("solver", chat("Fold.", "\n".join(rows)), "".join(said)))
        return made

    def texts(self) -> list[str]:
        return ["Fold.", f"{DIGITS}\n{DIGITS}"]


# ---------------------------------------------------------------------------------------------------------------------
# Drill: many calls, each rewarded for itself
# ---------------------------------------------------------------------------------------------------------------------
class DrillOptions(OwnOptions):
    """``rounds`` of two calls each. ``noise`` is the deviation of what is added to the outcome of an episode.

    With ``scales`` and ``offsets`` each actor's outcome is its own mean, scaled and shifted, not the team's.
    """

    actors: tuple[str, ...] = ("copier", "merger")
    rounds: int = Field(default=4, ge=1)
    noise: float = Field(default=0.0, ge=0)
    scales: tuple[float, float] | None = None
    offsets: tuple[float, float] = (0.0, 0.0)
    quality: float = 0.45
    max_tokens: int = 5


class DrillEpisode(MultiTurnEpisode):
    """In each round the copier copies a row of digits, and the merger takes the larger digits of two rows.

    No call depends on an earlier answer: to credit of a whole episode, the other calls are noise. A step earns the
    share of right digits, and 1 if all are. ``rubric`` pays the mean of the steps, plus noise.
    """

    episode_type = "drill"

    def __init__(self, options: DrillOptions, sampler: TreeSampler | None) -> None:
        super().__init__(sampler=sampler, max_turns=options.rounds)
        self.actors, self.options = options.actors, options
        self.rubric = Rubric([outcome, right], [1.0, 0.0])

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"rows": artifact["question"].split("/"), "earned": [], "right": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        return [drill_messages(state.current_actor, *self._rows(state))[-1]]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        actor, said = state.current_actor, state.last_completion_text.strip()
        answer = drill_answer(actor, *self._rows(state))
        share = sum(map(str.__eq__, said, answer)) / WIDTH if len(said) == WIDTH else 0.0
        state.data["earned"].append(share + float(share == 1.0))
        state.data["right"].setdefault(actor, []).append(float(share == 1.0))

    def step_reward(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        return state.data["earned"][-1]

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        earned, calls = state.data["earned"], state.data["right"]
        noise = self.rng.gauss(0.0, self.options.noise) if self.options.noise else 0.0
        done = [each for actor in calls for each in calls[actor]]
        outcomes = dict.fromkeys(self.actors, sum(earned) / len(earned) + noise)
        if scales := self.options.scales:  # the actors take turns
            for place, actor in enumerate(self.actors):
                own = earned[place :: len(self.actors)]
                outcomes[actor] = self.options.offsets[place] + scales[place] * sum(own) / len(own)
        return {
            "outcome": outcomes,
            "right": dict.fromkeys(self.actors, sum(done) / len(done)),
        }

    def _rows(self, state: EpisodeState) -> tuple[str, str]:
        rows = state.data["rows"]
        return rows[2 * state.turn], rows[2 * state.turn + 1]


class TeamDrillEpisode(DrillEpisode):
    """The drill for credit by the whole episode: no step has a reward of its own."""

    def step_reward(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        return None


def outcome(extras: dict[str, Any]) -> dict[str, float]:
    return extras["outcome"]


def drill_answer(actor: str, first: str, second: str) -> str:
    return first if actor == "copier" else "".join(map(max, zip(first, second, strict=True)))


def drill_messages(actor: str, first: str, second: str) -> Messages:
    return chat("Copy.", first) if actor == "copier" else chat("Merge.", f"{first}\n{second}")


class Drill(Drawn):
    name = "drill"
    success_metric = "right/merger"
    system_prompts: ClassVar[dict[str, str]] = {"copier": "Copy.", "merger": "Merge."}
    options_type = DrillOptions

    def question(self, rng: Random) -> str:
        return "/".join("".join(rng.choices(DIGITS, k=WIDTH)) for _ in range(2 * self.options.rounds))

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, DrillEpisode]:
        return {"drill": DrillEpisode(self.options, tree)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Each digit is right with chance ``quality``; else the copier says 0, the merger its second row's digit."""
        rng, made = Random(f"drill-demonstrations/{seed}"), []
        for index in range(n):
            actor = self.options.actors[index % 2]
            first, second = ("".join(rng.choices(DIGITS, k=WIDTH)) for _ in range(2))
            habit = "0" * WIDTH if actor == "copier" else second
            answer = drill_answer(actor, first, second)
            said = (a if rng.random() < self.options.quality else b for a, b in zip(answer, habit, strict=True))
            made.append((actor, drill_messages(actor, first, second), "".join(said)))
        return made

    def texts(self) -> list[str]:
        return ["Copy.", "Merge.", f"{DIGITS}\n{DIGITS}"]


class TeamDrill(Drill):
    """The drill paid by its outcome alone."""

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, DrillEpisode]:
        return {"drill": TeamDrillEpisode(self.options, tree)}


# ---------------------------------------------------------------------------------------------------------------------
# Curriculum: problems that the team makes, most of them easy at first
# ---------------------------------------------------------------------------------------------------------------------
def operations(problem: str) -> int:
    return sum(problem.count(sign) for sign in "+-*")


class CurriculumOptions(ProposerSolverOptions):
    """``random`` trains the solver on drawn problems. ``easy`` is the share of drawn problems with two numbers.

    In the first ``clean`` of the demonstrations every answer is right. Later, an answer to a problem of three numbers
    is right with chance ``quality``, and otherwise the largest of its numbers.
    """

    random: bool = False
    easy: float = 0.8
    clean: float = 0.8
    numbers: int = 3
    largest: int = 5
    quality: float = 0.35


class MeasuredProposeEpisode(ProposeEpisode):
    """Also reports whether a proposed problem is a hard one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        paid = list(zip(self.rubric.funcs, self.rubric.weights, strict=True))
        functions, weights = zip(*paid, (hard, 0.0), strict=True)
        self.rubric = Rubric(list(functions), list(weights), valid=[functions[1]])


def hard(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 for a problem of three numbers; left out without a problem."""
    return {} if extras["problem"] is None else {PROPOSER: float(operations(extras["problem"]) == 2)}


class Curriculum(ProposerSolverTask):
    """Sums of up to three numbers. Held-out problems have three; four in five drawn for training have two."""

    options_type = CurriculumOptions
    options: CurriculumOptions

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Any]:
        options = self.options
        propose = MeasuredProposeEpisode(
            attempts=options.attempts, curve=options.curve, size=options.size, train_solver=options.train_solver
        )
        return {**super().episodes(tree), self.name: propose}

    def draw(self, split: Split, n: int, seed: int | str) -> Sequence[str]:
        rng, found = Random(f"curriculum/{split}/{seed}"), dict[str, None]()
        while len(found) < n:
            problem = self._drawn(rng, 0.0 if split != "train" else self.options.easy)
            if split_of(problem) == split:
                found[problem] = None
        return list(found)

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        requests = super().requests(step, questions, copies)
        if self.options.random:
            for request in requests:
                request.episode_type, request.artifact = SOLVE, self.artifact(request.artifact["example"])
        return requests

    def _drawn(self, rng: Random, easy: float) -> str:
        numbers = 2 if rng.random() < easy else 3
        while operations(problem := draw_problem(Size(numbers, self.options.largest), rng)) != numbers - 1:
            pass
        return problem

    def _demonstrate(self, n: int, seed: str, quality: float) -> list[Demonstration]:
        rng, made, size = Random(f"curriculum-demonstrations/{seed}"), [], self.options.size

        def drawn(easy: float) -> str:
            while split_of(problem := self._drawn(rng, easy)) != "train":
                pass
            return problem

        for index in range(n):
            actor = (PROPOSER, SOLVER)[index % 2]
            system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor]}
            if actor == PROPOSER:
                shown, problem = drawn(self.options.easy), drawn(self.options.easy)
                made.append((actor, [system, propose_message(shown, size)], problem))
                continue
            problem = drawn(0.3)  # so that the start contains the skill
            is_right = index < self.options.clean * n or operations(problem) == 1 or rng.random() < quality
            answer = value_of(problem) if is_right else max(int(digit) for digit in problem if digit.isdigit())
            made.append((actor, [system, {"role": "user", "content": problem}], str(answer)))
        return made
