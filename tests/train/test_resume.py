"""However a run ends, the one that goes on in its folder ends as a run that was left alone, bit for bit."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from turnwise.arena import ArtifactStore
from turnwise.arena.stages.curriculum import Curriculum, CurriculumStage
from turnwise.credit import RAECredit
from turnwise.samples.pack import select
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.resume_queue import QUEUE
from turnwise.types import EpisodeRequest

from ..trained import equal, lines_of, notes_of, weights_of
from .conftest import letters_trainer

STEPS = 5


class KilledError(Exception):
    """Nothing catches it, as nothing catches a kill."""


# ---- what a run has that must come back ------------------------------------------------------------------------------
def drawing(trainer, folder):
    """Questions come from a global generator, which a resumed run must put back; RAE's baselines too."""
    trainer.arena.source = lambda: [EpisodeRequest("letters", f"{random.random():.4f}") for _ in range(3)]
    trainer.arena.credit = RAECredit()


def storing(trainer, folder):
    """Questions come from a store in a file, which each batch adds to, in the middle of play."""
    path = folder.with_suffix(".db")
    store = trainer.arena.add_store(ArtifactStore("q", path=path, sampling="prioritized", max_size=9, seed=2))
    episode = trainer.arena.episodes["letters"]

    class Writing(type(episode)):
        def setup(self, state, arena, artifact):
            if not arena.is_evaluation:
                arena.stores["q"].add(f"made of {artifact.id}", parents=[artifact.id])
            return super().setup(state, arena, artifact)

        def build_messages(self, state, arena, artifact):
            return [{"role": "user", "content": f"{getattr(artifact, 'data', artifact)}"[-8:]}]

    def draw():
        if not len(store):
            for number in range(3):
                store.add(f"question {number}")
        return [EpisodeRequest("letters", question) for question in store.sample(2)]

    episode.__class__ = Writing
    trainer.arena.source = draw


def learning(trainer, folder):
    """Questions come from a curriculum, which learns from each batch."""
    arena, pool = trainer.arena, [EpisodeRequest("letters", f"q{n}", group_id=n) for n in range(6)]
    ahead = trainer.config.loop.max_staleness
    arena.add_stage(CurriculumStage(Curriculum(pool, metric="success/first", uniform=0.01, window=2, ahead=ahead)))
    arena.source = lambda: arena.stages.questions(arena, arena.batches, 3, 1)
    arena.credit = RAECredit()


KL = {"coef": 0.5, "apply_to": "reward", "target": 1e-4, "horizon": 30, "refresh_every": 2}
ADAPTIVE = {"kl": KL, "entropy_coef": 0.01, "entropy_target": 4.0, "entropy_step": 0.001}
UPDATE = {"lr": 3e-3, "num_minibatches": 2, "warmup": 3}
SETTINGS: dict[str, tuple[Callable[[Any, Any], None], dict[str, Any]]] = {
    "plain": (drawing, {"update": UPDATE}),
    "recomputed": (drawing, {"update": {**UPDATE, "old_logprobs": "recompute"}}),
    "kl": (drawing, {"loss": ADAPTIVE, "with_reference": True}),
    "critic": (drawing, {"loss": {"critic": {"lr": 0.01}}, "filter": {"drop_zero_advantage": False}}),
    "validated": (drawing, {"eval": {"every": 2}, "update": {**UPDATE, "min_lr_ratio": 0.1}}),
    "two policies": (drawing, {"policies": {"first": "learner", "second": "rival"}}),
    "one ahead": (drawing, {"loop": {"max_staleness": 1, "deterministic": True}}),
    "two ahead": (drawing, {"loop": {"max_staleness": 2, "deterministic": True}}),
    "two ahead, in any order": (drawing, {"loop": {"max_staleness": 2}}),
    "store": (storing, {}),
    "curriculum": (learning, {}),
    "curriculum two ahead": (learning, {"loop": {"max_staleness": 2, "deterministic": True}}),
}


# ---- how it ends -----------------------------------------------------------------------------------------------------
def early(trainer):
    trainer.config = trainer.config.model_copy(update={"steps": 2})


def at_the(draw: int, act: Callable[[Any], object]) -> Callable[[Any], None]:
    """Let ``act`` happen when questions are drawn for the ``draw``-th time."""

    def arrange(trainer):
        source, drawn = trainer.arena.source, []

        def draws():
            drawn.append(1)
            if len(drawn) == draw:
                act(trainer)
            return source()

        trainer.arena.source = draws

    return arrange


