"""A task whose questions are the seeds of a foreign environment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from random import Random
from typing import Any, ClassVar

from turnwise.arena import Episode, TreeSampler
from turnwise.arena.runtime.hashing import derive_seed
from turnwise.integrations.environments.base.episode import MODEL, ForeignEpisode
from turnwise.integrations.environments.base.forks import RunningPlay, choose_fork_method
from turnwise.integrations.environments.base.play import ForeignGame, ForeignOptions
from turnwise.integrations.environments.base.texts import with_moves
from turnwise.tasks import Demonstration, Player, Split
from turnwise.tasks.base import check_counts, split_of
from turnwise.tasks.generated import draw_distinct, texts_of
from turnwise.types import Actor, EpisodeRequest, Messages, TaskCapabilities

SEEDS = 2**31 - 1
"""Seeds lie below this number, which every package takes."""


class ForeignTask:
    """A task that plays a :class:`ForeignGame`; see :class:`turnwise.tasks.base.Task` for what each method promises.

    A question is a seed. A hash of the task's name and the seed decides its split, so no seed is in two splits. Two
    seeds may still give equal plays where the environment has few. In training the model plays all actors. In
    evaluations of a competitive game it plays each seat in turn, against ``options.opponent``.

    A subclass sets ``options_type`` and ``game_type``.
    """

    options_type: ClassVar[type[ForeignOptions]] = ForeignOptions
    game_type: ClassVar[type[ForeignGame]]

    def __init__(self, options: Any) -> None:
        self.options: Any = options
        self.game: Any = self.game_type(options)

    @property
    def name(self) -> str:
        return self.game.name

    @property
    def has_opponent(self) -> bool:
        return self.game.is_competitive and len(self.game.actors) > 1 and self.options.opponent != "none"

    @property
    def success_metric(self) -> str:
        return f"score/{MODEL}" if self.has_opponent else f"success/{self.game.actors[0]}"

    @property
    def capabilities(self) -> TaskCapabilities:
        if not self.game.is_competitive:
            return TaskCapabilities(credit_rule="grpo")
        return TaskCapabilities(credit_rule="rae", seats=self.game.actors, measured=(MODEL,))

    @property
    def actors(self) -> list[Actor]:
        limit = self.options.max_tokens
        return [Actor(actor, self.game.system_prompt(actor), max_tokens=limit) for actor in self.game.actors]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        """Return the episode. With a tree, first prove how plays fork; raises ``ValueError`` if they can't."""
        if tree is not None:
            self.game.fork_method = choose_fork_method(self.game)
        return {self.name: ForeignEpisode(self.game, sampler=tree)}

    def draw(self, split: Split, n: int, seed: int | str) -> list[int]:
        """Draw ``n`` different seeds of ``split``. Equal arguments give equal lists; a larger ``n`` extends one."""
        check_counts(n=n)
        rng = Random(f"{self.name}/{split}/{seed}")
        return draw_distinct(
            split, n, lambda: rng.randrange(SEEDS), "seeds", split_of=lambda value: split_of(f"{self.name}/{value}")
        )

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Draw new seeds at every step. Copies of a question have the same seed of the environment."""
        check_counts(questions=questions, copies=copies)
        seed = self.options.seed
        return [
            EpisodeRequest(
                self.name,
                {"seed": value},
                group_id=f"{step}/{value}",
                seed=derive_seed(self.name, seed, step, value, copy),
            )
            for value in self.draw("train", questions, f"{seed}/step-{step}")
            for copy in range(copies)
        ]

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Return ``n`` held-out plays. Against an opponent each seed is played from every seat."""
        if not self.has_opponent:
            return self.match_requests(split, n)
        seats = self.game.actors
        made = []
        for value in self.draw(split, -(-n // len(seats)), 0):
            made += [self._held_out(split, {"seed": value, "model": seat}) for seat in seats]
        return made[:n]

    def match_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """Return ``n`` held-out plays with all seats open. They don't depend on the task's seed."""
        return [self._held_out(split, {"seed": value}) for value in self.draw(split, n, 0)]

    def _held_out(self, split: Split, artifact: dict[str, Any]) -> EpisodeRequest:
        value = artifact["seed"]
        seed = derive_seed(self.name, split, value)
        return EpisodeRequest(self.name, artifact, group_id=f"{split}/{value}", seed=seed, is_trainable=False)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Demonstrate the format by random legal moves on training seeds. They show no skill."""
        rng = Random(f"{self.name}-demonstrations/{seed}")
        prompts = {actor.id: actor.system_prompt for actor in self.actors}
        shown: list[Demonstration] = []
        for value in self.draw("train", n, f"demonstrations/{seed}"):
            with closing(RunningPlay.start(self.game, value)) as play:
                while not play.view.is_over and len(play.actions) < self.game.max_turns and len(shown) < n:
                    view, reply = play.view, self.game.random_reply(play.view, rng)
                    said: Messages = [{"role": "system", "content": prompts[view.actor]}]
                    said.append({"role": "user", "content": with_moves(view.text, view.legal)})
                    shown.append((view.actor, said, reply))
                    play.act(self.game.read(reply, view))
            if len(shown) >= n:
                break
        return shown

    def texts(self) -> list[str]:
        """Prompts and replies of random plays, from which a tiny model's tokenizer is built."""
        return texts_of(self.demonstrations(120, 0))

    def oracle(self) -> Player:
        raise ValueError(f"task {self.name!r} has no oracle: expected opponent = 'random'")

    def random_player(self, seed: int) -> Player:
        """A player that takes each move that its prompt lists with equal probability."""
        return self._random(Random(f"{self.name}-random/{seed}"))

    @property
    def players(self) -> dict[str, Callable[[Random], Player]]:
        """The scripted players of tournaments, each made with its generator."""
        return {"random": self._random}

    def _random(self, rng: Random) -> Player:
        return lambda actor_id, messages: rng.choice(self.game.moves_in(messages[-1]["content"]) or ["[]"])


def actor_ids(count: int, prefix: str = "player") -> tuple[str, ...]:
    """Return ``("player",)`` for one actor, else ``("player0", "player1", ...)``."""
    return (prefix,) if count == 1 else tuple(f"{prefix}{index}" for index in range(count))
