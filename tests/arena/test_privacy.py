"""Private text: what is marked, what the check finds in random games that leak on purpose, and what it lets through."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import fields, replace

import numpy as np
import pytest

from turnwise.arena import (
    Episode,
    EpisodeCheckpoints,
    LeakError,
    MultiTurnEpisode,
    Rubric,
    SingleTurnEpisode,
    TreeSampler,
    private,
    reveal,
)
from turnwise.arena.runtime.privacy import check_batch
from turnwise.types import EpisodeRequest, Rollout, TrainingBatch

from .test_episode_checkpoints import killed_after

SEED = random.SystemRandom().randrange(2**32)
NAMES = ("ann", "bob", "cat", "dan")


class Secrets(MultiTurnEpisode):
    """Everybody holds a number that only it may see, thinks about it in hiding, and says one word."""

    episode_type = "secrets"
    rubric = Rubric([lambda extras: 1.0])

    def __init__(self, actors=NAMES[:2], rounds=2, **options):
        super().__init__(max_turns=rounds, **options)
        self.actors = tuple(actors)

    def setup(self, state, arena, artifact):
        numbers = self.rng.sample(range(100, 1000), len(self.actors))
        state.data = {"numbers": dict(zip(self.actors, numbers, strict=True)), "said": 0}

    def get_prompt(self, artifact):
        return "Everybody holds a number."

    def secret(self, state, actor):
        return f"Your number is {state.data['numbers'][actor]}."

    def get_observation(self, state, arena, artifact):
        return f"Round {state.turn}.\n" + private(self.secret(state, state.current_actor), to=state.current_actor)

    def public(self, text):
        return text.rpartition("</plan>")[2].strip()

    def env_response(self, state, arena, artifact):
        state.data["said"] += 1
        return f"{state.data['said']} words were said."

    def step_reward(self, state, arena, artifact):
        return float(len(state.last_completion_text) % 7)


def thoughts(prompt, request):
    rng = random.Random(request.sampling.seed)
    words = " ".join(rng.choice(["high", "low", "bluff", "wait", "trust"]) for _ in range(6))
    return f"<plan>{words} {rng.random()}</plan> {rng.choice(['yes', 'no'])}"


def play(make_arena, episode, actors=NAMES, reply=thoughts, copies=2, **options):
    arena = make_arena(reply, actors=actors, check_private=True, **options, episodes=[episode])
    requests = [EpisodeRequest(episode.episode_type, "q", group_id="q") for _ in range(copies)]
    results = asyncio.run(arena.generate_rollouts(requests))
    assert [result.rollout.error for result in results] == [None] * copies
    return arena, results


# --- random games -----------------------------------------------------------------------------------------------------
def other_of(episode, state):
    return next(actor for actor in episode.actors if actor != state.current_actor)


class Observed(Secrets):
    def get_observation(self, state, arena, artifact):
        mine = super().get_observation(state, arena, artifact)
        for actor in self.actors:
            private(self.secret(state, actor), to=actor)
        return f"{mine} {self.secret(state, other_of(self, state))}"


class Announced(Secrets):
    """The environment says aloud what the actor was told, in other letters and other white space."""

    def env_response(self, state, arena, artifact):
        return self.secret(state, state.current_actor).upper().replace(" ", "\n  ")


class Overheard(Secrets):
    """The whole completion is shown to the others, the hidden part with it."""

    role = "user"

    def shown(self, text):
        return text

    async def build_messages(self, state, arena, artifact):
        messages = await self.transcript(state, arena, artifact)
        others = [step.completion for step in state.trajectory if step.actor_id != state.current_actor]
        return messages + [{"role": self.role, "content": self.shown(text)} for text in others]


class Posed(Overheard):
    """As above, but as if the reader had said it itself."""

    role = "assistant"


class Untagged(Overheard):
    """What was thought is shown to the others, without the tags that stood around it."""

    def shown(self, text):
        return f"They think: {text.partition('<plan>')[2].partition('</plan>')[0]}!"


class InParts(Secrets):
    async def build_messages(self, state, arena, artifact):
        for actor in self.actors:
            private(self.secret(state, actor), to=actor)
        parts = [{"type": "text", "text": self.secret(state, other_of(self, state))}]
        return [{"role": "user", "content": parts}]


class Copied(Secrets):
    """The whole of another seat's observation stands in one's own, and each is marked as a whole."""

    def get_observation(self, state, arena, artifact):
        actor = state.current_actor
        views = [f"Round {state.turn}.\n{self.secret(state, seat)}" for seat in (actor, other_of(self, state))]
        private(views[1], to=other_of(self, state))
        return private("\n".join(views), to=actor)


LEAKS = [Observed, Announced, Overheard, Posed, InParts, Untagged, Copied]


@pytest.mark.parametrize("number", range(6))
def test_random_games_that_keep_their_secrets_pass(make_arena, number, tmp_path):
    rng = random.Random(SEED + number)
    print("seed", SEED, number)
    actors = rng.sample(NAMES, rng.randint(2, 4))
    tree = TreeSampler(branches=rng.randint(2, 3), select="sample") if rng.random() < 0.5 else None
    episode = Secrets(actors, rounds=rng.randint(1, 3), sampler=tree)
    arena = make_arena(thoughts, actors=NAMES, check_private=True, seed=rng.randrange(1000), max_concurrency=3)
    if rng.random() < 0.5:
        arena.episode_checkpoints = EpisodeCheckpoints(tmp_path)
    arena.add_episode(episode)
    arena.source = lambda: [EpisodeRequest("secrets", "q", group_id="q") for _ in range(3)]
    batch = asyncio.run(arena.step())
    assert len(batch) == sum(len(result.rollout.steps) for result in arena.last_results) > 0
    for result in arena.last_results:
        for step in result.rollout.steps:
            assert any(text.startswith("Your number is") for text in step.facts.private)
            assert all(text in "".join(m["content"] for m in step.prompt) for text in step.facts.private)


@pytest.mark.parametrize("kind", LEAKS)
def test_random_games_that_leak_are_found(make_arena, kind):
    rng = random.Random(SEED)
    print("seed", SEED)
    for _ in range(5):
        actors = rng.sample(NAMES, rng.randint(2, 4))
        tree = TreeSampler(branches=2, select="sample") if rng.random() < 0.5 else None
        arena = make_arena(thoughts, actors=NAMES, check_private=True, seed=rng.randrange(1000), failure_threshold=1.0)
        arena.add_episode(kind(actors, rounds=2, sampler=tree))
        with pytest.raises(
            LeakError, match=r"step \d+ of rollout 'e0'.*: the prompt of actor '\w+' holds what is"
        ) as raised:
            asyncio.run(arena.generate_rollouts([EpisodeRequest("secrets", "q")]))
        readers = str(raised.value).partition("private to ")[2].partition(": ")[0]
        assert set(readers.replace("'", "").split(", ")) < set(actors)
        # Without the option the same game runs to its end.
        arena.check_private = False
        [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("secrets", "q")]))
        assert result.rollout.error is None


async def peek(arena, rollout):
    await arena.call_model("bob", rollout.steps[0].prompt[-1]["content"])
    return 1.0


class Late(Secrets):
    """Shows ann bob's number before bob is told it: found at the end."""

    async def build_messages(self, state, arena, artifact):
        messages = await self.transcript(state, arena, artifact)
        if state.current_actor == "ann":
            messages[0]["content"] += self.secret(state, "bob")
        return messages