def killed(step: int, where: str) -> Callable[[Any], None]:
    """Die in ``where`` of a step without a word to anybody."""

    def arrange(trainer):
        done = getattr(trainer, where)

        def die(*arguments):
            if trainer.progress.step == step:
                trainer.stop_and_save = trainer.save = lambda **options: asyncio.sleep(0)
                raise KilledError
            return done(*arguments)

        setattr(trainer, where, die)

    return arrange


def failing(name: str) -> Callable[[Any], None]:
    def arrange(trainer):
        done = getattr(trainer, name)

        def fail(*arguments):
            if trainer.progress.step == 2:
                raise FloatingPointError("no number")
            return done(*arguments)

        setattr(trainer, name, fail)

    return arrange


class Ending(NamedTuple):
    arrange: Callable[[Any], None]
    error: type[BaseException] | None
    every: int = 0
    step: int | None = None
    """That of the newest checkpoint, where all runs have it."""


ENDINGS = {
    "its steps are done": Ending(early, None, step=2),
    "a rollout fails": Ending(at_the(3, lambda trainer: 1 / 0), ZeroDivisionError),
    "Ctrl-C while it samples": Ending(
        at_the(2, lambda trainer: asyncio.get_running_loop().call_soon(trainer._stop.request)), None
    ),
    "an update fails": Ending(failing("update_policies"), FloatingPointError, every=1, step=2),
    "a validation fails": Ending(failing("evaluate"), FloatingPointError, step=2),
    "killed in the first update": Ending(killed(0, "update"), KilledError, every=1, step=0),
    "killed before the first save": Ending(killed(1, "update"), KilledError, every=2, step=0),
    "killed in an update": Ending(killed(3, "update"), KilledError, every=1, step=3),
    "killed before a rollout": Ending(killed(1, "start_rollouts"), KilledError, every=2),
}
AHEAD = ("Ctrl-C while it samples", "an update fails", "killed in an update", "a rollout fails")
CASES = [
    *(("plain", name) for name in ENDINGS if name != "a validation fails"),
    ("validated", "a validation fails"),
    *(("two ahead", name) for name in ("its steps are done", *AHEAD[:3])),
    *(("two ahead, in any order", name) for name in ("a rollout fails", "an update fails")),
    *((name, "its steps are done") for name in ("recomputed", "kl", "critic", "two policies", "one ahead")),
    *(("store", name) for name in ENDINGS if name.startswith("killed")),
    *(("curriculum", name) for name in ("its steps are done", "an update fails", "killed in an update")),
    *(("curriculum two ahead", name) for name in ("its steps are done", *AHEAD[:3])),
]


def made(folder, setting, **changes):
    attach, settings = SETTINGS[setting]
    trainer = letters_trainer(folder, STEPS, **settings, **changes)
    attach(trainer, folder)
    return trainer


def watch(trainer):
    """The ids of the rollouts of each batch that trains, of which none may be too old."""
    trained, update = [], trainer.update_policies

    def watched(batch):
        measured = update(batch)
        trained.append([result.rollout.id for result in trainer.arena.last_results])
        assert batch.metrics["staleness_max"] <= trainer.config.loop.max_staleness and not batch.dropped.get("stale")
        return measured

    trainer.update_policies = watched
    return trained


def left_by(trainer):
    """All that a run leaves."""
    stores = {
        name: [(a.id, a.data, a.source, a.parents, store.outcome(a.id)) for a in store]
        for name, store in trainer.arena.stores.items()
    }
    state = getattr(trainer.arena.credit, "state_dict", dict)()
    state = {**state, "stages": trainer.arena.stages.state_dict()}
    policies = {name: (policy.extra_state(), policy.version) for name, policy in trainer.policies.items()}
    weights = {name: weights_of(trainer, name) for name in trainer.policies}
    return lines_of(trainer.config.run_dir), stores, state, policies, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """``await whole(setting)``: what a run leaves that was left alone."""
    found = {}

    async def get(setting):
        if setting not in found:
            random.seed(5)
            trainer = made(tmp_path_factory.mktemp("whole") / "run", setting)
            await trainer.run()
            await trainer.arena.client.close()
            found[setting] = left_by(trainer)
        return found[setting]

    return get


# Others find the same faults: of a kill, and of how sampling ahead ends.
SLOW = {("plain", "killed in the first update"), ("plain", "killed before a rollout"), ("store", "killed in an update")}


