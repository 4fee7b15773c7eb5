"""The refinement loop: round by round, a generator drafts and a critic names the faults; or a generator alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from turnwise.arena import Episode, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split, with_round, without_round
from turnwise.tasks.generated import texts_of
from turnwise.tasks.refine_loop.rules import (
    COUNTS,
    HIGHEST,
    KINDS,
    LOWEST,
    Draft,
    answers,
    broken_rules,
    draw_questions,
    draw_training,
    format_draft,
    format_review,
    parse_draft,
    parse_question,
    parse_review,
)
from turnwise.tasks.teams import ActingEpisode, TeamOptions, TeamTask, valid_format
from turnwise.types import EpisodeState, Message, Messages

GENERATOR, CRITIC = "generator", "critic"
Role = Literal["generator", "critic"]
TEAM: tuple[Role, ...] = ("generator", "critic")
SYSTEM_PROMPTS = {
    GENERATOR: "Write the numbers. Reply with them alone, such as 2 3 4.",
    CRITIC: "Say which rules the draft breaks, such as wrong: sum, count. If none, say ok.",
}
UNREAD = 0.1  # share of the demonstrations with a draft, in which the generator's own last reply could not be read
LATER = 0.5  # share of a generator's demonstrations in a team that begin with a draft and its review
_DRAFT, _REVIEW, _NONE = "\nDraft: ", "\nReview: ", "none"


class RefineLoopView(NamedTuple):
    """Contents of a prompt: the question, the current draft, and the review of it."""

    question: str
    draft: Draft | None = None
    review: str | None = None


def view_message(actor_id: str, view: RefineLoopView) -> Message:
    """Write the user message that shows ``view``. A critic's message shows ``none`` if there is no draft."""
    text = view.question
    if view.draft is not None or actor_id == CRITIC:
        text += _DRAFT + (format_draft(view.draft) if view.draft else _NONE)
    if view.review is not None:
        text += _REVIEW + view.review
    return {"role": "user", "content": text}


def read_view(messages: Messages) -> RefineLoopView:
    """Parse the view from a prompt."""
    shown, reviewed, review = without_round(messages).partition(_REVIEW)
    question, _, draft = shown.partition(_DRAFT)
    return RefineLoopView(question, parse_draft(draft), review if reviewed else None)


def own_part(extras: dict[str, Any]) -> dict[str, float]:
    """Own part of each actor's last action: the share of rules that the draft keeps, or that it judged correctly."""
    return extras["own"]


def found_faults(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 if the last review names exactly the rules that the last draft breaks."""
    if CRITIC not in extras["own"] or extras["review"] is None:
        return {}
    return {CRITIC: float(extras["review"] == format_review(extras["broken"]))}


class RefineLoopEpisode(ActingEpisode):
    """One question, played by ``actors`` in order for up to ``max_turns`` rounds, until the critic says ok.

    The artifact is ``{"question": "Write 4 numbers from 1 to 9: sum 17, different."}``. A generator's action is a whole
    list, which becomes the draft. A critic's action names the rules that the draft breaks; the generator sees it next.
    An unreadable reply leaves draft and review unchanged and has a cost. The team's part of a step is 1 if the draft
    breaks no rule. The generator's own part is the share of the rules that it keeps, which is also the team's value.
    The critic's own part is the share that it judges correctly. ``rubric`` has the same parts for the whole episode:
    the outcome for every actor, and the own part of its last action.

    Example: ``RefineLoopEpisode(sampler=TreeSampler(branches=8))`` for the team,
    ``RefineLoopEpisode(actors=("generator",), max_turns=1)`` for one agent.
    """

    episode_type = "refine_loop"
    team = TEAM
    own_parts, measures = (own_part,), (valid_format, found_faults)

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        parse_question(artifact["question"])  # an invalid question raises here, with its name
        state.data = {"question": artifact["question"], "draft": None, "review": None, "approved": False, "acts": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        """Build the prompt from question, draft, round and, for the generator, the review. It has no history."""
        data, actor = state.data, state.current_actor
        view = RefineLoopView(data["question"], _draft(state), data["review"] if actor == GENERATOR else None)
        return [with_round(view_message(actor, view), state.turn, unread=self.is_unread(state))]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        text = state.last_completion_text
        if state.current_actor == CRITIC:
            self.add_act(state, self._criticize(state, text))
            return
        draft = parse_draft(text)
        if draft is not None:
            state.data["draft"], state.data["review"] = list(draft), None
        self.add_act(state, {"valid": draft is not None, "own": _kept_share(state)})

    def _criticize(self, state: EpisodeState, text: str) -> dict[str, float]:
        called = parse_review(text)
        names = set(parse_question(state.data["question"]).names)
        if called is None:
            return {"valid": False, "own": 0.0}
        state.data["review"], state.data["approved"] = format_review(called), not called
        # A named rule that the question does not have counts as one more wrong judgement.
        return {"valid": True, "own": max(0.0, 1.0 - len(called ^ _broken(state)) / len(names))}

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        """The share of the rules that the draft keeps. A critic's action leaves it unchanged."""
        return _kept_share(state)

    def is_solved(self, state: EpisodeState) -> bool:
        return not _broken(state)

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return state.data["approved"]

    def team_answer(self, state: EpisodeState, arena: Any, artifact: Any) -> tuple[Draft, bool] | None:
        """The draft, right if it breaks no rule; ``None`` for the critic."""
        draft = _draft(state) if state.current_actor == GENERATOR else None
        return None if draft is None else (draft, self.is_solved(state))

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved``, ``own`` and ``valid`` by actor; ``draft``, ``review``, ``broken`` and ``rounds``."""
        draft = _draft(state)
        return {
            **self.team_extras(state),
            "draft": None if draft is None else list(draft),
            "review": state.data["review"],
            "broken": sorted(_broken(state)),
        }


def _draft(state: EpisodeState) -> Draft | None:
    return None if state.data["draft"] is None else tuple(state.data["draft"])


def _broken(state: EpisodeState) -> frozenset[str]:
    return broken_rules(parse_question(state.data["question"]), _draft(state))


def _kept_share(state: EpisodeState) -> float:
    return 1.0 - len(_broken(state)) / len(parse_question(state.data["question"]).names)


class RefineLoopOptions(TeamOptions):
    """Options of the task ``refine_loop``. ``actors = ["generator"]`` with ``max_turns = 1`` is the single agent.

    ``rules`` is the number of rules of a question in addition to the count. ``quality`` is the chance that a
    demonstrated list or review is right.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=2, ge=1)
    rules: int = Field(default=3, ge=2, le=len(KINDS))
    max_tokens: int = Field(default=32, ge=1)

    @field_validator("actors")
    @classmethod
    def _a_generator_first(cls, actors: tuple[Role, ...]) -> tuple[Role, ...]:
        if actors[:1] != (GENERATOR,):
            raise ValueError("expected the generator first, whose draft is reviewed")
        return actors