class Aloud(Secrets):
    """What an actor said may be shown to it, but is no excuse for a secret that merely holds it."""

    public = lambda self, text: text  # noqa: E731

    def env_response(self, state, arena, artifact):
        return self.secret(state, "ann") if state.turn == 1 and state.current_actor == "ann" else None


class Brief(Overheard):
    """A thought of a few words is found with its tags."""

    def public(self, text):
        return text.rpartition(">")[2].strip()


class Whisper(Secrets):
    """The others hear what ann says, and cat does not; then the environment says it to everybody."""

    repeats = False

    async def public_to(self, text, actor, to):
        return None if (actor, to) == ("ann", "cat") else text if actor == "ann" else self.public(text)

    def env_response(self, state, arena, artifact):
        return state.last_completion_text if self.repeats else None


class Repeated(Whisper):
    repeats = True


class Thief(Secrets):
    get_observation = public = lambda self, *_: ""

    def get_extras(self, state):
        state.trajectory[1].actor_id = "ann"
        return {}


def says(text):
    return lambda prompt, request: text


FOUND = [
    (
        Announced(("ann", "bob")),
        thoughts,
        r"step 1 of rollout 'e0' \(secrets\): the prompt of actor 'bob' holds what is private to 'ann': 'Your number",
    ),
    (type("Peeking", (Secrets,), {"rubric": Rubric([peek], on_error="zero")})(rounds=1), thoughts, "'bob'"),
    (Late(rounds=1), thoughts, "step 0 .*: the prompt of actor 'ann' holds what is private to 'bob'"),
    *(
        (Aloud(), says(word), "actor 'bob' holds what is private to 'ann'")
        for word in ("is", "n", "Your number", "", ".")
    ),
    *(
        (Brief(rounds=1), says(f"{thought} yes"), f"actor 'bob' holds what is private to 'ann': '{thought}'")
        for thought in ("<plan>fold</plan>", "<plan>the king, maybe</plan>", "<plan a=1>k</plan>")
    ),
    (Repeated(("ann", "bob", "cat"), rounds=1), thoughts, "actor 'cat' holds what is private to 'ann', 'bob'"),
    (Thief(rounds=1), thoughts, r"step 1 of rollout 'e0'.*: the completion of actor 'ann' was not sampled for it"),
]


