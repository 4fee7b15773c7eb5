"""The search orchestra (Dr. MAS): a verifier routes to a searcher for more pages, or to an answerer for the end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from random import Random
from typing import Any

from pydantic import Field, model_validator

from turnwise.arena import Episode, MultiTurnEpisode, RewardMix, RewardParts, Rubric, TreeSampler
from turnwise.arena.rewards.rubric import SHARE
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions, with_round, with_team
from turnwise.tasks.generated import GeneratedTask, texts_of
from turnwise.tasks.questions import QuestionSet
from turnwise.tasks.search_orchestra.corpus import (
    MAX_HOPS,
    Passage,
    SearchIndex,
    SearchQuestion,
    made_up_world,
    normalize,
    read_world,
    sufficient,
    support_share,
)
from turnwise.tasks.search_orchestra.prompts import (
    ANSWERER,
    SEARCHER,
    SYSTEM_PROMPTS,
    VERIFIER,
    demonstrations,
    parse_line,
    parse_route,
    random_answer,
    read_view,
    view_message,
)
from turnwise.types import EpisodeState, Messages
from turnwise.utils.files import PathText

TEAM = (VERIFIER, SEARCHER, ANSWERER)


class SearchOrchestraEpisode(MultiTurnEpisode):
    """One question: verifier, then searcher and verifier again, …, then answerer.

    The artifact is ``{"question": ..., "answer": ..., "supports": [titles]}``. After a query the best ``passages`` of
    ``index`` join the passages found so far. After ``max_searches`` queries the answerer acts next. An unreadable route
    goes to the answerer, so a verifier that babbles can't keep a question in the loop. An unreadable query finds
    nothing. Without a verifier in ``actors`` the searcher asks all its queries; without a searcher nothing is found.
    The team's part is the outcome: 1 if the answer is right, compared as SQuAD does. A verifier's own part is 1 if the
    route was right (to the answerer once everything needed is found). A searcher's own part is the share of the needed
    pages found so far. An answerer's own part is the outcome. By default all three earn the outcome. A tree sampler
    must score each action before the end is known, so there an action earns its own part. No actor sees another one's
    thought.

    Example: ``SearchOrchestraEpisode(SearchIndex(passages), max_searches=3)``
    """

    episode_type = "search_orchestra"

    def __init__(
        self,
        index: SearchIndex,
        *,
        max_searches: int = 3,
        passages: int = 2,
        actors: Sequence[str] = TEAM,
        sampler: TreeSampler | None = None,
    ) -> None:
        for name, count in (("max_searches", max_searches), ("passages", passages)):
            if count < 1:
                raise ValueError(f"{name}={count!r}: expected at least 1")
        super().__init__(sampler=sampler, max_turns=max_searches + 1)
        self.actors = tuple(actors)
        self.index, self.max_searches, self.passages = index, max_searches, passages
        self.by_action = sampler is not None and sampler.selects
        self.mix = RewardMix(0.0 if self.by_action else 1.0, "convex")
        self.rubric = Rubric(
            [correct, own_part, found_share, searches, readable],
            [1.0, 0.0 if self.by_action else 1.0, 0.0, 0.0, 0.0],
            own=[] if self.by_action else [own_part],  # under a tree the actions are mixed, not the whole episode
            valid=[readable],
            ranges={found_share: SHARE},
        )

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"found": [], "queries": [], "route": None, "answer": None, "worth": 0.0, "own": {}, "read": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        unread = not all(state.data["read"].get(state.current_actor, [True])[-1:])
        return [with_round(view_message(artifact["question"], _found(state)), state.turn, unread=unread)]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        question = _question(artifact)
        if state.current_actor == ANSWERER:
            answer = state.data["answer"] = parse_line(state.last_completion_text)
            state.data["worth"] = float(answer is not None and normalize(answer) == normalize(question.answer))
            read = answer is not None
        else:
            read = (self._route if state.current_actor == VERIFIER else self._search)(state, question)
        state.data["read"].setdefault(state.current_actor, []).append(read)
        state.data["own"][state.current_actor] = state.data["worth"]

    def _route(self, state: EpisodeState, question: SearchQuestion) -> bool:
        route = parse_route(state.last_completion_text)
        state.data["route"] = route or "answer"
        wanted = "answer" if sufficient(question, _found(state)) else "search"
        state.data["worth"] = float(state.data["route"] == wanted)
        return route is not None

    def _search(self, state: EpisodeState, question: SearchQuestion) -> bool:
        data, query = state.data, parse_line(state.last_completion_text)
        data["queries"].append(query)
        for passage in self.index.search(query, self.passages) if query else ():
            if list(passage) not in data["found"]:
                data["found"].append(list(passage))
        data["worth"] = support_share(question, _found(state))
        return query is not None

    def next_actor(self, state: EpisodeState, arena: Any, artifact: Any) -> str:
        if state.current_actor == VERIFIER:
            wanted = SEARCHER if state.data["route"] == "search" else ANSWERER
        else:
            again = VERIFIER if VERIFIER in self.actors else SEARCHER
            wanted = again if len(state.data["queries"]) < self.max_searches else ANSWERER
        return wanted if wanted in self.actors else ANSWERER

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return state.current_actor == ANSWERER

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts | None:
        if not self.by_action:
            return None
        data, actor = state.data, state.current_actor
        return RewardParts(data["worth"] if actor == ANSWERER else 0.0, data["worth"], data["read"][actor][-1])

    def team_value(self, state: EpisodeState, arena: Any, artifact: Any) -> float:
        """The outcome once there is an answer, the share of the needed pages found before. A route changes nothing."""
        if ANSWERER in state.data["own"]:
            return float(state.data["own"][ANSWERER])
        return support_share(_question(artifact), _found(state))

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``correct``, ``answer``, ``queries``; ``found`` (titles) and ``passages``, in order.

        ``own`` is the own part of each actor's last action, ``read`` the share of its completions that could be read.
        """
        data = state.data
        return {
            "correct": data["worth"],  # the last to act is always the answerer
            "answer": data["answer"],
            "own": dict(data["own"]),
            "queries": list(data["queries"]),
            "found": [title for title, _ in data["found"]],
            "passages": [list(passage) for passage in data["found"]],
            "read": {actor: sum(read) / len(read) for actor, read in data["read"].items()},
        }


