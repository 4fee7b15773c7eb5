"""verifiers' environments in turnwise: rewards and tokens equal those of verifiers' own traces."""

from __future__ import annotations

import pytest

from turnwise.arena import TreeSampler
from turnwise.run.build import train_from_config
from turnwise.tasks import build_task
from turnwise.train.validate import config_from_dict

from ...test_run import SMALL, lines_of
from ..environments.helpers import check_lines
from .helpers import played, rows_of, use_modules


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    use_modules(monkeypatch)


def check_rows(results, episodes):
    """Check that each step is one sampled message of verifiers' traces, token by token."""
    for result, episode in zip(results, episodes, strict=True):
        steps = result.rollout.steps
        seen = 0
        for trace in episode.traces:
            own = [step for step in steps if step.facts.trace == trace.id]
            rows = [(s.prompt_token_ids, s.completion_token_ids, s.completion_logprobs) for s in own]
            assert [tuple(map(list, row)) for row in rows] == rows_of(trace)
            assert all(step.actor_id == trace.agent.name for step in own)
            seen += len(own)
        assert seen == len(steps) > 0


@pytest.mark.representative
async def test_two_agents_rewards_and_tokens_are_those_of_the_traces():
    script = ["It is 5.", "yes", "So 5."]
    results, [episode], _ = await played("team_env:load_env", script)
    [result] = results
    solver, checker = episode.by_agent["solver"][0], episode.by_agent["checker"][0]
    rollout = result.rollout
    assert rollout.rewards == {"solver": solver.reward, "checker": checker.reward}
    assert [(step.actor_id, step.turn) for step in rollout.steps] == [("solver", 0), ("checker", 0), ("solver", 1)]
    check_rows(results, [episode])
    assert rollout.metrics["verifiers/words/solver"] == 2.0
    assert rollout.metrics["verifiers/right/solver"] == solver.rewards["right"].score
    assert rollout.metrics["gateway/rewritten_rows/solver"] == 0.0


@pytest.mark.parametrize("cut", [False, True])
async def test_nothing_of_a_thought_reaches_an_environment_or_another_agent(cut):
    said = ["It is 5.", "yes", "So 5."]
    thoughts = [f"<think>It is 9. I say no, xylophone.{'' if cut else '</think>'}{text}" for text in said]
    [[plain], _, _], [[thinking], _, _] = [
        await played("team_env:load_env", script) for script in ([""] * 3 if cut else said, thoughts)
    ]
    assert thinking.rollout.rewards == plain.rollout.rewards
    read, thought = (
        [[message["content"] for message in step.prompt] for step in result.rollout.steps]
        for result in (plain, thinking)
    )
    assert thought == read and "xylophone" not in str(thought)
    assert [step.in_thought for step in thinking.rollout.steps] == [cut] * 3


async def test_tools_of_a_server_are_called_and_their_results_are_prompt():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    results, [episode], arena = await played("tool_env:load_env", [call, "It is 5."])
    [result], [trace] = results, episode.traces
    assert result.rollout.rewards == {"agent": trace.reward} == {"agent": 1.3}
    first, second = result.rollout.steps
    check_rows(results, [episode])
    assert first.facts.tool_calls == ["ok"]
    # The second prompt goes on from the sampled tokens, and the tool's result is a part of it.
    seen = [*first.prompt_token_ids, *first.completion_token_ids]
    assert second.prompt_token_ids[: len(seen)] == seen
    added = arena.client.tokenizer.decode(second.prompt_token_ids[len(seen) :], skip_special_tokens=False)
    assert "<tool_response>\n5\n</tool_response>" in added
    assert [branch.sampled_mask.count(True) for branch in trace.branches] == [
        len(first.completion_token_ids) + len(second.completion_token_ids)
    ]


@pytest.mark.parametrize("api", ["stream", "responses", "messages"])
async def test_agents_of_other_dialects_are_traced_as_they_are_recorded(api):
    agent = {"harness": {"id": "plain_harness", "api": api}}
    env = {"solver": agent, "checker": agent}
    results, episodes, _ = await played("team_env:load_env", ["It is 5.", "yes", "So 5."], env=env)
    assert len(results[0].rollout.steps) == 3
    assert results[0].rollout.rewards["solver"] == episodes[0].by_agent["solver"][0].reward
    check_rows(results, episodes)


async def test_chat_that_the_agent_rewrites_is_a_branch_of_the_trace():
    env = {"solver": {"harness": {"id": "plain_harness", "edits": True}}}
    results, [episode], _ = await played("team_env:load_env", ["It is 5.", "yes", "So 5."], env=env)
    assert results[0].rollout.metrics["gateway/rewritten_rows/solver"] == 1.0
    assert episode.by_agent["solver"][0].num_branches == 2
    check_rows(results, [episode])