@pytest.mark.parametrize(("episode", "reply", "message"), FOUND)
def test_what_is_found_and_how_it_is_told(make_arena, episode, reply, message):
    with pytest.raises(LeakError, match=message):
        play(make_arena, episode, reply=reply, copies=1)


class Nested(SingleTurnEpisode):
    """Asks an actor what the artifact says, marked as ann's for ann."""

    episode_type, rubric = "nested", Rubric([lambda extras: 1.0])

    def get_initial_actor(self):
        return self.actor

    def get_prompt(self, artifact):
        return private(artifact, to="ann") if self.actor == "ann" else artifact


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("bob", r"step 0 of rollout 'e0.0' \(nested\): the prompt of actor 'bob'"),
        ("ann", r"rollout 'e0' .*actor 'bob' holds what is private to 'ann': 'The code is 4711"),
    ],
)
def test_marks_hold_in_nested_episodes_and_in_their_parents(make_arena, asked, message):
    """A leak in a nested episode stops the whole call, whatever the threshold."""

    class Outer(Secrets):
        async def env_response(self, state, arena, artifact):
            words = self.secret(state, "ann") if asked == "bob" else "The code is 4711."
            await arena.generate_rollouts([EpisodeRequest("nested", words)])
            return "The code is 4711."

    inner = Nested()
    inner.actor = asked
    arena = make_arena(thoughts, actors=NAMES, check_private=True, failure_threshold=1.0, episodes=[Outer(), inner])
    with pytest.raises(LeakError, match=message):
        asyncio.run(arena.generate_rollouts([EpisodeRequest("secrets", "q")]))


def test_a_retried_episode_starts_with_no_marks(make_arena):
    class Flaky(Secrets):
        """Fails once; what was ann's in the first attempt is bob's in the second."""

        failed = False

        def setup(self, state, arena, artifact):
            state.data = {"numbers": {"ann": 8, "bob": 7} if self.failed else {"ann": 7, "bob": 8}, "said": 0}

        def get_observation(self, state, arena, artifact):
            return private(self.secret(state, state.current_actor), to=state.current_actor)

        def is_done(self, state, arena, artifact):
            if not self.failed and state.current_actor == "ann":
                self.failed = True
                raise RuntimeError("once")
            return False

        def env_response(self, state, arena, artifact):
            return "Your number is 7." if self.failed and state.current_actor == "ann" else None

    _, [result] = play(make_arena, Flaky(("bob", "ann"), rounds=1), copies=1, retries=1)
    assert result.rollout.facts.attempt == 1
    assert [step.facts.private for step in result.rollout.steps] == [["Your number is 7."], ["Your number is 8."]]
    with pytest.raises(LeakError, match="private to 'bob'"):
        play(make_arena, Flaky(("bob", "ann")), copies=1, retries=1)