def _found(state: EpisodeState) -> list[Passage]:
    return [Passage(*passage) for passage in state.data["found"]]


def _question(artifact: Any) -> SearchQuestion:
    return SearchQuestion(artifact["question"], artifact["answer"], tuple(artifact.get("supports", ())))


def correct(extras: dict[str, Any]) -> dict[str, float]:
    """The outcome, for all three actors, even if one never acted."""
    return dict.fromkeys(SYSTEM_PROMPTS, extras["correct"])


def own_part(extras: dict[str, Any]) -> dict[str, float]:
    """Own part of each actor's last action: a right route, the share of the needed pages, or the outcome."""
    return extras["own"]


def found_share(extras: dict[str, Any], artifact: Any) -> dict[str, float]:
    """The share of the needed pages that were found."""
    passages = [Passage(*passage) for passage in extras["passages"]]
    return {SEARCHER: support_share(_question(artifact), passages)}


def searches(extras: dict[str, Any]) -> dict[str, float]:
    """Number of queries asked."""
    return {SEARCHER: float(len(extras["queries"]))}


def readable(extras: dict[str, Any]) -> dict[str, float]:
    """The share of each actor's completions that could be read."""
    return extras["read"]


class SearchOrchestraOptions(TaskOptions):
    """Options of the task ``search_orchestra``.

    ``corpus`` is a folder of text files and ``questions`` a JSONL file (see :func:`~.corpus.read_world`). Without both,
    the questions are about the made-up world and need up to ``hops`` pages. A search finds up to ``passages`` passages,
    and a team searches at most ``max_searches`` times. ``quality`` is the chance that a demonstrated reply is right.
    """

    corpus: PathText | None = None
    questions: PathText | None = None
    hops: int = Field(default=2, ge=1, le=MAX_HOPS)
    max_searches: int = Field(default=3, ge=1)
    passages: int = Field(default=2, ge=1)
    quality: float = Field(default=0.4, ge=0, le=1)
    max_tokens: int = Field(default=48, ge=1)

    @model_validator(mode="after")
    def _both_or_neither(self) -> SearchOrchestraOptions:
        if (self.corpus is None) != (self.questions is None):
            raise ValueError("expected 'corpus' and 'questions' together, or neither")
        return self


