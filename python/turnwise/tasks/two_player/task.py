"""Base of the tasks for two players: requests from both seats, demonstrations, options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from turnwise.arena import Episode, TreeSampler
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.tasks.base import Demonstration, Player, Split, TaskOptions, check_counts, check_split
from turnwise.tasks.generated import texts_of
from turnwise.tasks.two_player.episode import MODEL, TwoPlayerEpisode
from turnwise.tasks.two_player.rules import SEATS, PlayerFactory, Rules
from turnwise.types import Actor, EpisodeRequest, TaskCapabilities


class TwoPlayerOptions(TaskOptions):
    """Common options of games for two.

    ``opponent`` plays the other seat in evaluations. ``quality`` is the chance that a demonstrated action is the
    oracle's; the others are random ones. ``invalid_cost``, which each game defines, is the cost of an invalid action.
    """

    opponent: Literal["random", "oracle"] = "random"
    quality: float = Field(default=0.4, ge=0, le=1)
    max_tokens: int = Field(default=16, ge=1)


class TwoPlayerTask(ABC):
    """A game for two; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Training is self-play: the model plays both seats, and RAE compares each with its own baseline. Evaluation is
    against ``options.opponent``, each question from both seats, so that chance and the first move cancel out.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[TwoPlayerOptions]]
    max_turns: ClassVar[int]
    capabilities = TaskCapabilities(credit_rule="rae", seats=SEATS, measured=(MODEL,))
    success_metric = f"score/{MODEL}"

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options or self.options_type()

    # -- each game's own -----------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def rules(self) -> Rules:
        """The game with the task's options."""

    @property
    @abstractmethod
    def players(self) -> dict[str, PlayerFactory]:
        """The scripted players: ``"random"`` and ``"oracle"``."""

    @property
    @abstractmethod
    def system_prompts(self) -> dict[str, str]:
        """Return each seat's system prompt."""

    @abstractmethod
    def questions(self, split: Split, n: int, seed: int | str) -> Iterator[Mapping[str, Any]]:
        """Yield ``n`` questions of a split. A question describes the start of a game."""

    # -- the protocol of tasks -----------------------------------------------------------------------------------------
    @property
    def actors(self) -> list[Actor]:
        return [Actor(seat, self.system_prompts[seat], max_tokens=self.options.max_tokens) for seat in SEATS]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """Return the episode. Raises ``ValueError`` for a tree, as a move's value is known only at the game's end."""
        if tree is not None:
            raise ValueError(f"task {self.name!r} is played to its end: expected rollout.branches = 1, no tree")
        return {self.name: TwoPlayerEpisode(self.rules, self.players, self.max_turns)}

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Self-play on fresh questions at every step."""
        check_counts(questions=questions, copies=copies)
        seed = self.options.seed
        return [
            EpisodeRequest(
                self.name,
                question,
                group_id=f"{step}/{index}",
                seed=derive_seed(self.name, seed, step, index, copy),
            )
            for index, question in enumerate(self.questions("train", questions, f"{seed}/step-{step}"))
            for copy in range(copies)
        ]

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Return ``n`` matches against ``options.opponent``: each question from both seats, with the same seed.

        The matches don't depend on the task's seed, so that runs can be compared.
        """
        check_split(split)
        made = []
        for match, question in enumerate(self.questions(split, (n + 1) // 2, 0)):
            for seat in SEATS:
                artifact = {**question, "model": seat, "opponent": self.options.opponent, "match": f"{split}-{match}"}
                made.append(self._held_out(split, match, artifact))
        return made[:n]

    def match_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Return ``n`` questions of a held-out split with all seats open. They don't depend on the task's seed.

        The caller sets the players with ``EpisodeRequest.policies``.
        """
        check_split(split)
        check_counts(n=n)
        return [self._held_out(split, match, question) for match, question in enumerate(self.questions(split, n, 0))]

    def _held_out(self, split: Split, match: int, artifact: Any) -> EpisodeRequest:
        """Make one match. Its seed does not depend on the players of its seats."""
        seed = derive_seed(self.name, split, match)
        return EpisodeRequest(self.name, artifact, group_id=f"{split}/{match}", seed=seed, is_trainable=False)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Demonstrate both seats in whole games. An action is the oracle's with chance ``quality``, else random."""
        rng = Random(f"{self.name}-demonstrations/{seed}")
        games = self.questions("train", n, f"demonstrations/{seed}")
        shown: list[Demonstration] = []
        for question in games:
            shown += self._demonstrated(question, rng)
            if len(shown) >= n:
                break
        return shown[:n]

    def texts(self) -> list[str]:
        """Both seats' prompts and replies."""
        return texts_of(self.demonstrations(120, 0))

    def oracle(self) -> Player:
        return self.players["oracle"](Random(f"{self.name}-oracle"))

    def random_player(self, seed: int) -> Player:
        """A player that takes each legal action with equal probability."""
        return self.players["random"](Random(f"{self.name}-random/{seed}"))

    def _demonstrated(self, question: Mapping[str, Any], rng: Random) -> list[Demonstration]:
        rules, prompts = self.rules, self.system_prompts
        players = {name: make(rng) for name, make in self.players.items()}
        game = rules.start(question)
        shown = []
        while (seat := rules.to_move(game)) is not None:
            said = rules.messages(game, seat)
            player = players["oracle" if rng.random() < self.options.quality else "random"]
            reply = player(SEATS[seat], said)
            verdict = rules.play(game, reply)
            assert verdict == "legal", f"{self.name}: a scripted player gave {reply!r}, which is {verdict}"
            shown.append((SEATS[seat], [{"role": "system", "content": prompts[SEATS[seat]]}, *said], reply))
        return shown
