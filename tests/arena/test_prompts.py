"""A chat costs what is new: its prompt shares the tokens of an earlier call, and equals a rendering of the whole."""

from __future__ import annotations

import asyncio
import pickle
import random
from functools import cache

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.arena.runtime.private_text import PrivateTexts, text_of
from turnwise.arena.runtime.prompts import ANCHORED, SAMPLED, SHORT, WHOLE
from turnwise.credit import GRPOCredit
from turnwise.inference.scripted import ByteTokenizer, Reply, ScriptedClient
from turnwise.tasks.tiny import build_tokenizer
from turnwise.types import Actor, EpisodeRequest
from turnwise.types.prompts import Prefix, kept

WORDS = ["where", "is", "the", "ball", "now", "and", "who", "moved", "it", "there", "then", "under", "the", "table"]
TURN = "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
TEMPLATES = {
    "plain": "{% for m in messages %}" + TURN + "{% endfor %}" + ASKS,
    "trims": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|end|>\n' }}{% endfor %}"
    + ASKS,
    # What Qwen3 does without thinking: a mark in the generation prompt that no earlier turn has.
    "marks": "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n\n</think>\n\n' }}{% endif %}",
    "first": "{{ '<|system|>Be brief.<|end|>' }}{% for m in messages %}" + TURN + "{% endfor %}" + ASKS,
    "text": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    # A template that shows how long the chat is: nothing of it can be reused.
    "counts": "{{ messages | length }}{% for m in messages %}" + TURN + "{% endfor %}" + ASKS,
}
EXTENDS = {"plain", "trims", "first"}


@cache
def tokenizer_of(template):
    tokenizer = build_tokenizer([" ".join(WORDS), "Question think"])
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


class Chat(MultiTurnEpisode):
    episode_type = "chat"
    actors = ("player",)
    rubric = Rubric([lambda completion: 1.0])
    observes = False

    def get_prompt(self, artifact):
        return "Question"

    def env_response(self, state, arena, artifact):
        return " ".join(random.Random(len(state.trajectory)).choices(WORDS, k=5))

    def get_observation(self, state, arena, artifact):
        return f"the private number {len(state.trajectory)} is yours" if self.observes else None


class Two(Chat):
    actors = ("player", "other")


def play(tokenizer, episode, replies, *, system=""):
    said = iter(replies)
    arena = Arena(ScriptedClient(lambda request: next(said), tokenizer=tokenizer), tokenizer, credit=GRPOCredit())
    for name in ("player", "other"):
        arena.add_actor(Actor(name, system_prompt=system, max_tokens=64))
    arena.add_episode(episode)

    async def run():
        return await arena.generate_rollouts([EpisodeRequest("chat", 0)])

    [result] = asyncio.run(run())
    assert result.rollout.error is None, result.rollout.error
    return arena, result.rollout


def origins(rollout):
    return [kept(step, "prompt_token_ids").origin for step in rollout.steps]


def answers(seed, count, *, thoughts=False):
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(count)]
    return [f"<think>{text}</think>{text[::-1]}" if thoughts and draw.random() < 0.6 else text for text in texts]


