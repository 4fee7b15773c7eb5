"""turnwise's tasks as environments of verifiers: an episode there gives the rewards that turnwise's own gives."""

from __future__ import annotations

import pytest
import verifiers.v1 as vf

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.tasks import build_task
from turnwise.types import Sampling

from ...chat.families import chat_tokenizer
from .helpers import LOGPROBS, played, rows_of, token_server, use_modules
from .test_in import check_rows


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    use_modules(monkeypatch)


def half_right(task):
    """Return a script: the oracle's reply, and for every second prompt a wrong one."""
    oracle = task.oracle()
    actor_of = {actor.system_prompt: actor.id for actor in task.actors}

    def reply(request):
        reply = oracle(actor_of[request.messages[0]["content"]], request.messages)
        return reply if len(str(request.messages)) % 2 else reply[:-1]

    return reply


async def test_rewards_and_prompts_are_those_of_the_native_task():
    task = build_task("split_clues")
    exported = build_task("verifiers:clues_env", {"size": 12})
    rows = [each.data for each in exported.env.taskset.take(12)]
    for question in exported.questions()[:6]:
        data = rows[exported.artifact(question)["index"]]
        arena = Arena(ScriptedClient(half_right(task), tokenizer=chat_tokenizer("qwen3")), sampling=Sampling())
        for actor in task.actors:
            arena.add_actor(actor)
        for episode in task.episodes().values():
            arena.add_episode(episode)
        request = next(
            request for step in range(99) for request in task.requests(step, 1, 1) if request.artifact == data.artifact
        )
        [native] = await arena.generate_rollouts([request])
        results, episodes, _ = await played("clues_env", half_right(task), question=question, size=12)
        [result] = results
        assert result.rollout.rewards == native.rollout.rewards
        assert [step.prompt for step in result.rollout.steps] == [step.prompt for step in native.rollout.steps]
        assert [step.actor_id for step in result.rollout.steps] == [step.actor_id for step in native.rollout.steps]
        check_rows(results, episodes)
        solved = {name: value for name, value in native.rollout.metrics.items() if name.startswith("solved/")}
        for name, value in solved.items():
            function, _, actor = name.partition("/")
            assert result.rollout.metrics[f"verifiers/{function}/{actor}"] == value


async def test_chat_that_goes_on_is_one_trace():
    results, [episode], _ = await played("rounds_env", ["4", "no", "5"])
    check_rows(results, [episode])
    assert {(trace.agent.name, trace.num_turns, trace.num_branches) for trace in episode.traces} == {
        ("solver", 2, 1),
        ("checker", 1, 1),
    }
    solver, checker = episode.by_agent["solver"][0], episode.by_agent["checker"][0]
    assert (checker.reward, solver.rewards["turnwise"].weight) == (0.25, 1.0)
    assert [message.content for message in solver.assistant_messages] == ["4", "5"]
    # Of the metrics of actors, a trace has its own.
    assert checker.metrics["right"] == 0.25 and not any(name.endswith("/solver") for name in checker.metrics)


async def test_failed_episode_is_no_reward_of_zero():
    env = {"solver": {"max_turns": 1}}
    [result], [episode], _ = await played("rounds_env", ["4", "no", "5"], env=env, fails=True)
    assert "agent 'solver': its run has ended: max_turns" in result.rollout.error
    assert not episode.ok


async def test_client_that_trains_elsewhere_gets_tokens_and_rewards(tmp_path):
    """verifiers' own client for training renders the chats, and a server of vLLM's kind samples, as under prime-rl."""
    async with token_server(tmp_path, ["4", "no", "5"]) as (client, asked):
        env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "rounds_env"}}))
        task = next(iter(env.taskset))
        async with env.serving():
            [slot] = env.slots(task)
            episode = await env.run_slot(slot, vf.ModelContext(model="model", client=client))
    assert episode.ok, episode.errors
    solver = episode.by_agent["solver"][0]
    right = float(task.data.artifact["question"][-1] == "5")
    assert solver.reward == right
    [branch] = solver.branches
    assert branch.token_ids[: len(asked[2]["token_ids"])] == asked[2]["token_ids"]
    tokenizer = chat_tokenizer("qwen3")
    ids = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in ("4", "5")]
    assert [row[1] for row in rows_of(solver)] == ids
    assert [row[2] for row in rows_of(solver)] == [list(LOGPROBS[: len(each)]) for each in ids]
    assert sum(branch.sampled_mask) == sum(map(len, ids))


def test_task_is_rebuilt_from_its_data():
    """prime-rl sends a task's data to verifiers' server of environments, which reads no taskset."""
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "rounds_env"}}))
    task = next(iter(env.taskset))
    task_type = type(env.taskset).task_type()
    rebuilt = task_type(task_type.data_type().model_validate(task.data.model_dump()), env.config.taskset.task)
    assert (type(rebuilt), rebuilt.data, rebuilt.key) == (type(task), task.data, task.key)


def test_environment_is_found_by_the_name_of_its_module():
    config = vf.resolve_env_config({"taskset": {"id": "clues_env", "split": "eval", "size": 3}})
    env = vf.load_environment(config)
    tasks = list(env.taskset)
    assert len(tasks) == 3 and env.taskset.bounded
    held = build_task("split_clues").eval_requests("eval", 3)
    assert [task.data.artifact for task in tasks] == [request.artifact for request in held]
    # The row crosses processes as JSON, and comes back as the same task.
    data = type(tasks[0].data).model_validate_json(tasks[0].data.model_dump_json())
    assert data == tasks[0].data


def test_questions_are_drawn_once_each():
    config = vf.resolve_env_config({"taskset": {"id": "rounds_env"}})
    found = [task.data.artifact["question"] for task in vf.load_environment(config).taskset]
    assert len(found) == len(set(found)) > 30


def test_groups_and_tools_are_refused():
    from rounds_env import RoundsTask

    from turnwise.arena import Rubric
    from turnwise.integrations.verifiers import export_task

    task = RoundsTask()
    episodes = task.episodes()
    episodes["rounds"].rubric = Rubric([lambda rollouts: [1.0 for _ in rollouts]])
    task.episodes = lambda tree=None: episodes
    with pytest.raises(ValueError, match="rewards attempts as a group"):
        export_task(task)
