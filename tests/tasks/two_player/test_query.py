"""A model asked at every information set: exactly where its probabilities are known, and within what counts allow."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.arena import Arena
from turnwise.chat.tokenizers import keep_ends
from turnwise.tasks.kuhn_poker import KuhnPokerTask, equilibrium, solve, table_player
from turnwise.tasks.tic_tac_toe import TicTacToeTask, positions
from turnwise.tasks.two_player import interval, sample_policy, score_policy
from turnwise.types import Sampling

POLICY = np.tile([0.25, 0.65, 0.1], (12, 1))


def tiny_arena(task, temperature=1.0, **options):
    """The tiny model, hardly taught, as the actors of ``task``."""
    from turnwise.inference import TransformersClient
    from turnwise.tasks.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(task.texts())
    model = build_model(tokenizer, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                        head_dim=16, intermediate_size=48, seed=3)  # fmt: skip
    arena = Arena(TransformersClient(model, tokenizer), tokenizer, sampling=Sampling(temperature, 8, **options))
    for actor in task.actors:
        arena.add_actor(actor)
    return arena, model


async def test_counts_come_near_the_policy_that_answers(table):
    task = KuhnPokerTask()
    found = await sample_policy(table(task, table_player(POLICY, Random(0))).arena, task, samples=400)
    assert found.counts.sum(axis=1).tolist() == [400] * 12
    assert np.abs(found.table - POLICY).max() < 4.5 * np.sqrt(0.25 / 400)
    assert task.solve(found.table).value == pytest.approx(solve(POLICY).value, abs=0.15)


async def test_each_row_is_asked_as_its_own_seat_and_with_the_prompt_of_the_episode(table):
    task = KuhnPokerTask()
    seat = table(task, task.random_player(0))
    await sample_policy(seat.arena, task, samples=1)
    asked = {(actor, messages[-1]["content"]) for actor, messages in seat.seen}
    seat.seen.clear()
    await seat.play(task.requests(0, 300, 1))
    assert {(actor, messages[-1]["content"]) for actor, messages in seat.seen} == asked and len(asked) == 12


async def test_what_is_said_in_another_words_counts_when_sampled_as_the_game_reads_it(table):
    task = KuhnPokerTask()
    answers = {"[bet]": "Well, I [bet].", "[call]": "[fold] or [call]?"}
    found = await sample_policy(
        table(task, lambda actor, messages: next(a for w, a in answers.items() if w in messages[-1]["content"])).arena,
        task,
        samples=2,
    )
    assert found.table[:, 1].tolist() == [1.0] * 12


async def test_illegal_and_unreadable_answers_fall_into_the_last_column(table):
    task = KuhnPokerTask()
    found = await sample_policy(table(task, lambda actor, messages: "no").arena, task, samples=1)
    assert (found.table[:, -1] == 1).all() and found.table.shape == (len(task.decisions()), found.table.shape[1])


async def test_tic_tac_toe_is_asked_in_every_position(table):
    task = TicTacToeTask()
    found = await sample_policy(table(task, task.oracle()).arena, task, samples=1)
    assert found.table.shape == (4520, 10)
    assert task.solve(found.table).exploitability == 0.0, "whatever the oracle picked, it gives nothing away"
    legal = np.concatenate([positions().legal, np.zeros((4520, 1), dtype=bool)], axis=1)
    assert not found.table[~legal].any()


@pytest.mark.parametrize("ends", [1, 2])
async def test_scores_are_the_probabilities_of_the_plain_texts(ends):
    """Of each text with any of the tokens that end a turn."""
    import torch

    task = KuhnPokerTask()
    arena, model = tiny_arena(task, temperature=0.7)
    if ends == 2:
        keep_ends(arena.tokenizer, SimpleNamespace(eos_token_id=arena.tokenizer.pad_token_id))
        arena.tokenizer = arena.tokenizer
    async with arena.client:
        found = await score_policy(arena, task)
        assert found.table.shape == (12, 3) and np.allclose(found.table.sum(axis=1), 1.0)
        for row, decision in enumerate(task.decisions()):
            for column, action in enumerate(decision.actions):
                _, request = arena.prepare(decision.seat, decision.messages)
                stops = request.sampling.stop_token_ids
                assert len(stops) == ends and arena.tokenizer.eos_token_id in stops
                expected = 0.0
                for stop in stops:
                    reply = [*arena.tokenizer.encode(f"[{action}]"), stop]
                    ids = torch.tensor([[*request.prompt_token_ids, *reply]])
                    with torch.no_grad():
                        logprobs = (model(ids).logits[0].double() / 0.7).log_softmax(-1)
                    start = len(request.prompt_token_ids)
                    expected += logprobs[start - 1 : -1].gather(1, ids[0, start:, None]).sum().exp().item()
                assert found.table[row, column] == pytest.approx(expected, rel=1e-3)
        assert found.other == pytest.approx(1 - found.table[:, :2].sum(axis=1))
        assert task.solve(found.table).value == pytest.approx(solve(found.table).value)


async def test_who_cannot_score_or_would_score_another_policy_is_told(table):
    task = KuhnPokerTask()
    with pytest.raises(TypeError, match=r"ScriptedClient has no score.*sample_policy"):
        await score_policy(table(task, []).arena, task)
    for changes in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}):
        arena, _ = tiny_arena(task, **changes)
        async with arena.client:
            with pytest.raises(ValueError, match=r"sampling=.*sample_policy"):
                await score_policy(arena, task)
    with pytest.raises(ValueError, match="samples=0"):
        await sample_policy(table(task, []).arena, task, samples=0)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """For a policy far from equilibrium, and at one, where a best response to the counts fits nothing but noise."""
    distant = np.random.default_rng(7).dirichlet(np.ones(3), size=12)
    for policy, at_least in ((distant, 25), (np.pad(equilibrium(0.2), ((0, 0), (0, 1))), 20)):
        truth, held, plain = solve(policy).exploitability, 0, []
        rng = np.random.default_rng(0)
        for trial in range(30):
            counts = rng.multinomial(150, policy)
            low, high = interval(solve, counts, draws=50, seed=trial)
            held += low <= truth + 1e-9 and truth <= high
            plain.append(solve(counts / 150).exploitability)
        assert held >= at_least, "95% intervals of 30 trials; fewer where exploitability has its kink"
    assert min(plain) > 0.0, "each sampled table of the equilibrium can be exploited"
    with pytest.raises(ValueError, match="draws=1"):
        interval(solve, counts, draws=1)
