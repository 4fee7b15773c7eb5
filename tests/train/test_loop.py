from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from turnwise.arena import Arena, ArtifactStore, Filters, TreeSampler
from turnwise.inference import RoutingClient, ScriptedClient
from turnwise.train import ConfigError, Evaluation, Trainer
from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.checkpoint.listing import checkpoint_at, list_checkpoints
from turnwise.train.checkpoint.progress import find_checkpoint
from turnwise.train.config.optimization import CorrectionConfig, LossConfig
from turnwise.types import Actor, ClientCapabilities

from ..trained import lines_of, weights_of


async def test_weights_move_and_reach_the_client(make_trainer):
    """Three episodes and two minibatches a step move the bars; evaluation is not counted."""
    trainer = make_trainer(steps=2, eval={"every": 1})
    before, bars = weights_of(trainer), []
    trainer.log.bars.stage = lambda *told: bars.append(told)
    await trainer.run()
    assert bars == 2 * [*(("rollouts", ended, 3) for ended in (1, 2, 3)), ("updates", 1, 2), ("updates", 2, 2)]
    after = weights_of(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert trainer.arena.client.version("default") == trainer.policies["default"].version == 2
    # the sampler's log-probs of the next batch are those of the new weights
    batch = await trainer.arena.step()
    metrics = trainer.update_policies(batch)
    assert 0 < metrics["default/sampler_trainer_logprob_max_diff"] < 1e-4


async def test_an_actor_without_policy_and_a_loss_that_can_not_be_are_refused(make_trainer):
    trainer = make_trainer()
    trainer.arena.add_actor(Actor("third", policy="other"))
    with pytest.raises(ValueError, match=r"actor 'third' plays with policy 'other'; policies: default"):
        Trainer(trainer.arena, trainer.policies, trainer.config)
    # A loss that can not be is refused before anything runs.
    trainer = make_trainer()
    loss = LossConfig(type="gmpo", importance_correction=CorrectionConfig())
    with pytest.raises(ConfigError, match=r"update.old_logprobs = 'recompute'\n.*GMPO has one ratio per sequence"):
        Trainer(trainer.arena, trainer.policies, trainer.config.model_copy(update={"loss": loss}))


@pytest.mark.parametrize("plain", [True, False])
async def test_hooks_run_around_training_also_on_failure(make_trainer, plain):
    trainer = make_trainer(steps=1)
    calls = []

    async def later(name):
        calls.append(name)

    note = calls.append if plain else later
    trainer.arena.on_train_start = lambda: note("start")
    trainer.arena.on_train_end = lambda: note("end")
    trainer.arena.source = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await trainer.run()
    assert calls == ["start", "end"]


def test_an_arena_with_a_step_of_its_own_is_refused(make_trainer):
    """Training never calls it, and a researcher would look for long why nothing of it shows."""
    trainer = make_trainer()

    class Own(type(trainer.arena)):
        async def step(self, concurrency=None):
            raise NotImplementedError

    trainer.arena.__class__ = Own
    with pytest.raises(TypeError, match=r"arena=Own: training never calls step\(\), .* it calls sample\(\)"):
        Trainer(trainer.arena, trainer.policies, trainer.config)

    class Stage(Own):
        step = Arena.step

        async def sample(self, drawn=lambda: None):
            return await super().sample(drawn)

    trainer.arena.__class__ = Stage
    Trainer(trainer.arena, trainer.policies, trainer.config)
    trainer.arena.step = trainer.arena.sample
    with pytest.raises(TypeError, match=r"never calls step\(\)"):
        Trainer(trainer.arena, trainer.policies, trainer.config)


@pytest.mark.parametrize("in_a_file", [False, True])
async def test_what_a_hook_puts_into_a_store_stands_there_once_however_often_a_run_resumes(
    make_trainer, tmp_path, in_a_file
):
    def with_store(steps):
        trainer = make_trainer(steps=steps)
        path = tmp_path / "questions.db" if in_a_file else None
        store = trainer.arena.add_store(ArtifactStore("questions", path=path))

        async def fill():
            store.add("seed question")

        trainer.arena.on_train_start = fill
        return trainer, store

    for steps in (1, 2, 3):
        trainer, store = with_store(steps)
        await trainer.run()
        assert [artifact.data for artifact in store] == ["seed question"]
        store.close()


async def test_empty_batch_trains_nothing_and_goes_on(make_trainer):
    trainer = make_trainer(steps=2)
    trainer.arena.source = list
    before = weights_of(trainer)
    await trainer.run()
    assert [line["samples"] for line in lines_of(trainer.config.run_dir)] == [0, 0]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trainer).items())


