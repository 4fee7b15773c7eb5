"""One play of any foreign environment as an episode: the model plays all actors, or one against a random player."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from turnwise.arena import InvalidActionError, MultiTurnEpisode, Rubric, TreeSampler
from turnwise.arena.rewards.rubric import SHARE
from turnwise.arena.runtime.context import require_context
from turnwise.arena.runtime.user_code import hook
from turnwise.integrations.environments.base.forks import RunningPlay
from turnwise.integrations.environments.base.play import ForeignGame, PlayView
from turnwise.integrations.environments.base.texts import with_moves
from turnwise.types import PAID_OTHERS, EpisodeState, Messages

MODEL = "model"
"""Name in metrics of the actor that the model plays against a random player, for any seat."""


class ForeignEpisode(MultiTurnEpisode):
    """Actors act as the environment says, until it ends or is cut off, or a move is illegal.

    The artifact is ``{"seed": 7}``. With ``{"seed": 7, "model": "player1"}`` a random player has the other seats. Each
    prompt is the acting actor's own observation, so no actor sees another's observations or completions.

    Rewards are the sums that the environment pays each actor. An illegal move ends the play: its actor loses
    ``game.invalid_cost``, and in a competitive game the others share it. In a tree an action earns its actor's
    immediate reward, and then what later actions of others bring this actor until it acts again.

    Example: ``ForeignEpisode(OpenSpielGame(options))`` with ``EpisodeRequest("openspiel:kuhn_poker", {"seed": 7})``
    """

    def __init__(self, game: ForeignGame, *, sampler: TreeSampler | None = None) -> None:
        super().__init__(sampler=sampler, max_turns=game.max_turns)
        self.game = game
        self.actors = game.actors
        self.episode_type = game.name
        shares = [success, score, legal, cut_off]
        self.rubric = Rubric([payoff, *shares], [1.0, 0.0, 0.0, 0.0, 0.0], ranges=dict.fromkeys(shares, SHARE))

    def unserved_rewards(self) -> dict[str, str]:
        reason = "pays an illegal move by the environment's rule: expected task_options.invalid_cost"
        return super().unserved_rewards() | {"invalid_cost": reason}

    async def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        if not isinstance(artifact, Mapping) or not isinstance(artifact.get("seed"), int):
            raise TypeError(f"artifact={artifact!r}: expected a dict with a whole number 'seed'")
        if "model" in artifact and artifact["model"] not in self.actors:
            raise ValueError(f"artifact['model']={artifact['model']!r}: expected one of {self.actors}")
        start = partial(RunningPlay.start, self.game, artifact["seed"])
        play = await hook(start, blocking=self.game.is_blocking, late=RunningPlay.close)
        model = [artifact["model"]] if "model" in artifact else list(self.actors)
        state.data = {"play": play, "model": model, "illegal": "", "earned": 0.0, "moves": {}, "memory": {}}
        await self._let_others_act(state)
        state.done = play.view.is_over
        state.current_actor = play.view.actor or model[0]

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        shown = self._shown(state)
        require_context().private.add(shown, [state.current_actor], observation=True)
        return [*self._remembered(state), {"role": "user", "content": shown}]

    async def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        data, actor, text = state.data, state.current_actor, state.last_completion_text
        before = dict(data["play"].view.rewards)
        if self.game.options.memory:
            data["memory"].setdefault(actor, []).append([self._shown(state), text])
        is_legal = await self._act(state, text)
        data["moves"].setdefault(actor, []).append(is_legal)
        await self._let_others_act(state)
        earned = {each: total - before[each] for each, total in self.rewards(state).items()}
        data["earned"] = earned.pop(actor)
        if self._is_tree(arena):
            state.trajectory[-1].info[PAID_OTHERS] = {each: reward for each, reward in earned.items() if reward}

    def step_reward(self, state: EpisodeState, arena: Any, artifact: Any) -> float | None:
        return state.data["earned"] if self._is_tree(arena) else None

    def _is_tree(self, arena: Any) -> bool:
        return self.sampler is not None and not arena.is_evaluation

    def is_done(self, state: EpisodeState, arena: Any, artifact: Any) -> bool:
        return bool(state.data["illegal"]) or state.data["play"].view.is_over

    def next_actor(self, state: EpisodeState, arena: Any, artifact: Any) -> str:
        return state.data["play"].view.actor

    async def close(self, state: EpisodeState) -> None:
        if (play := state.data.get("play")) is not None:
            await self._run(play.close)

    def rewards(self, state: EpisodeState) -> dict[str, float]:
        """Return the sum of each actor's rewards so far, with what an illegal move cost and earned."""
        paid = dict(state.data["play"].view.rewards)
        if loser := state.data["illegal"]:
            cost = self.game.invalid_cost
            for actor in paid:
                if self.game.is_competitive:
                    paid[actor] += -cost if actor == loser else cost / (len(paid) - 1)
                else:
                    paid[actor] -= cost
        return paid

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``rewards`` and ``scores`` by the model's actors, ``moves``, and how the play ended."""
        data, rewards = state.data, self.rewards(state)
        view: PlayView = data["play"].view
        scores = {actor: _score(actor, rewards, self.game) for actor in data["model"]}
        if len(data["model"]) < len(self.actors):
            scores[MODEL] = scores[data["model"][0]]
        limit = self.game.options.success
        return {
            "rewards": {actor: rewards[actor] for actor in data["model"]},
            "successes": {
                actor: float(rewards[actor] > 0 if limit is None else rewards[actor] >= limit)
                for actor in data["model"]
            },
            "scores": scores,
            "moves": {actor: list(moves) for actor, moves in data["moves"].items()},
            "illegal": data["illegal"],
            "terminated": view.terminated,
            "truncated": view.truncated or not (view.is_over or data["illegal"]),
        }

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the environment, in a thread unless it computes at once."""
        return await hook(function, *arguments, blocking=self.game.is_blocking)

    async def _act(self, state: EpisodeState, text: str) -> bool:
        """Let the acting actor answer with ``text``. Return False for an illegal move.

        It ends the play, unless the environment has a rule of its own for it.
        """
        play: RunningPlay = state.data["play"]
        actor = play.view.actor
        try:
            await self._run(play.act, self.game.read(text, play.view))
        except InvalidActionError as error:
            state.data["illegal"] = actor
            if actor == state.current_actor and state.trajectory:
                state.trajectory[-1].facts.illegal_move = str(error)
            return False
        return play.was_legal

    async def _let_others_act(self, state: EpisodeState) -> None:
        data = state.data
        while not (data["illegal"] or (view := data["play"].view).is_over or view.actor in data["model"]):
            await self._act(state, self.game.random_reply(view, self.rng))

    def _shown(self, state: EpisodeState) -> str:
        view: PlayView = state.data["play"].view
        return with_moves(view.text, view.legal)

    def _remembered(self, state: EpisodeState) -> Messages:
        kept: Messages = []
        if count := self.game.options.memory:
            for shown, reply in state.data["memory"].get(state.current_actor, [])[-count:]:
                kept += [{"role": "user", "content": shown}, {"role": "assistant", "content": reply}]
        return kept


def _score(actor: str, rewards: Mapping[str, float], game: ForeignGame) -> float:
    """Return the share of the other actors that ``actor`` beat, a draw counts half; 1 or 0 without others."""
    others = [rewards[other] for other in rewards if other != actor]
    if not (game.is_competitive and others):
        return float(rewards[actor] > 0)
    beaten = sum(1.0 if rewards[actor] > theirs else 0.5 if rewards[actor] == theirs else 0.0 for theirs in others)
    return beaten / len(others)


def payoff(extras: dict[str, Any]) -> dict[str, float]:
    """Sum of each actor's rewards."""
    return extras["rewards"]


def success(extras: dict[str, Any]) -> dict[str, float]:
    """1 for each actor whose reward reached ``task_options.success``."""
    return extras["successes"]


def score(extras: dict[str, Any]) -> dict[str, float]:
    """Share of the other actors that each actor beat, and ``model`` if it played against a random player."""
    return extras["scores"]


def legal(extras: dict[str, Any]) -> dict[str, float]:
    """Share of each actor's completions that were legal moves."""
    return {actor: sum(moves) / len(moves) for actor, moves in extras["moves"].items()}


def cut_off(extras: dict[str, Any]) -> dict[str, float]:
    """1 for each actor of a play that was cut off, by the environment or by ``max_turns``."""
    return {actor: float(extras["truncated"]) for actor in extras["rewards"]}
