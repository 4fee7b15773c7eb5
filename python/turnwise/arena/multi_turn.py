"""Multi-turn chats: actors take turns on one state, an environment answers, and some text stays private."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from numbers import Real
from typing import Any

from turnwise.arena.answers import contribution_of, plain_answer
from turnwise.arena.episode import Episode
from turnwise.arena.rewards.invalid_action import (
    CONTEXT,
    INVALID,
    InvalidActionError,
    fail_step,
    failed_step,
    outgrown_step,
)
from turnwise.arena.rewards.mix import RewardMix, as_parts
from turnwise.arena.rewards.token_rewards import is_by_token, set_reward
from turnwise.arena.runtime.context import make_forkable, require_context
from turnwise.arena.runtime.private_text import MIN_HIDDEN_WORDS, hidden_parts
from turnwise.arena.runtime.prompts import Shown, chat_of, text_of_hook
from turnwise.arena.runtime.tool_rounds import ROUND, share_reward
from turnwise.arena.runtime.user_code import hook
from turnwise.arena.transcripts import Transcript, say
from turnwise.arena.trees.sampler import TreeSampler
from turnwise.arena.trees.search import TreeSearch
from turnwise.types import ContextLengthError, EpisodeState, Messages, Step
from turnwise.types.protocols import ArenaForHooks


class MultiTurnEpisode(Episode, ABC):
    """Actors act in turn. The environment answers each action before the next actor sees the state.

    Example: two players name numbers; the one who says 7 ends the game::

        class Sevens(MultiTurnEpisode):
            episode_type = "sevens"
            actors = ("left", "right")
            max_turns = 3
            rubric = Rubric([won])

            def get_prompt(self, artifact):
                return "Say a number from 1 to 9."

            def env_response(self, state, arena, artifact):
                state.data["last"] = state.last_completion_text
                return f"{state.current_actor} said {state.last_completion_text}."

            def is_done(self, state, arena, artifact):
                return state.data["last"] == "7"

            def step_reward(self, state, arena, artifact):
                return float(state.data["last"] == "7")

        arena.add_episode(Sevens(sampler=TreeSampler(branches=8)))

    A turn is a round: a new round begins when the next actor has already acted in this one. The episode ends when
    ``is_done`` returns true, or after ``max_turns`` rounds. With a ``sampler``, training branches at each action.
    """

    actors: Sequence[str] = ()
    max_turns: int = 8
    sampler: TreeSampler | None = None

    def __init__(self, *, sampler: TreeSampler | None = None, max_turns: int | None = None) -> None:
        if sampler is not None:
            self.sampler = sampler
        if max_turns is not None:
            self.max_turns = max_turns
            self._check_limits()

    # -- hooks: override what the game needs; each may be sync or async ------------------------------------------------
    def setup(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Fill ``state.data`` before the first action."""

    def get_initial_actor(self) -> Any:
        """Return the actor that acts first: the first of ``actors``."""
        if not self.actors:
            raise ValueError(f"{type(self).__name__}.actors is empty: expected the ids of the actors, in acting order")
        return self.actors[0]

    def get_prompt(self, artifact: Any) -> Any:
        """Return the opening text, a string or messages, with which every actor's prompt begins.

        Optional if ``get_observation`` is overridden.
        """
        if type(self).get_observation is not MultiTurnEpisode.get_observation:
            return ""
        raise NotImplementedError(f"{type(self).__name__}: override get_prompt(artifact) or build_messages(...)")

    def get_observation(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return text for this call of the acting actor only. It is private and never enters the transcript."""
        return None

    def env_response(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Apply ``state.last_completion_text`` of ``state.current_actor`` to ``state.data``.

        The text that it returns enters the transcript for all actors. It runs after every action, also the last one.
        """
        return None

    def step_reward(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return the reward of the last action, after ``env_response``. ``None`` leaves it to the rubric.

        Return a number, or a list, array or tensor with one number per token of the completion. Token rewards are kept
        in ``step.info["token_rewards"]``; their sum over the tokens that train is the reward. To mask tokens, put a
        ``"loss_mask"`` into ``step.info`` first.
        """
        return None

    def reward_parts(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return the parts of the last action's reward, which the arena mixes; see :class:`~turnwise.arena.RewardMix`.

        Return ``RewardParts(team, own, valid)`` or a tuple ``(team, own)``: the outcome that all actors share, the
        actor's own part, and 0 for a completion that could not be read. It is separate from ``step_reward``
        because a run checks at its start that an episode serves ``reward.alpha`` and ``reward.mode``. The arena calls
        ``step_reward`` only if this hook returns ``None``.
        """
        return None

    def team_value(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return the value of the team's present answer, for ``reward.difference``. Called before and after an action.

        For example, the share of a puzzle that is right, or 1 for a right answer and 0 for a wrong or missing one.
        """
        raise NotImplementedError(f"{type(self).__name__}: override team_value(state, arena, artifact)")

    def is_done(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return true when the game is over. Called after each action. ``max_turns`` applies as well."""
        return state.done

    def team_answer(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return ``(answer, right)``: the team's current answer, which ``state.current_actor`` gets and passes on.

        ``right`` is true or false, or a list with one of them for each part of the answer. ``None`` means that there is
        no answer yet, or that this actor passes none on. Called before and after each action of an evaluation, which
        counts how often each actor changed, fixed and broke the answer that it got
        (:class:`~turnwise.arena.answers.Contribution`).
        """
        return None

    def next_actor(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return the actor that acts next. By default ``actors``, or the arena's actors, take turns in a circle."""
        order = list(self.actors or arena.actors)
        if state.current_actor not in order:
            raise ValueError(f"actors={order!r} lacks {state.current_actor!r}: override next_actor, or add it")
        return order[(order.index(state.current_actor) + 1) % len(order)]

    def public(self, text: str) -> str:
        """Return the part of a completion that the other actors see; strip private reasoning here."""
        return text

    def public_to(self, text: str, actor: str, to: str) -> Any:
        """Return the part of ``actor``'s completion that ``to`` sees, by default ``public(text)``.

        ``None`` leaves the completion out of the chat.
        """
        return self.public(text)

    def attributed(self, text: str, actor: str) -> str:
        """Return how others read ``text``, the public part of a completion: by default ``"<actor>: <text>"``."""
        return f"{actor}: {text}"

    def build_messages(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Any:
        """Return the chat for ``state.current_actor``, or ``None`` if it skips this turn.

        By default the chat is the opening prompt, the transcript and the private observation. The actor's own
        completions have the role assistant. The ``public`` part of others' completions and the environment's answers
        have the role user.
        """
        return self.transcript(state, arena, artifact)

    def unserved_rewards(self) -> dict[str, str]:
        reasons, own = super().unserved_rewards(), type(self)
        served = {"turn_shaping", "gamma"}
        if own.reward_parts is not MultiTurnEpisode.reward_parts:
            served |= {"alpha", "mode"}
        if own.team_value is not MultiTurnEpisode.team_value:
            served.add("difference")
        return {key: reason for key, reason in reasons.items() if key not in served}

    def _check_limits(self) -> None:
        turns: Any = self.max_turns
        if not (isinstance(turns, Real) and float(turns) >= 1):
            raise ValueError(f"{type(self).__name__}.max_turns={turns!r}: expected a number of turns, at least 1")

    async def opening(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Messages:
        """Return the messages with which every chat of ``state.current_actor`` begins: those of :meth:`get_prompt`."""
        opening = await hook(self.get_prompt, artifact)
        opening = "" if opening == [] else chat_of(opening, f"{type(self).__name__}.get_prompt")
        if isinstance(opening, str):
            return [{"role": "user", "content": opening}] if opening else []
        return opening

    # -- how it runs ---------------------------------------------------------------------------------------------------
    async def transcript(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any) -> Messages:
        """Build the default chat of ``state.current_actor``, see :meth:`build_messages`."""
        own = type(self).__name__
        opening = await self.opening(state, arena, artifact)
        # Go on from the actor's last turn, unless the episode opens otherwise now.
        heard = state.transcripts.get(state.current_actor)
        if heard is None or not heard.covers(opening, state.trajectory):
            heard = Transcript.begun(opening)
        heard = await heard.after(state.trajectory, state.current_actor, partial(_heard_by, self))
        state.transcripts[state.current_actor] = heard
        is_ours = type(self).build_messages is MultiTurnEpisode.build_messages
        messages: Messages = Shown(heard.messages.whole())
        if not is_ours:
            messages = [message.copy() for message in messages]
        where = f"{own}.get_observation for actor {state.current_actor!r}"
        observation = text_of_hook(await hook(self.get_observation, state, arena, artifact), where)
        if observation.strip():
            require_context().private.add(observation, [state.current_actor], observation=True)
        say(messages, "user", observation)
        return messages

    async def rollout(self, arena: ArenaForHooks, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = EpisodeState() if state is None else state
        context = require_context()
        context.state = state
        # Continue from a checkpoint if there is one, else set up a new game.
        checkpoints = None if arena.is_evaluation else arena.episode_checkpoints
        left = checkpoints.load(context) if checkpoints is not None else None
        if left is None:
            state.artifact = artifact
            await hook(self.setup, state, arena, artifact)
        else:
            state = left
        make_forkable(state)
        if not state.current_actor:
            where = f"{type(self).__name__}.get_initial_actor"
            state.current_actor = _actor_id(await hook(self.get_initial_actor), where)
        if self.sampler is not None and not arena.is_evaluation:
            del state, left  # the tree search frees data of losing branches, so hold no reference to it here
            search = TreeSearch(self, self.sampler, arena, context)
            try:
                while search.is_running:
                    await search.expand_once()
                    if checkpoints is not None:
                        checkpoints.save(context, context.state)
                return search.finish()
            except BaseException as error:
                search.abandon()
                if isinstance(error, ContextLengthError):
                    error.actor_id = None  # the tree has let go of the state in which the episode could end
                raise

        # Without a tree: one action after another, saved after each.
        while not state.done:
            messages = await hook(self.build_messages, state, arena, state.artifact)
            if messages is not None:
                await self.take_action(state, messages, arena, state.artifact)
            ended = await self.pass_on(state, arena, state.artifact, skipped=messages is None)
            if ended:
                context.rollout.meta["ended"] = ended
            if checkpoints is not None:
                checkpoints.save(context, state)
        return state

    async def take_action(
        self, state: EpisodeState, messages: str | Messages, arena: ArenaForHooks, artifact: Any
    ) -> Step:
        """Make one model call, get the environment's answer and the action's reward. Changes ``state``."""
        messages = chat_of(messages, f"{type(self).__name__}.build_messages for actor {state.current_actor!r}")
        mix: RewardMix = arena.mix_of(require_context().rollout.episode_type)
        before = await hook(self.team_value, state, arena, artifact) if mix.difference else 0.0
        handed = await self._present_answer(state, arena, artifact) if arena.is_evaluation else None
        begun = len(state.trajectory)
        try:
            await self.call_model(state.current_actor, messages, arena)
            step = state.trajectory[-1]
        except ContextLengthError as error:
            # If it is the results of tools that don't fit, the answer that asked for them is the turn's last: its calls
            # stay text, as after the last round.
            asked = [each for each in state.trajectory[begun:] if ROUND in each.info]
            if not asked or not self.ends_at_context(state, error):
                raise
            step = asked[-1]
            step.facts.context = str(error)
        rounds = [each for each in state.trajectory[begun:] if ROUND in each.info and each is not step]
        if arena.check_private:
            await self._mark_hidden(step)
        # ``env_response`` marks an action of this loop. Tool calls made inside a hook lack it, so the transcript
        # leaves them out.
        try:
            where = f"{type(self).__name__}.env_response for actor {state.current_actor!r}"
            step.facts.env_response = text_of_hook(await hook(self.env_response, state, arena, artifact), where)
            state.last_completion_text = step.completion
            where = f"{type(self).__name__}.reward_parts for actor {state.current_actor!r}"
            earned: Any = as_parts(await hook(self.reward_parts, state, arena, artifact), where)
            if earned is None:
                where = f"{type(self).__name__}.step_reward for actor {state.current_actor!r}"
                earned = await hook(self.step_reward, state, arena, artifact)
            after = await hook(self.team_value, state, arena, artifact) if mix.difference else 0.0
        except InvalidActionError as error:
            step.facts.env_response = ""
            fail_step(step, error, self.invalid_reward - mix.invalid_cost)
            state.done = True
            if handed is not None:
                step.info["handed"] = asdict(contribution_of(handed, None))
            share_reward(step, rounds)
            return step
        if handed is not None:
            left = await self._present_answer(state, arena, artifact)
            step.info["handed"] = asdict(contribution_of(handed, left, f"{type(self).__name__}.team_answer"))
        mix.pay(step, earned, after - before, where)
        if earned is None and is_by_token(step.reward):  # a hook set it; selection comes before the rubric's sums
            set_reward(step, step.reward, f"{type(self).__name__}: reward of a step of actor {state.current_actor!r}")
        share_reward(step, rounds)
        return step

    async def _present_answer(
        self, state: EpisodeState, arena: ArenaForHooks, artifact: Any
    ) -> tuple[Any, tuple[bool, ...]] | None:
        """Return a copy of the present answer and its right parts; ``None`` if there is none."""
        answer = await hook(self.team_answer, state, arena, artifact)
        return plain_answer(answer, f"{type(self).__name__}.team_answer")

    async def _mark_hidden(self, step: Step) -> None:
        """Mark the hidden parts of a completion as private, and let each actor read the parts that it was shown."""
        actor = str(step.actor_id)
        heard = {to: await _shown_to(self, step, to) or "" for to in self.actors if to != actor}
        texts = require_context().private
        for shown in heard.values():
            for part in hidden_parts(step.completion, shown):
                if len(part.split()) < MIN_HIDDEN_WORDS and texts.is_open(part, step.prompt):
                    continue
                texts.add(part, [actor, *(to for to, words in heard.items() if part in " ".join(words.split()))])
        texts.mark_heard(actor, heard)

    async def pass_on(self, state: EpisodeState, arena: ArenaForHooks, artifact: Any, *, skipped: bool) -> str:
        """Set the actor after ``state.current_actor``. Return how the episode ended, or ``""`` if it goes on.

        The ends are ``"done"``, ``"invalid_action"``, ``"context"`` and ``"max_turns"``, so that rewards can tell them
        apart.
        """
        state.acted = (*state.acted, state.current_actor)
        outgrown = outgrown_step(state) is not None
        state.done = state.done or outgrown
        # A skip changes nothing, and before the first action ``is_done`` may have no data to read.
        if not skipped:
            state.done = bool(state.done or await hook(self.is_done, state, arena, artifact))
        if state.done:
            return INVALID if failed_step(state) is not None else CONTEXT if outgrown else "done"
        following = _actor_id(await hook(self.next_actor, state, arena, artifact), f"{type(self).__name__}.next_actor")
        if following in state.acted:
            state.turn, state.acted = state.turn + 1, ()
        if state.turn >= self.max_turns:
            state.done = True
            return "max_turns"
        state.current_actor = following
        return ""


async def _shown_to(episode: MultiTurnEpisode, step: Step, to: str) -> str | None:
    """Return the part of a completion that the actor ``to`` sees, or ``None``."""
    shown = await hook(episode.public_to, step.completion, str(step.actor_id), to)
    where = f"{type(episode).__name__}.public_to, or public, for actor {to!r}"
    return None if shown is None else text_of_hook(shown, where)


async def _heard_by(episode: MultiTurnEpisode, step: Step, to: str) -> str | None:
    """Return the part of a completion that ``to`` sees, as it reads it, or ``None``."""
    shown = await _shown_to(episode, step, to)
    return None if shown is None else episode.attributed(shown, str(step.actor_id))


def _actor_id(actor: Any, where: str) -> str:
    """Return the actor that the hook ``where`` gave. Raises ``TypeError`` for what is no id: ``None`` is a judge."""
    if not isinstance(actor, str):
        raise TypeError(f"{where}: got {actor!r}, expected the id of an actor")
    return actor