async def validate(make_trainer, curve, name="run", **settings):
    """Run with the success ``curve[k]`` at the validation after step ``k``."""
    trainer = make_trainer(name, **settings)

    async def evaluation():
        return Evaluation(curve[trainer.progress.step], 0, 1, 1, 0, 0, {})

    trainer.evaluate = evaluation
    return trainer, (await trainer.run()).step


async def test_stops_at_success_and_at_time(make_trainer):
    growing = [step / 8 for step in range(9)]
    reached, step = await validate(make_trainer, growing, steps=9, eval={"every": 2, "target_success": 0.5})
    assert step == 6, "success held once more"
    lines = lines_of(reached.config.run_dir)
    validated = [(line["step"], line["validation"]) for line in lines if "validation" in line]
    assert validated == [(0, 0.0), (2, 0.25), (4, 0.5), (6, 0.75)]
    assert (await make_trainer("late", steps=5, max_seconds=1e-9).run()).step == 1


async def test_stops_when_no_validation_is_better_also_after_a_resume(make_trainer):
    curve, patient = [0.1, 0.4, 0.2, 0.4, 0.9, 1.0], {"eval": {"every": 1, "patience": 2}}
    for name, steps, reached in (("whole", 5, 3), ("parts", 2, 2), ("parts", 5, 3)):
        trainer, step = await validate(make_trainer, curve, name, steps=steps, **patient)
        assert step == reached, "what was validated before counts"
    validated = [line["step"] for line in lines_of(trainer.config.run_dir) if "validation" in line]
    assert validated == [0, 1, 2, 3], "each once"


@pytest.mark.parametrize("keep_best", [True, False])
@pytest.mark.parametrize("failing", [0, 2, 4])
async def test_a_validation_that_failed_and_was_repeated_is_saved_once(make_trainer, failing, keep_best):
    curve, made = [0.1, 0.2, 0.3, 0.2, 0.1], []
    settings = {"steps": 4, "eval": {"every": 2}, "checkpoint": {"keep_best": keep_best, "every": 2}}
    curve[failing] = 0.9
    for fails in (True, False, False):
        trainer = make_trainer(**settings)

        async def evaluation(trainer=trainer, fails=fails):
            if fails and trainer.progress.step == failing:
                raise FloatingPointError("the judge is down")
            made.append(trainer.progress.step)
            return Evaluation(curve[trainer.progress.step], 0, 1, 1, 0, 0, {})

        trainer.evaluate = evaluation
        with pytest.raises(FloatingPointError) if fails else nullcontext():
            await trainer.run()
    assert sorted(made) == [0, 2, 4], "each once, by three runs"
    validated = {line["step"]: line["validation"] for line in lines_of(trainer.config.run_dir) if "validation" in line}
    assert validated == {0: curve[0], 2: curve[2], 4: curve[4]}
    assert trainer.progress.best_step == failing
    if keep_best or failing:
        assert find_checkpoint(trainer.checkpoints, "best") == checkpoint_at(trainer.checkpoints, failing)


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (None, "success"),
        (TreeSampler(4, "best"), "success_selected"),
        (TreeSampler({"second": 4}, "sample"), "success_selected"),
        (TreeSampler(4, lambda steps, rng: 1), "success_selected"),
        (TreeSampler(4, beam_width=2), "success_selected"),
        (TreeSampler(4, "first"), "success"),
        (TreeSampler(4, "none"), "success"),
    ],
)
async def test_success_of_the_best_of_n_has_a_name_of_its_own(make_trainer, sampler, name):
    """A tree that selects by reward plays better than its policies do alone; what they reach alone stands beside it."""
    trainer = make_trainer(steps=1, eval={"every": 1})
    trainer.arena.episodes["letters"].sampler = sampler
    trainer.arena.filters = Filters(drop_zero_advantage=False)
    await trainer.run()
    row = lines_of(trainer.config.run_dir)[-1]
    assert row[name] == row["metric/success/first"] and 0 <= row["validation"] <= 1
    assert {"success", "success_selected"} & set(row) == {name}


@pytest.mark.parametrize(("curve", "kept"), [([0.1, 0.4, 0.2, 0.3, 0.4], [1, 4]), ([0.5, 0.4, 0.2, 0.3, 0.4], [0, 4])])
async def test_the_best_checkpoint_stays(make_trainer, curve, kept):
    settings = {"eval": {"every": 1}, "checkpoint": {"keep_best": True, "keep_last": 1}}
    trainer, _ = await validate(make_trainer, curve, steps=4, **settings)
    assert [int(path.name.removeprefix("step_")) for path in list_checkpoints(trainer.checkpoints)] == kept