@pytest.mark.parametrize(
    ("setting", "ending"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW or "any" in case[0])) for case in CASES],
)
async def test_a_resumed_run_equals_one_left_alone(whole, tmp_path, setting, ending):
    expected, end = await whole(setting), ENDINGS[ending]
    random.seed(5)
    first = made(tmp_path / "run", setting, checkpoint={"every": end.every, "keep_last": 9})
    trained = watch(first)
    end.arrange(first)
    if end.error is None:
        await first.run()
    else:
        with pytest.raises(end.error):
            await first.run()
    await first.arena.client.close()
    await asyncio.sleep(0)  # what was cancelled ends
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == [], "nothing runs on"
    for store in first.arena.stores.values():
        store.close()
    newest = list_checkpoints(first.checkpoints)[-1]
    done = int(newest.name.removeprefix("step_"))
    assert done == (done if end.step is None else end.step) < STEPS
    assert (newest / QUEUE).exists() <= ("ahead" in setting)

    random.seed(6)
    second = made(tmp_path / "run", setting)
    more, notes = watch(second), notes_of(second)
    await second.run()
    if setting != "store":
        assert trained[:done] + more == [[f"e{3 * step + i}" for i in range(3)] for step in range(STEPS)]
    logged = len(trained) - done if ending == "killed before the first save" else 0
    assert any(f"dropped the records of {logged} later steps" in note for note in notes) == bool(logged)
    if setting == "two ahead, in any order":
        return
    lines, *states, weights = left_by(second)
    assert lines == expected[0] and states == list(expected[1:-1])
    assert all(equal(weights[name], expected[-1][name]) for name in weights)


async def test_the_runs_above_have_something_to_lose(whole):
    lines, _, _, policies, _ = await whole("kl")
    assert policies["default"][0] != 0.5 and all(line["default/updates"] for line in lines)
    lines, _, state, *_ = await whole("two ahead")
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 2, 2] and state["baselines"]
    _, stores, *_ = await whole("store")
    lines, _, state, *_ = await whole("curriculum two ahead")
    assert [line["curriculum/seen"] for line in lines][-1] == 6 and "curriculum/drawn_p" in lines[-1]
    state = state["stages"]["curriculum"]
    assert len(state["recent"]) == 3 and all(p < 1 for *_, p in state["questions"])
    assert len(stores["q"]) == 9 and sum(outcome.attempts for *_, outcome in stores["q"]) > 0
    assert [line["step"] for line in (await whole("validated"))[0]] == list(range(STEPS + 1))


async def test_a_log_ahead_of_the_checkpoint_loses_its_later_lines(whole, tmp_path):
    """Its last line may be cut off. Each step is written once all the same."""
    random.seed(5)
    first = made(tmp_path / "run", "plain", checkpoint={"every": 2, "keep_last": 5})
    first.config = first.config.model_copy(update={"steps": 3})
    await first.run()
    newest = list_checkpoints(first.checkpoints)[-1]
    assert newest.name.endswith("3")
    (newest / "manifest.json").unlink()  # as if the run had been killed while it wrote
    with (first.config.run_dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "los')
    second = made(tmp_path / "run", "plain")
    await second.run()
    assert lines_of(second.config.run_dir) == (await whole("plain"))[0]


def packing(trainer, *, killed_at=None, tied=()):
    """Kill the run when it has sampled the step after ``killed_at``; no row of the steps ``tied`` trains."""
    pack = trainer.arena.assign_credit_and_pack

    def packed(results):
        if trainer.progress.step == killed_at:
            raise KilledError
        batch = pack(results)
        return select(batch, []) if trainer.progress.step in tied else batch

    trainer.arena.assign_credit_and_pack = packed


async def test_the_rate_falls_with_the_sampled_tokens_of_a_run_that_they_end(make_trainer):
    update = {"lr": 1e-3, "num_minibatches": 2, "min_lr_ratio": 0.1, "schedule": "linear"}
    options = {"steps": 100_000, "max_sampled_tokens": 500, "update": update}
    trainers = [make_trainer(name, **options) for name in ("whole", "parts", "parts")]
    packing(trainers[1], killed_at=2)
    for trainer in trainers:
        with pytest.raises(KilledError) if trainer is trainers[1] else nullcontext():
            await trainer.run()
    lines = lines_of(trainers[0].config.run_dir)
    sampled = [0, *(line["total_sampled_tokens"] for line in lines)]
    expected = [1e-3 * (0.1 + 0.9 * (1 - min(1, so_far / 500))) for so_far in sampled[:-1]]
    assert len(lines) >= 3 and [line["default/learning_rate"] for line in lines] == pytest.approx(expected)
    assert lines_of(trainers[2].config.run_dir) == lines


FALLING = {"lr": 1e-3, "min_lr_ratio": 0.1, "schedule": "linear"}
PLACES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "a step, an update": ({"update": {**FALLING, "num_minibatches": 1}}, [0, 1, 2, 3, 4, 5]),
    "epochs and minibatches": ({"update": {**FALLING, "ppo_epochs": 2, "num_minibatches": 2}}, [0, 1, 2, 3, 4, 5]),
    "asynchronous": ({"update": FALLING, "loop": {"max_staleness": 1}}, [0, 1, 2, 3, 4, 5]),
    "a policy of some phases": (
        {
            "update": FALLING,
            "phases": [{"train": ["learner"], "steps": 2}, {"train": ["rival"], "steps": 1}],
            "policies": {"learner": {}, "rival": {}},
        },
        [0, 1.5, 3, 4.5],
    ),
}
"""Places of the steps, of six, that a policy trains in: its config, and the steps that its rate belongs to."""