@pytest.mark.parametrize("kind", [Chat, Two])
@pytest.mark.parametrize("observes", [False, True], ids=["", "observes"])
@pytest.mark.parametrize("thoughts", [False, True], ids=["", "thinks"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_what_the_template_renders(template, thoughts, observes, kind):
    seed = random.SystemRandom().randrange(10**6)
    episode = kind(max_turns=2 * SHORT)
    episode.observes = observes
    tokenizer = tokenizer_of(template)
    arena, rollout = play(tokenizer, episode, answers(seed, 99, thoughts=thoughts), system="Play.")
    format = arena.plain_format(None)
    for step in rollout.steps:
        assert format.prompt_ids(step.prompt) == step.prompt_token_ids, f"seed {seed}"
    seen = set(origins(rollout))
    if template in EXTENDS and not thoughts and not observes:
        assert set(origins(rollout)[len(episode.actors) :]) == {SAMPLED}
    else:
        assert ANCHORED in seen, seen
    rendered = sum(count for name, count in (rollout.facts.mishaps or {}).items() if "rendered_again" in name)
    expected = template not in EXTENDS or thoughts or observes
    assert bool(rendered) == expected, "what is not behind the sampled tokens is counted"


def test_a_later_prompt_holds_the_sampled_tokens():
    """``b a l l`` and ``ball`` are one text: the template would show the second, and the model wrote the first."""
    tokenizer = tokenizer_of("plain")
    spelt = [token for letter in "ball" for token in tokenizer.encode(letter)]
    assert spelt != tokenizer.encode("ball")
    reply = Reply(token_ids=[*spelt, tokenizer.eos_token_id])
    arena, rollout = play(tokenizer, Chat(max_turns=3), [reply] * 3)
    first, second, third = rollout.steps
    assert first.completion == "ball"
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + 5] == [*first.prompt_token_ids, *spelt, 1]
    assert third.prompt_token_ids[: len(second.prompt_token_ids) + 5] == [*second.prompt_token_ids, *spelt, 1]
    assert third.prompt_token_ids != arena.plain_format(None).prompt_ids(third.prompt)


def test_a_cut_answer_is_closed_in_the_next_prompt():
    tokenizer = tokenizer_of("plain")
    reply = Reply(token_ids=tokenizer.encode("ball"), finish_reason="length")
    arena, rollout = play(tokenizer, Chat(max_turns=2), [reply, reply])
    assert rollout.steps[1].prompt_token_ids == arena.plain_format(None).prompt_ids(rollout.steps[1].prompt)


class Rewrites(Chat):
    """Changes what it said before, as an episode may that summarises."""

    def build_messages(self, state, arena, artifact):
        said = [{"role": "assistant", "content": step.completion} for step in state.trajectory]
        chat = [{"role": "user", "content": "Question"}]
        for number, message in enumerate(said):
            chat += [message, {"role": "user", "content": f"turn {number}"}]
        if len(state.trajectory) == 5:
            chat[0] = {"role": "user", "content": "Another question"}
        chat[-1]["content"] += " now"
        return chat


def test_a_changed_history_is_rendered_again():
    arena, rollout = play(tokenizer_of("plain"), Rewrites(max_turns=8), answers(3, 8))
    format = arena.plain_format(None)
    for number, step in enumerate(rollout.steps):
        assert step.prompt_token_ids == format.prompt_ids(step.prompt), number
        expected = {0: "Question now", 5: "Another question"}.get(number, "Question")
        assert step.prompt[0]["content"] == expected
    assert rollout.facts.mishaps["prompts/rendered_again/history"] >= 6, "each prompt ends with 'now' but once"


class Appends(Chat):
    """An episode of its own loop, with one list that it appends to."""

    async def rollout(self, arena, artifact, state=None):
        chat = [{"role": "user", "content": "Question"}]
        for number in range(6):
            response = await self.call_model("player", chat, arena)
            chat.append({"role": "assistant", "content": response.text})
            chat.append({"role": "user", "content": f"turn {number}"})
            chat[0]["content"] += "?" * (number == 3)
        return state


def test_a_list_that_grows_extends_and_one_that_was_changed_in_place_does_not():
    arena, rollout = play(tokenizer_of("plain"), Appends(), answers(4, 6))
    format = arena.plain_format(None)
    assert origins(rollout) == [WHOLE, SAMPLED, SAMPLED, SAMPLED, WHOLE, SAMPLED]
    assert all(step.prompt_token_ids == format.prompt_ids(step.prompt) for step in rollout.steps)
    assert [step.prompt[0]["content"] for step in rollout.steps] == ["Question"] * 4 + ["Question?"] * 2


def test_what_a_step_gives_can_be_changed_and_changes_nothing():
    _, rollout = play(tokenizer_of("plain"), Chat(max_turns=3), answers(5, 3))
    before = [(step.prompt, step.prompt_token_ids) for step in rollout.steps]
    rollout.steps[0].prompt_token_ids.append(7)
    rollout.steps[0].prompt.append({})
    assert [(step.prompt, step.prompt_token_ids) for step in rollout.steps] == before
    assert all(type(part) is list for pair in before for part in pair)


def test_memory_and_pickles_grow_with_the_turns():
    """Not with their square, as when each step had its own prompt."""
    sizes = []
    for turns in (30, 60, 120):
        _, rollout = play(tokenizer_of("plain"), Chat(max_turns=turns), answers(6, turns))
        sizes.append(len(pickle.dumps(rollout)))
        copy = pickle.loads(pickle.dumps(rollout))
        assert copy == rollout
        assert len({id(kept(step, "prompt_token_ids").shared) for step in copy.steps[1:]}) == 1
    assert sizes[2] / sizes[1] < 2.2 and sizes[1] / sizes[0] < 2.2, sizes


def test_prefixes_that_part_keep_what_they_have():
    first = Prefix.of_tokens([1, 17, 9])
    left, right = first.followed([20, 2], [5]), first.followed([21], [6, 7])
    assert (left, right, first) == ([1, 17, 9, 20, 2, 5], [1, 17, 9, 21, 6, 7], [1, 17, 9])
    assert left.followed([], [8]) == [*left, 8] and right.rejoined([3], [4]) == [1, 17, 9, 21, 3, 4]
    assert left.__add__([1]) == [*left, 1] and left.__radd__([0]) == [0, *left]
    whole = left.tolist()
    for begin in range(-7, 8):
        assert all(left[begin:end] == whole[begin:end] for end in range(-7, 8))
        if -6 <= begin < 6:
            assert left[begin] == whole[begin]
    with pytest.raises(IndexError):
        left[6]
    with pytest.raises(ValueError, match="expected int32"):
        Prefix.of_tokens([2**31])


def test_private_texts_are_found_as_a_search_of_all_finds_them():
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    texts, chat = PrivateTexts(), Prefix.of_messages([{"role": "user", "content": "ball"}])
    for _ in range(60):
        secret = " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))
        texts.add(secret, draw.sample(["a", "b"], draw.randint(1, 2)))
        if draw.random() < 0.2:
            texts.mark_heard("a", {"b": secret})
        if draw.random() < 0.1:
            texts.reveal(secret)
        if draw.random() < 0.1:
            texts = texts.copy() if draw.random() < 0.5 else pickle.loads(pickle.dumps(texts))
        said = {"role": "user", "content": " ".join(draw.choices([*WORDS, secret, secret[1:]], k=4))}
        chat = chat.followed([said], [{"role": "user", "content": secret}] if draw.random() < 0.5 else [])
        for actor in ("a", "b"):
            marks = [mark.text for mark in texts.marks.values() if mark.readers is not None and actor in mark.readers]
            expected = [text for text in marks if any(text in text_of(each["content"]) for each in chat)]
            assert texts.shown(actor, chat) == expected, f"seed {seed}"
        chat = chat.rejoined([], []) if draw.random() < 0.3 else chat


def test_an_observation_of_each_turn_is_searched_alone_in_earlier_messages():
    """The marks of earlier turns are not: a search of all of them reads 6,400 messages in the last of 80 turns."""
    read = 0

    class Text(str):
        def __contains__(self, other):
            nonlocal read
            read += 1
            return super().__contains__(other)

    counts = []
    for turns in (20, 80):
        read, texts, chat = 0, PrivateTexts(), Prefix.of_messages([])
        for turn in range(turns):
            texts.add(f"the secret number {turn} of mine", ["a"])
            said = [{"role": "user", "content": Text(f"the answer number {turn} of yours")}]
            chat = chat.rejoined(said, [{"role": "user", "content": Text(f"the secret number {turn} of mine")}])
            assert texts.shown("a", chat) == [f"the secret number {turn} of mine"]
        counts.append(read / turns)
    assert counts[1] < 2 * turns, "a text has about 80 messages before it, and the new one"


def test_a_tokenizer_without_marks_shares_what_is_rendered():
    arena, rollout = play(ByteTokenizer(), Chat(max_turns=20), answers(7, 20))
    assert set(origins(rollout)[SHORT:]) == {ANCHORED}
    format = arena.plain_format(None)
    assert all(format.prompt_ids(step.prompt) == step.prompt_token_ids for step in rollout.steps)