class SearchOrchestraTask(GeneratedTask):
    """Questions over a folder of text; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Example: ``SearchOrchestraTask(SearchOrchestraOptions(corpus="docs", questions="questions.jsonl"))``
    """

    name = "search_orchestra"
    system_prompts = SYSTEM_PROMPTS
    success_metric = f"correct/{ANSWERER}"
    options_type = SearchOrchestraOptions
    options: SearchOrchestraOptions
    team: Sequence[str] = TEAM

    def __init__(self, options: SearchOrchestraOptions | None = None) -> None:
        super().__init__(options)
        if self.options.corpus is not None and self.options.questions is not None:
            self.world = read_world(self.options.corpus, self.options.questions)
        else:
            self.world = made_up_world(self.options.hops)

    @property
    def roles(self) -> Sequence[str]:
        return self.team

    def with_actors(self, actors: Sequence[str]) -> SearchOrchestraTask:
        """Return the task for some of its actors. The answerer must be one of them."""
        return with_team(self, actors, needed=ANSWERER)

    @cached_property
    def question_set(self) -> QuestionSet:
        """The question texts, with splits and draws."""
        return QuestionSet(((text, text) for text in self.world.questions), what=f"task {self.name!r}")

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        index, options = SearchIndex(self.world.passages), self.options
        episode = SearchOrchestraEpisode(
            index, max_searches=options.max_searches, passages=options.passages, actors=self.team, sampler=tree
        )
        return {self.name: episode}

    def artifact(self, question: str) -> dict[str, Any]:
        asked = self.world.questions[question]
        return {"question": question, "answer": asked.answer, "supports": list(asked.supports)}

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        if split == "train":
            return self.question_set.draw(split, n, f"{self.name}/{seed}")
        return self.question_set.first(split, n)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Demonstrate on training questions with known supports. If ``n`` exceeds their number, they repeat."""
        return self._demonstrate(n, f"{seed}", self.options.quality)

    def texts(self) -> list[str]:
        shown = self._demonstrate(240, "texts", 0.4)
        made = texts_of(shown)
        return [*made, *(passage.text for passage in self.world.passages[:240]), *SYSTEM_PROMPTS.values()]

    def oracle(self) -> Player:
        """A player that finds page after page and knows every answer."""

        def play(actor_id: str, messages: Messages) -> str:
            text, found = read_view(messages)
            question = self.world.questions[text]
            if actor_id == ANSWERER:
                return question.answer
            if actor_id == VERIFIER:
                return "answer" if sufficient(question, found) else "search"
            if not question.supports:
                return f"{text} {question.answer}".replace("\n", " ")
            titles = {passage.title for passage in found}
            missing = [index for index, title in enumerate(question.supports) if title not in titles]
            return question.supports[missing[0] if missing else -1]  # without a verifier it is asked all the same

        return play

    def random_player(self, seed: int) -> Player:
        """A player with random routes. It searches for half of the question's words, and answers with a found name."""
        rng = Random(f"search-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            text, found = read_view(messages)
            if actor_id == VERIFIER:
                return rng.choice(("answer", "search"))
            words = text.split()
            return (
                " ".join(rng.sample(words, -(-len(words) // 2)))
                if actor_id == SEARCHER
                else random_answer(text, found, rng)
            )

        return play

    def _demonstrate(self, n: int, seed: str, quality: float) -> list[Demonstration]:
        questions = [text for text in self.question_set.listed("train") if self.world.questions[text].supports]
        if not questions:
            return []
        laps, count = range(-(-n // len(questions))), len(questions)
        texts = [questions[index] for lap in laps for index in _shuffled(count, f"demonstrations/{seed}/{lap}")]
        return demonstrations(self.world, texts[:n], seed, quality)


@lru_cache(maxsize=16)
def _shuffled(n: int, seed: str) -> Sequence[int]:
    return Random(f"search-order/{seed}").sample(range(n), n)
