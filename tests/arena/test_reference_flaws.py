"""Flaws of the designs that turnwise follows, each with the tests that keep it from coming back."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from turnwise.credit import GRPOCredit
from turnwise.types import EpisodeRequest

from .helpers import Guess, guess

TESTS = Path(__file__).parents[1]
FLAWS = {
    # of the arena
    "children lost their policy version": (
        "arena/test_arena_nesting.py",
        "test_children_inherit_the_policy_version_and_priority",
    ),
    "limits multiplied per level": (
        "arena/test_arena_scheduling.py",
        "test_the_limit_of_concurrent_calls_holds_over_all_levels",
    ),
    "one exception killed the step": (
        "arena/test_arena_failures.py",
        "test_one_exception_is_one_failed_result_and_its_siblings_go_on",
    ),
    "siblings were orphaned": (
        "arena/test_arena_failures.py",
        "test_stopping_a_batch_leaves_no_orphan",
    ),
    "only the first actor's metric was kept": (
        "arena/test_rubric.py",
        "test_metrics_are_unique_per_function_and_actor",
    ),
    "env_response never ran after the last turn": (
        "arena/test_multi_turn.py",
        "test_the_environment_answers_the_last_action_too",
    ),
    "RAE updated once per sibling group": (
        "credit/test_rae.py",
        "test_identical_children_of_different_parents_get_identical_advantages",
    ),
    "different questions shared one top-level group": (
        "arena/test_reference_flaws.py",
        "test_different_questions_are_different_groups",
    ),
    "a group of one vanished": (
        "credit/test_base.py",
        "test_a_group_of_one_gets_zero_and_is_not_lost",
    ),
    "duplicate ids broke the store": (
        "arena/test_store.py",
        "test_a_duplicate_id_is_refused_and_changes_nothing",
    ),
    "evaluation changed baselines": (
        "arena/test_arena_resume.py",
        "test_evaluation_leaves_training_untouched",
    ),
    "hooks were never called": (
        "arena/test_arena.py",
        "test_lifecycle_hooks_run_also_when_training_fails",
    ),
    "stop tokens got no gradient": (
        "arena/test_reference_flaws.py",
        "test_the_stop_token_trains",
    ),
    "missing token ids were made up": (
        "arena/test_model_call.py",
        "test_a_response_that_is_incomplete_is_an_error",
    ),
    "importing tasks needed a key": (
        "tasks/test_base.py",
        "test_importing_every_task_needs_no_torch_no_key_and_no_network",
    ),
    # of tree sampling
    "D1 later agents got equal rewards": (
        "arena/test_sampler.py",
        "test_d1_every_actor_is_scored_by_its_own_action",
    ),
    "D2 old environments stepped": (
        "arena/test_sampler.py",
        "test_d2_each_branch_steps_its_own_fork_and_the_winners_state_goes_on",
    ),
    "D3 later agents saw nothing": (
        "arena/test_sampler.py",
        "test_d3_a_later_actor_sees_what_the_earlier_one_wrote_in_the_same_turn",
    ),
    "D4 groups mixed problems, in the tree": (
        "arena/test_sampler.py",
        "test_d4_a_group_holds_one_state_of_one_problem",
    ),
    "D4 groups mixed problems, in credit": (
        "credit/test_at_grpo.py",
        "test_eight_problems_are_eight_groups",
    ),
    "D5 early successes were dropped": (
        "arena/test_sampler.py",
        "test_d5_without_a_tree_early_successes_keep_all_their_rows",
    ),
    "failed calls became rows": (
        "arena/test_sampler.py",
        "test_a_failed_call_is_no_row_and_costs_only_its_branch",
    ),
}


@pytest.mark.parametrize(("file", "name"), FLAWS.values(), ids=FLAWS)
def test_each_flaw_has_its_test(file, name):
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_different_questions_are_different_groups(make_arena):
    """At the top too: each question has its own mean, whoever stands beside it in the batch."""
    answers = {"easy": ["8", "9"], "hard": ["0", "1"]}

    def reply(prompt, request):
        return answers["easy" if "easy" in prompt else "hard"].pop(0)

    arena = make_arena(reply, credit=GRPOCredit(normalize=False, hierarchy=True))
    arena.add_episode(Guess())
    results = asyncio.run(arena.generate_rollouts([guess(text) for text in ("easy", "hard", "easy", "hard")]))
    arena.assign_credit(results)
    assert [result.rollout.steps[0].advantage for result in results] == [-0.5, -0.5, 0.5, 0.5]


def test_the_stop_token_trains(make_arena):
    arena = make_arena(lambda prompt, request: "7")
    arena.add_episode(Guess())
    arena.source = lambda: [EpisodeRequest("guess", 1)]
    batch = asyncio.run(arena.step())
    assert batch.token_ids[-2:].tolist() == [ord("7"), 0] and batch.loss_mask[-3:].tolist() == [0, 1, 1]