@pytest.mark.parametrize("tied", [(), (0, 1, 3)], ids=["all train", "steps are tied"])
@pytest.mark.parametrize("case", PLACES)
async def test_the_rate_falls_with_the_steps_of_the_run_whether_they_have_updates_or_not(tmp_path, case, tied):
    changes, places = PLACES[case]
    changes = {**changes}
    named = {"policies": {"first": "learner", "second": "rival"}} if changes.pop("policies", None) else {}
    for killed_at in (4, None):  # the second one goes on in the folder of the first one
        trainer = letters_trainer(tmp_path / "run", 6, **named, **changes)
        packing(trainer, killed_at=killed_at, tied=tied)
        with nullcontext() if killed_at is None else pytest.raises(KilledError):
            await trainer.run()
    lines = lines_of(tmp_path / "run")
    rates = {line["step"] - 1: line[key] for line in lines for key in line if key.endswith("learning_rate")}
    trained = [step for step in range(6) if named == {} or step % 3 < 2]
    expected = {step: 1e-3 * (1 - 0.9 * place / 6) for step, place in zip(trained, places, strict=True)}
    assert rates == pytest.approx({step: rate for step, rate in expected.items() if step not in tied})


async def test_a_run_killed_within_its_trees_goes_on_there(make_trainer):
    def trainer_of(run, die_at):
        trainer = make_trainer(run, steps=2, checkpoint={"save_running_episodes": True})
        trainer.arena.episodes["letters"].max_turns = 4
        generate, calls = trainer.arena.client.generate, []

        async def counted(*args, **kwargs):
            calls.append(1)
            if len(calls) == die_at:
                running.cancel()
            return await generate(*args, **kwargs)

        trainer.arena.client.generate = counted
        return trainer, calls

    whole, all_calls = trainer_of("whole", die_at=0)
    await whole.run()
    first, _ = trainer_of("killed", die_at=len(all_calls) * 3 // 4)
    running = asyncio.create_task(first.run())
    with pytest.raises(asyncio.CancelledError):
        await running
    second, after = trainer_of("killed", die_at=0)
    await second.run()
    assert lines_of(second.config.run_dir) == lines_of(whole.config.run_dir)
    assert len(after) < len(all_calls) // 2, "not all of the second step is played again"


async def test_checkpoints_hold_a_revision_and_old_ones_are_forgotten(tmp_path):
    trainer = made(tmp_path / "run", "store", checkpoint={"every": 1, "keep_last": 2})
    await trainer.run()
    manifests = [trainer.checkpoints / f"step_0000000{step}" / "manifest.json" for step in (4, 5)]
    saved = [json.loads(path.read_text())["state"]["arena"]["stores"]["q"] for path in manifests]
    assert all("artifacts" not in state for state in saved) and saved[0]["revision"] < saved[1]["revision"]
    store = trainer.arena.stores["q"]
    with pytest.raises(ValueError, match="forgotten when newer checkpoints were saved"):
        store.load_state_dict({**saved[0], "revision": saved[0]["revision"] - 1})
    for state in reversed(saved):
        store.load_state_dict(state)


async def test_what_others_did_meanwhile_is_told(tmp_path):
    first = made(tmp_path / "run", "store", checkpoint={"minutes": 0})
    killed(0, "update")(first)
    with pytest.raises(KilledError):
        await first.run()
    first.arena.stores["q"].close()
    other = ArtifactStore("q", path=tmp_path / "run.db")
    other.add("theirs")
    other.close()
    second = made(tmp_path / "run", "store", checkpoint={"minutes": 0})
    early(second)
    told = r"1 changes by other runs .*; delete .*stores.json to begin with the store's present state"
    with pytest.raises(ValueError, match=told):
        await second.run()
    (second.config.run_dir / "stores.json").unlink()
    await second.run()
    assert second.progress.step == 2


async def test_stores_in_memory_leave_no_note(make_trainer):
    trainer = make_trainer(steps=1)
    trainer.arena.add_store("q").add("x")
    await trainer.run()
    assert not (trainer.config.run_dir / "stores.json").exists()