async def test_one_of_two_policies_trains(make_two_policies):
    whole = make_two_policies("whole", steps=3)
    loads, load = [], whole.arena.client.load_weights
    whole.arena.client.load_weights = lambda name, *rest: (loads.append(name), load(name, *rest))
    start = {name: policy.fingerprint() for name, policy in whole.policies.items()}
    await whole.run()
    assert whole.policies["learner"].fingerprint() != start["learner"]
    assert whole.policies["rival"].fingerprint() == start["rival"]
    assert (whole.policies["learner"].version, whole.policies["rival"].version) == (3, 0)
    assert (whole.arena.client.version("learner"), whole.arena.client.version("rival")) == (3, 0)
    assert loads.count("learner") == 4 and loads.count("rival") == 1, "weights travel when they changed"
    assert {"learner/loss", "step_reward/first", "step_reward/second"} <= set(lines_of(whole.config.run_dir)[-1])


async def test_an_update_that_touches_a_frozen_policy_is_a_broken_invariant(make_two_policies):
    trainer = make_two_policies("shared", steps=1)
    trainer.policies["rival"].model = trainer.policies["learner"].model
    with pytest.raises(AssertionError, match=r"changed the weights of \['rival'\]"):
        trainer.update_policies(await trainer.arena.step())


async def test_a_step_whose_updates_were_all_skipped_makes_no_new_version(make_trainer, capsys):
    trainer = make_trainer(update={"max_nonfinite_updates": 9})
    await trainer.sync_weights()
    batch = await trainer.arena.step()
    batch.target_logprobs[:] = float("nan")
    metrics = trainer.update_policies(batch)
    assert (metrics["default/updates"], metrics["default/skipped_updates"]) == (0, 1)
    policy = trainer.policies["default"]
    assert (policy.version, policy.skipped) == (0, 1)
    assert "changed no weight" not in capsys.readouterr().out


async def test_weights_that_are_not_finite_reach_no_client(make_trainer):
    """Neither those of an update that overflowed, nor those of a checkpoint: the client keeps what it had."""
    trainer = make_trainer(steps=3, checkpoint={"every": 1})
    policy, update = trainer.policies["default"], trainer.update_policies

    def poisoned(batch):
        metrics = update(batch)
        if policy.version == 2:
            next(iter(policy.model.parameters())).data[0, 0] = float("inf")
        return metrics

    trainer.update_policies = poisoned
    told = "policy 'default': weight 'model.embed_tokens.weight' is not finite at version {}, so it is not published"
    with pytest.raises(FloatingPointError, match=told.format(2)):
        await trainer.run()
    assert trainer.arena.client.version("default") == 1 and trainer.progress.step == 2
    assert list_checkpoints(trainer.checkpoints)[-1].name.endswith("1"), "the last good one"
    trainer.save()
    (trainer.config.run_dir / "metrics.jsonl").write_text("")
    trainer.progress.step = 5
    trainer.save()
    with pytest.raises(FloatingPointError, match=told.format(2)):
        await make_trainer(steps=9).run()


async def test_damaged_checkpoint_names_the_one_before(make_trainer):
    trainer = make_trainer("damaged", steps=2, checkpoint={"every": 1})
    await trainer.run()
    older, newest = list_checkpoints(trainer.checkpoints)
    (newest / "rng.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=f"rng.safetensors is damaged.*delete .*{newest.name} to go on .*{older.name}"
    ):
        await make_trainer("damaged", steps=3).run()


async def test_an_opponent_that_nobody_trains_needs_no_policy(make_trainer):
    made = make_trainer(steps=1)
    fixed = ScriptedClient(lambda request: "1", versions={"api": 0})
    client = RoutingClient({"default": made.arena.client, "api": fixed})
    made.arena.client = client
    made.arena.add_actor(Actor("opponent", policy="api"))
    with pytest.raises(ValueError, match="'opponent' plays with policy 'api'"):
        Trainer(made.arena, made.policies, made.config, validation=made.validation)

    class Api(ScriptedClient):
        capabilities = ClientCapabilities(fixed_policies=frozenset({"api"}))

    client.clients["api"] = fixed = Api(lambda request: "1", versions={"api": 0})
    trainer = Trainer(made.arena, made.policies, made.config, validation=made.validation)
    await trainer.run()
    assert (trainer.progress.step, client.version("default")) == (1, 1)
    assert fixed.loads == []
