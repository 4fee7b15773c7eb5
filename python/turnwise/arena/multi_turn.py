"""Chats over several turns: actors take turns on one state, an environment answers, and some text stays private."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from turnwise.arena.beams import TreePlay
from turnwise.arena.context import resolve
from turnwise.arena.episode import Episode, make_forkable, running
from turnwise.arena.invalid_action import INVALID, InvalidActionError, fail_step, failed_step
from turnwise.arena.privacy import MIN_HIDDEN_WORDS, hidden_parts
from turnwise.arena.reward_values import is_by_token, set_reward
from turnwise.types import EpisodeState, Messages, Step

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena
    from turnwise.arena.tree import TreeSampler


class MultiTurnEpisode(Episode, ABC):
    """Actors act one after another; each action is answered by the environment before the next actor sees the state.

    A turn is a round: a new one begins when the next actor has already acted in the present one. The episode ends when
    ``is_done`` says so, or after ``max_turns`` rounds. With a ``sampler``, training branches at each action.

    Example: two players name numbers, and whoever says 7 ends the game::

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
    """

    actors: Sequence[str] = ()
    max_turns: int = 8
    sampler: TreeSampler | None = None

    def __init__(self, *, sampler: TreeSampler | None = None, max_turns: int | None = None) -> None:
        if sampler is not None:
            self.sampler = sampler
        if max_turns is not None:
            if max_turns < 1:
                raise ValueError(f"max_turns={max_turns!r}: expected at least 1")
            self.max_turns = max_turns

    # -- hooks: override what the game needs; each may be sync or async ------------------------------------------------
    def setup(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """Fill ``state.data`` before anybody acts."""

    def get_initial_actor(self) -> Any:
        """Who acts first: the first of ``actors``."""
        if not self.actors:
            raise ValueError(f"{type(self).__name__}.actors is empty: expected the ids of the actors, in acting order")
        return self.actors[0]

    def get_prompt(self, artifact: Any) -> Any:
        """The opening text. It stands at the start of every actor's prompt, whoever acts first.

        None is needed where ``get_observation`` says all.
        """
        if type(self).get_observation is not MultiTurnEpisode.get_observation:
            return ""
        raise NotImplementedError(f"{type(self).__name__}: override get_prompt(artifact) or build_messages(...)")

    def get_observation(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """What only the acting actor sees, now. It never enters the transcript, and counts as private to that actor."""
        return None

    def env_response(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """Apply ``state.last_completion_text`` of ``state.current_actor`` to ``state.data``.

        What it returns enters the transcript, for everybody. Runs after every action, the last one included.
        """
        return None

    def step_reward(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """Reward of the action just taken, after ``env_response``; ``None`` leaves it to the rubric.

        A number, or one for each token of the completion, as a list, an array or a tensor. These are kept in
        ``step.info["token_rewards"]``, and their sum is the reward. A token counts where it trains: a ``"loss_mask"``
        belongs into ``step.info`` before.
        """
        return None

    def is_done(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """Whether the game is over, asked after each action. ``max_turns`` holds besides."""
        return state.done

    def next_actor(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """Who acts after ``state.current_actor``: the next of ``actors`` (else of the arena's), in a circle."""
        order = list(self.actors or arena.actors)
        if state.current_actor not in order:
            raise ValueError(f"actors={order!r} lacks {state.current_actor!r}: override next_actor, or add it")
        return order[(order.index(state.current_actor) + 1) % len(order)]

    def public(self, text: str) -> str:
        """What the others see of a completion; strip private reasoning here."""
        return text

    def public_to(self, text: str, actor: str, to: str) -> Any:
        """What ``to`` sees of ``actor``'s completion: ``public(text)`` for all; ``None`` leaves it out of the chat."""
        return self.public(text)

    def build_messages(self, state: EpisodeState, arena: Arena, artifact: Any) -> Any:
        """The chat for ``state.current_actor``, or ``None`` if it skips this turn.

        By default: the opening prompt, then what was said: own completions as the assistant's, those of others (their
        ``public`` part) and of the environment as the user's; at the end the private observation.
        """
        return self.transcript(state, arena, artifact)

    # -- how it runs ---------------------------------------------------------------------------------------------------
    async def transcript(self, state: EpisodeState, arena: Arena, artifact: Any) -> Messages:
        """The default chat of ``state.current_actor``, see :meth:`build_messages`."""
        opening = await resolve(self.get_prompt(artifact))
        messages: Messages = []
        if isinstance(opening, str):
            _say(messages, "user", opening)
        else:
            messages.extend(dict(message) for message in opening)
        for step in state.trajectory:
            if "env_response" not in step.info:
                continue
            if step.actor_id == state.current_actor:
                messages.append({"role": "assistant", "content": step.completion})
            else:
                shown = await resolve(self.public_to(step.completion, str(step.actor_id), state.current_actor))
                _say(messages, "user", None if shown is None else f"{step.actor_id}: {shown}")
            _say(messages, "user", step.info["env_response"])
        observation = await resolve(self.get_observation(state, arena, artifact))
        if observation and observation.strip():
            running().private.add(observation, [state.current_actor], observation=True)
        _say(messages, "user", observation)
        return messages

    async def rollout(self, arena: Arena, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        state = EpisodeState() if state is None else state
        context = running()
        context.state = state
        progress = None if arena.is_evaluation else arena.progress
        left = progress.load(context) if progress is not None else None
        if left is None:
            await resolve(self.setup(state, arena, artifact))
        else:
            state = left
        make_forkable(state)
        state.current_actor = state.current_actor or await resolve(self.get_initial_actor())
        if self.sampler is not None and not arena.is_evaluation:
            del state, left  # of what the tree leaves behind nothing is to be held
            return await TreePlay(self, arena, artifact, context).play(progress)
        while not state.done:
            messages = await resolve(self.build_messages(state, arena, artifact))
            if messages is not None:
                await self.take_action(state, messages, arena, artifact)
            ended = await self.pass_on(state, arena, artifact, skipped=messages is None)
            if ended:
                context.rollout.meta["ended"] = ended
            if progress is not None:
                progress.save(context, state)
        return state

    async def take_action(self, state: EpisodeState, messages: str | Messages, arena: Arena, artifact: Any) -> Step:
        """One model call, the environment's answer, and the reward of this action, all on ``state``."""
        await self.call_model(state.current_actor, messages, arena)
        step = state.trajectory[-1]
        if arena.check_private:
            await self._mark_hidden(step)
        # The key marks an action of this loop, so that a tool call made inside a hook is no part of the transcript.
        try:
            step.info["env_response"] = await resolve(self.env_response(state, arena, artifact)) or ""
            state.last_completion_text = step.completion
            reward = await resolve(self.step_reward(state, arena, artifact))
        except InvalidActionError as error:
            step.info["env_response"] = ""
            fail_step(step, error, self.invalid_reward)
            state.done = True
            return step
        if reward is not None:
            set_reward(step, reward, f"{type(self).__name__}.step_reward for actor {state.current_actor!r}")
        elif is_by_token(step.reward):  # set by a hook; branches are compared before the rubric looks at it
            set_reward(step, step.reward, f"{type(self).__name__}: reward of a step of actor {state.current_actor!r}")
        return step

    async def _mark_hidden(self, step: Step) -> None:
        """What ``public_to`` hides of a completion is private to those who see it; what it shows is so no more."""
        actor = str(step.actor_id)
        heard = {
            to: await resolve(self.public_to(step.completion, actor, to)) or "" for to in self.actors if to != actor
        }
        texts = running().private
        for shown in heard.values():
            for part in hidden_parts(step.completion, shown):
                if len(part.split()) < MIN_HIDDEN_WORDS and texts.is_open(part, step.prompt):
                    continue
                texts.add(part, [actor, *(to for to, words in heard.items() if part in " ".join(words.split()))])
        texts.spoken(actor, heard)

    async def pass_on(self, state: EpisodeState, arena: Arena, artifact: Any, *, skipped: bool) -> str:
        """Whose turn is next after ``state.current_actor``'s; how the episode ended, if it did: ``"done"``,
        ``"invalid_action"``, or ``"max_turns"``, which is not the same as over: rewards may want to tell them apart."""
        state.acted = (*state.acted, state.current_actor)
        # Nothing has changed after a skip, and before the first action there may be nothing for is_done to look at.
        if not skipped:
            state.done = bool(state.done or await resolve(self.is_done(state, arena, artifact)))
        if state.done:
            return "done" if failed_step(state) is None else INVALID
        following = await resolve(self.next_actor(state, arena, artifact))
        if following in state.acted:
            state.turn, state.acted = state.turn + 1, ()
        if state.turn >= self.max_turns:
            state.done = True
            return "max_turns"
        state.current_actor = following
        return ""


def _say(messages: Messages, role: str, text: str | None) -> None:
    """Append text, joining it to the last message if that has the same role."""
    if not text:
        return
    if messages and messages[-1]["role"] == role and isinstance(messages[-1]["content"], str):
        messages[-1] = {"role": role, "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})