def test_a_leak_is_found_before_the_call_is_made(make_arena):
    class Early(Announced):
        """Tells bob what is ann's; later it is for everybody, so in the end nothing is wrong."""

        def get_observation(self, state, arena, artifact):
            if state.current_actor == "bob":
                reveal(self.secret(state, "ann"))
            return super().get_observation(state, arena, artifact)

        async def build_messages(self, state, arena, artifact):
            if state.current_actor == "bob":
                await self.call_model("bob", self.secret(state, "ann"), arena)
            return await self.transcript(state, arena, artifact)

    arena = make_arena(thoughts, actors=NAMES, check_private=True, episodes=[Early(rounds=1)])
    with pytest.raises(LeakError, match=r"step 1 .*'bob'"):
        asyncio.run(arena.generate_rollouts([EpisodeRequest("secrets", "q")]))
    assert len(arena.client.prompts) == 1


class Told(Secrets):
    """In the second round everybody hears what ann's number was in the first; only then was it marked."""

    tells = False

    def get_observation(self, state, arena, artifact):
        return super().get_observation(state, arena, artifact) if state.turn == 0 else None

    def env_response(self, state, arena, artifact):
        return self.secret(state, "ann") if self.tells and state.turn == 1 else None


def test_marks_survive_a_kill(make_arena, tmp_path):
    def resumed(kind):
        for reply in (killed_after(2, thoughts), thoughts):
            arena = make_arena(reply, actors=NAMES, check_private=True)
            arena.episode_checkpoints = EpisodeCheckpoints(tmp_path / kind.__name__)
            arena.add_episode(kind(rounds=2))
            try:
                [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("secrets", "q")]))
            except asyncio.CancelledError:
                continue
            assert len(arena.client.requests) == 2, "resumed, not begun again"
            return result

    assert len(resumed(Told).rollout.steps) == 4
    with pytest.raises(LeakError, match="'bob' holds what is private to 'ann'"):
        resumed(type("Tells", (Told,), {"tells": True}))


# --- what is no leak --------------------------------------------------------------------------------------------------
def game(rounds=2, **hooks):
    return type("Game", (Secrets,), hooks)(("ann", "bob"), rounds=rounds)


def each_hears(ann, bob, mark=lambda text, to: text):
    """A game in which the two observe these texts."""
    texts = {"ann": ann, "bob": bob}
    return game(get_observation=lambda self, state, *_: mark(texts[state.current_actor], to=state.current_actor))


async def judged(arena, rollout):
    await arena.call_model(None, str([step.prompt for step in rollout.steps]))
    return 1.0


def formal():
    """The opening prompt shows a format, and the environment says a few ordinary words."""
    return game(
        rounds=1,
        get_prompt=lambda self, artifact: "Answer as <plan>your thoughts</plan> yes.",
        public=lambda self, text: "yes",
        env_response=lambda self, *_: "You may fold, or fold fold. <b></b> The king: yes.",
    )