async def test_runs_of_one_agent_have_rewards_of_their_own():
    # Worked: two solvers, right and "It is 5." (8 characters), then wrong and "9" (1 character); weights 0.7 and -0.1.
    script = ["5", "yes", "It is 5.", "5", "no", "9"]
    results, [episode], _ = await played("team_env:load_env", script, prompt="2 + 3", env={"drafts": 2})
    [result] = results
    right, wrong = (trace.reward for trace in episode.by_agent["solver"])
    assert (right, wrong) == (pytest.approx(0.7 - 0.8 / 7), pytest.approx(-0.1 / 7))
    assert result.rollout.rewards["solver"] == (right + wrong) / 2
    assert [step.reward for step in result.rollout.steps if step.actor_id == "solver"] == [right, right, wrong, wrong]
    assert result.rollout.metrics["verifiers/runs/solver"] == 2.0
    check_rows(results, [episode])


async def test_rows_of_an_agent_that_setup_freezes_do_not_train():
    env = {"frozen_checker": True}
    [result], _, _ = await played("team_env:load_env", ["It is 5.", "yes", "So 5."], env=env)
    assert [step.trainable for step in result.rollout.steps] == [True, False, True]
    assert set(result.rollout.rewards) == {"solver"}


@pytest.mark.parametrize("lenient", [False, True])
async def test_failed_run_fails_the_episode_unless_the_environment_accepts_it(lenient):
    env = {"checker": {"sampling": {"logit_bias": {"1": 5}}}, "lenient": lenient}
    [result], [episode], _ = await played("team_env:load_env", ["5", "So 5."], env=env, fails=True)
    assert [trace.ok for trace in episode.traces] == [False, True]
    if lenient:
        assert set(result.rollout.rewards) == {"solver"}
    else:
        assert "TeamEnv: agent 'checker': ProviderError: logit_bias" in result.rollout.error


async def test_model_that_fails_is_the_error_of_the_episode():
    [result], _, _ = await played("team_env:load_env", [RuntimeError("no such weights")], fails=True)
    assert "no such weights" in result.rollout.error


async def test_attempts_run_at_once_and_keep_their_own_traces():
    results, episodes, _ = await played("team_env:load_env", lambda request: "It is 5.", attempts=6)
    by_trace = {trace.id: trace for episode in episodes for trace in episode.traces}
    assert len(episodes) == 6
    for result in results:
        for step in result.rollout.steps:
            assert by_trace[step.facts.trace].agent.name == step.actor_id


async def test_a_limit_of_turns_ends_the_run_and_it_is_scored():
    env = {"solver": {"max_turns": 1}}
    [result], [episode], _ = await played("team_env:load_env", ["It is 5.", "yes"], env=env)
    assert len(result.rollout.steps) == 2
    assert episode.by_agent["solver"][0].stop_condition == "max_turns"
    assert result.rollout.rewards["solver"] == episode.by_agent["solver"][0].reward


# -- the task ----------------------------------------------------------------------------------------------------------
def test_task_names_its_actors_splits_and_texts():
    task = build_task("verifiers:team_env")
    assert [actor.id for actor in task.actors] == ["solver", "checker"]
    assert task.success_metric == "reported_reward"
    assert len(task.questions()) == 36
    train, held_out = task.requests(0, 20, 2), task.eval_requests("eval", 1)
    assert {request.artifact["key"] for request in train}.isdisjoint(request.artifact["key"] for request in held_out)
    assert train[0].group_id == train[1].group_id != train[2].group_id
    assert any("Answer briefly." in text for text in task.texts())


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("team_env", {"env": {"solver": {"model": "gpt"}}}, "agent 'solver' pins model='gpt' and no client"),
        ("team_env", {"gateway": {"rendrer": "qwen3"}}, "renderer"),
        ("json:dumps", {"env": {"obj": 1}}, "expected a verifiers.v1.Env or EnvConfig"),
    ],
)
def test_refusals(name, options, told):
    with pytest.raises((ValueError, TypeError), match=told):
        build_task(f"verifiers:{name}", options)


def test_agent_with_a_client_of_its_own_is_no_actor():
    pinned = {"model": "gpt", "client": {"type": "eval", "base_url": "http://127.0.0.1:9/v1", "api_key_var": "NONE"}}
    task = build_task("verifiers:team_env", {"env": {"checker": pinned}})
    assert [actor.id for actor in task.actors] == ["solver"]


def test_trees_are_refused():
    with pytest.raises(ValueError, match=r"can't be forked: expected rollout\.branches = 1"):
        build_task("verifiers:team_env").episodes(TreeSampler(2))


# -- training ----------------------------------------------------------------------------------------------------------
def test_two_steps_of_training(tmp_path):
    settings = {
        **SMALL,
        "warm_start": {"steps": 0},
        "run_dir": str(tmp_path / "run"),
        "task": "verifiers:team_env:load_env",
        "task_options": {"max_tokens": 12},
        "rollout": {"prompts_per_step": 2, "group_size": 2},
        "eval": {"num_prompts": 2},
    }
    train_from_config(config_from_dict(settings))
    lines = lines_of(tmp_path / "run")
    check_lines(lines)
    updates = [line for line in lines if "samples" in line]
    assert {line["samples"] for line in updates} == {12}  # 2 tasks, 2 attempts, 3 calls
    assert all("metrics/verifiers/right/solver" in line or "verifiers/right/solver" in str(line) for line in updates)