class RefineLoopTask(TeamTask):
    """Drafts and reviews; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Example: ``RefineLoopTask(RefineLoopOptions(rules=4, max_turns=3))``
    """

    name = "refine_loop"
    system_prompts = SYSTEM_PROMPTS
    options_type = RefineLoopOptions
    options: RefineLoopOptions

    def episode(self, tree: TreeSampler | None = None) -> Episode:
        return RefineLoopEpisode(**self.options.of_episode(), sampler=tree)

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return draw_questions(split, n, seed, self.options.rules)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        return self._demonstrate(n, self.options.actors, f"{seed}", self.options.quality)

    def texts(self) -> list[str]:
        """Every role's prompts and replies. They don't depend on the chosen actors."""
        shown = self._demonstrate(120, TEAM, "texts", 0.4)
        return texts_of(shown)

    def oracle(self) -> Player:
        """A player that writes the first list that breaks no rule, and exact reviews."""

        def play(actor_id: str, messages: Messages) -> str:
            view = read_view(messages)
            question = parse_question(view.question)
            if actor_id == GENERATOR:
                return format_draft(answers(question)[0])
            return format_review(broken_rules(question, view.draft))

        return play

    def random_player(self, seed: int) -> Player:
        """A player that writes random numbers of the right count, and calls each rule broken half of the time."""
        rng = Random(f"refine-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            question = parse_question(read_view(messages).question)
            if actor_id == GENERATOR:
                return format_draft(tuple(rng.randint(LOWEST, HIGHEST) for _ in range(question.length)))
            return format_review([name for name in question.names if rng.random() < 0.5])

        return play

    def _demonstrate(self, n: int, actors: Sequence[str], seed: str, quality: float) -> list[Demonstration]:
        rng = Random(f"refine-demonstrations/{seed}")
        team = len(actors) > 1
        return [
            _demonstrate(draw_training(self.options.rules, rng), actors[index % len(actors)], team, quality, rng)
            for index in range(n)
        ]


def _demonstrate(text: str, actor: str, team: bool, quality: float, rng: Random) -> Demonstration:
    question = parse_question(text)
    right = rng.random() < quality
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor]}
    if actor == CRITIC:
        solutions = answers(question)
        view = RefineLoopView(text, _near_miss(solutions, rng) if rng.random() < 0.7 else rng.choice(solutions))
        broken = broken_rules(question, view.draft)
        review = broken if right else frozenset(name for name in question.names if rng.random() < 0.5)
        return actor, [system, view_message(actor, view)], format_review(review)
    view = RefineLoopView(text)
    if team and rng.random() < LATER:
        draft = _near_miss(answers(question), rng)
        view = RefineLoopView(text, draft, format_review(broken_rules(question, draft)))
    message = with_round(view_message(actor, view), int(view.draft is not None), unread=rng.random() < UNREAD)
    reply = rng.choice(answers(question)) if right else _near_miss(answers(question), rng)
    return actor, [system, message], format_draft(reply)


def _near_miss(solutions: Sequence[Draft], rng: Random) -> Draft:
    """Make a list that breaks some rule: an answer with a number changed, added or left out."""
    right = set(solutions)
    while True:
        draft = list(rng.choice(solutions))
        index = rng.randrange(len(draft))
        draft[index] = rng.randint(LOWEST, HIGHEST)
        if rng.random() < 0.2:
            draft = draft[:-1] if len(draft) > COUNTS[0] else [*draft, draft[index]]
        if tuple(draft) not in right:
            return tuple(draft)