FINE = {
    "a revealed text is for everybody": (
        game(env_response=lambda self, state, *_: reveal(self.secret(state, state.current_actor))),
        thoughts,
    ),
    "a part of one's own text": (each_hears("You hold wood", "You hold wood and stone"), thoughts),
    # A board for all and one seat's own cards look the same, so only a mark can tell them apart.
    "an observation that holds another's": (
        each_hears("The board has two stones on it.", "The board has two stones on it.\nIt is late."),
        thoughts,
    ),
    "a judge sees everything": (game(rubric=Rubric([judged])), thoughts),
    **{
        f"short: {text}": (formal(), says(text))
        for text in ("<plan>your thoughts</plan> yes", "fold fold yes", "<b></b> yes", "the king: yes")
    },
    **{
        f"marked: {hands}": (each_hears(*hands, mark=private), thoughts)
        for hands in (
            ("You hold wood", "You hold wood and stone"),
            ("You hold: wood", "You hold: wood, stone"),
            ("K", "K\nQ"),
            ("You hold 1.", "You hold 1.5 gold. You hold 12."),
            ("You drew a 5.", "You drew a 5."),
        )
    },
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_no_leak(make_arena, name):
    episode, reply = FINE[name]
    play(make_arena, episode, reply=reply)


@pytest.mark.parametrize(
    ("thought", "leaks"),
    [
        ("I hold the king of hearts", True),
        ("I fold", False),  # too short to be told from chance
        ("Everybody holds a number.", False),  # a quotation of the prompt
        ("I will say aloud: yes and no and yes", False),  # it did
    ],
)
def test_a_thought_that_an_episode_passes_on_is_a_leak(make_arena, thought, leaks):
    class Gossip(Episode):
        episode_type = "gossip"
        rubric = Rubric([lambda rollout: 1.0])

        async def rollout(self, arena, artifact, state=None):
            first = await self.call_model("ann", "Everybody holds a number.", arena)
            await self.call_model("bob", f"Ann thought: {first.parsed.thought}", arena)
            return state

    said = f"<think>{thought}</think>I will say aloud: yes and no and yes"
    arena = make_arena(lambda prompt, request: said, check_private=True, episodes=[Gossip()], actors=["ann", "bob"])
    with pytest.raises(LeakError, match="private to 'ann'") if leaks else contextlib.nullcontext():
        asyncio.run(arena.generate_rollouts([EpisodeRequest("gossip", None)]))


def test_what_the_owner_says_aloud_is_no_leak(make_arena):
    class Talker(Aloud):
        env_response = Secrets.env_response

        def setup(self, state, arena, artifact):
            state.data = {"numbers": {"ann": 1, "bob": 12}, "said": 0}

    _, [result] = play(make_arena, Talker(), reply=says("Well: your number is 1. Mine."), copies=1)
    assert "your number is 1." in str(result.rollout.steps[1].prompt)


def test_the_same_text_may_be_private_to_several(make_arena):
    episode = each_hears("It is your move.", "It is your move.")
    _, [result] = play(make_arena, episode, copies=1)
    assert [step.facts.private for step in result.rollout.steps[:2]] == [["It is your move."]] * 2


def test_each_reader_may_hear_something_else(make_arena):
    _, [result] = play(make_arena, Whisper(("ann", "bob", "cat"), rounds=1), copies=1)
    ann, bob, cat = result.rollout.steps
    assert ann.completion in str(bob.prompt) and "ann" not in str(cat.prompt)
    assert f"bob: {bob.completion.rpartition(' ')[2]}" in str(cat.prompt) and "<plan>" not in str(cat.prompt)


# --- tokens -----------------------------------------------------------------------------------------------------------
def made_batch(make_arena, **changes):
    arena, results = play(make_arena, Secrets(rounds=1))
    arena.assign_credit(results)
    return replace(arena.build_training_batch(results), **changes), results


def test_nothing_but_own_completions_trains(make_arena):
    batch, results = made_batch(make_arena)
    check_batch(batch, results)
    whole = TrainingBatch.of_rows(
        batch.token_ids, batch.cu_seqlens, batch.loss_mask.copy(), batch.rollout_logprobs,
        **{field.name: getattr(batch, field.name) for field in fields(batch)[5:]},
    )  # fmt: skip
    check_batch(whole, results)
    whole.target_mask[whole.cu_targets[2]] = 1
    with pytest.raises(LeakError, match=r"row 2 of the batch: actor 'ann' would train on token 0"):
        check_batch(whole, results)
    swapped = replace(batch, actor_index=1 - batch.actor_index)
    with pytest.raises(LeakError, match=r"row 0 of the batch: no recorded call of actor 'bob' has its tokens"):
        check_batch(swapped, results)


def test_the_arena_checks_the_batch_that_it_builds(make_arena, monkeypatch):
    from turnwise.arena import arena as module

    def everything_trains(*arguments):
        batch = pack(*arguments)
        contexts = [context.first(len(context) - 1) for context in batch.contexts]
        ends = [context[-1] for context in batch.contexts]
        rows = [slice(*batch.cu_targets[row : row + 2]) for row in range(len(batch))]
        parts = [[end, *batch.targets[row]] for end, row in zip(ends, rows, strict=True)]
        return replace(
            batch,
            contexts=contexts,
            targets=np.concatenate(parts),
            cu_targets=np.cumsum([0, *map(len, parts)]),
            target_mask=np.ones(sum(map(len, parts)), np.uint8),
        )

    pack = module.pack
    monkeypatch.setattr(module, "pack", everything_trains)
    with pytest.raises(LeakError, match="row 0 of the batch"):
        made_batch(make_arena)


def test_marks_are_not_kept_without_a_use(make_arena):
    arena = make_arena(thoughts, actors=("ann",))
    arena.add_episode(type("Plain", (Secrets,), {"get_observation": lambda *_: None})(("ann",), rounds=1))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("secrets", "q")]))
    assert isinstance(result.rollout, Rollout) and result.rollout.steps[0].facts.private is None
