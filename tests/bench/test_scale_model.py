"""The throughput model of ``bench/scale``: the design's table, its bounds, memory, the search, and the fit to a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from scale.constants import DESIGN, GPUS, Constants
from scale.formula import Split, one_by_one_seconds, predict, sync_seconds
from scale.memory import cache_bytes, fewest_ranks, most_slots, training_bytes
from scale.refit import refit, split_of
from scale.search import EQUAL, NothingFits, search, smallest_cluster
from scale.workload import Workload, workload_of

from turnwise.run.models import ModelSize
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor

H100 = GPUS["h100"]
MODELS = {
    "7B": ModelSize(7e9, 57_344, 28, 4),
    "32B": ModelSize(32e9, 262_144, 40, 8),
    "70B": ModelSize(70e9, 327_680, 64, 8),
}


def workload(model="7B", **changes):
    return replace(Workload(MODELS[model], 1024, 16, 1024, 4096), **changes)


@pytest.mark.parametrize(
    ("model", "gpus", "tensor_parallel", "engines", "row", "one_by_one"),
    [
        ("7B", 64, 1, 38, ("345", "365", "2.9", "366", "1.00"), ("64", "0.85")),
        ("7B", 1024, 1, 614, ("21", "23", "2.9", "24", "0.97"), ("1042", "0.02")),
        ("32B", 1024, 2, 307, ("86", "106", "9.9", "107", "0.97"), ("4763", "0.02")),
        ("70B", 1024, 4, 153, ("153", "232", "19", "235", "0.97"), ("10385", "0.02")),
    ],
)
def test_the_designs_table(model, gpus, tensor_parallel, engines, row, one_by_one):
    """Sampling, training, sync, step, efficiency against 64 GPUs; then seconds and efficiency of one sender."""
    work = workload(model)

    def of(gpus):
        split = Split.of_share(gpus, 0.6, tensor_parallel)
        return split, predict(work, split, H100, DESIGN)

    (split, found), (_, base) = of(gpus), of(64)
    efficiency = base.step * 64 / (found.step * gpus)
    sync = f"{found.sync:.1f}" if found.sync < 10 else f"{found.sync:.0f}"
    assert split.engines == engines
    assert (f"{found.sampling:.0f}", f"{found.training:.0f}", sync, f"{found.step:.0f}", f"{efficiency:.2f}") == row
    alone = one_by_one_seconds(work, split, DESIGN)
    late = base.step * 64 / ((max(found.sampling, found.training) + alone) * gpus)
    assert (f"{alone:.0f}", f"{late:.2f}") == one_by_one


def test_one_batch_ahead_is_bound_by_the_latency_of_a_batch():
    """All numbers by hand: 2 rows on one engine, which takes 2 s for a token of each; 10 tokens; training takes 3 s."""
    model = ModelSize(parameters=1e9, kv_bytes=1e-9, heads=1, kv_heads=1)
    work = Workload(model, groups=2, group_size=1, prompt=1, response=10)
    c = Constants()
    plain = replace(
        c,
        tail=c.tail.measured(1, ""),
        token_overhead=c.token_overhead.measured(2 - 2e9 / H100.memory_bandwidth, ""),
        decode_flops_share=c.decode_flops_share.measured(1e9, ""),
        train_flops_share=c.train_flops_share.measured(8 * 1e9 * 22 * 0.7 / (3 * H100.flops), ""),
        sync_scale=c.sync_scale.measured(0, ""),
    )
    for ahead, step in ((0, 23), (1, 11.5), (2, 23 / 3), (9, 3)):
        split = Split(engines=20, tensor_parallel=1, training=1, slots=4, max_staleness=ahead)
        assert predict(work, split, H100, plain).step == pytest.approx(step, rel=1e-6), ahead


def test_bytes_of_a_gpu_and_of_an_adapter():
    adapter = replace(workload(), model=replace(MODELS["70B"], adapter_parameters=2e8))
    assert sync_seconds(adapter, 4, DESIGN) == pytest.approx(4e8 / 8.25e9 + 4e8 / (4 * 20e9) + 0.5)
    assert fewest_ranks(adapter, H100, Constants()) == 3  # (140 + 3.2) GB over 70 GB each
    assert fewest_ranks(workload("70B"), H100, Constants()) == 16  # 1120 GB over 70 GB each
    # Bytes of a GPU.
    assert training_bytes(workload("7B", reference=True), 4, Constants()) == pytest.approx(18 * 7e9 / 4 + 10e9)
    assert cache_bytes(workload("7B"), 2, 10) == 10 * 3072 * 57_344 / 2
    assert cache_bytes(workload("7B"), 8, 10) == 10 * 3072 * 57_344 / 4, "4 heads of keys have no more than 4 parts"
    assert cache_bytes(workload("7B"), 1, 1, full_length=True) == 5120 * 57_344
    assert most_slots(workload("7B"), 1, H100, Constants()) == int((72e9 - 14e9) / (3072 * 57_344))
    assert most_slots(workload("70B"), 1, H100, Constants()) < 1


@pytest.mark.parametrize("model", ["7B", "32B"])
def test_the_search_finds_what_trying_all_splits_finds(model):
    work, gpus, constants = workload(model), 12, Constants()
    ranks = fewest_ranks(work, H100, constants)
    best = 0.0
    for tp in (1, 2, 4, 8):
        for engines in range(1, (gpus - ranks) // tp + 1):
            for slots in (8, 16, 32, 64, 128, 256, 512):
                if slots <= most_slots(work, tp, H100, constants) and work.model.heads % tp == 0:
                    for ahead in range(3):
                        split = Split(engines, tp, gpus - engines * tp, slots, ahead)
                        best = max(best, predict(work, split, H100, constants).tokens_per_second)
    plans = search(work, gpus, H100, constants, staleness=range(3))
    assert (1 - EQUAL) * best <= plans[0].predicted.tokens_per_second <= best
    assert 1 < len(plans) <= 3 and all(plan.split.gpus <= gpus for plan in plans)
    assert len({(plan.split.tensor_parallel, plan.split.max_staleness) for plan in plans}) == len(plans)


def test_the_least_staleness_and_the_smallest_cluster():
    """At 64 GPUs one batch ahead is as fast as four."""
    assert search(workload(), 64, H100, Constants())[0].split.max_staleness == 1
    # The smallest cluster that fits.
    count, plan = smallest_cluster(workload("70B"), 64, H100, Constants())
    assert plan == search(workload("70B"), count, H100, Constants())[0]
    with pytest.raises(NothingFits):
        search(workload("70B"), count // 2, H100, Constants())
    assert smallest_cluster(workload("70B"), 20, H100, Constants())[0] == 20
    with pytest.raises(NothingFits):
        smallest_cluster(workload("70B"), 16, H100, Constants())


@pytest.mark.parametrize(
    ("model", "gpus", "message"),
    [
        ("70B", 16, "need 16 of h100 to train, and engines need at least 1 more"),
        ("70B", 17, r"no engine fits beside 16 training GPUs: tensor_parallel=1: 140.0 GB of weights and 8 rows don't"),
        ("7B", 1, "gpus=1: expected at least 2"),
    ],
)
def test_a_cluster_that_is_too_small_says_why(model, gpus, message):
    with pytest.raises(ValueError, match=message):
        search(workload(model), gpus, H100, Constants())


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(["a few words"])
    return tokenizer, build_model(tokenizer)


def test_a_workload_from_a_config(tiny):
    config = config_from_dict(
        {
            "rollout": {"prompts_per_step": 6, "group_size": 4, "branches": 2, "max_tokens": 100},
            "update": {"ppo_epochs": 2, "old_logprobs": "recompute"},
            "loss": {"kl": {"coef": 0.1}},
            "policies": {"default": {"gradient_checkpointing": True}},
        }
    )
    actors = [Actor("a"), Actor("b", max_tokens=50)]
    work, sources = workload_of(config, lambda: tiny, actors)
    assert (work.groups, work.group_size, work.response, work.calls, work.prompt) == (6, 8, 75, 2, 1024)
    assert work.longest == 100
    assert work.train_flops == 2 * (2 + 4 + 2) + 2 + 2 and work.reference
    assert sources["response"] == "assumed: each completion reaches its limit"
    work, sources = workload_of(config, lambda: tiny, actors, prompt=10, response=20, calls=3)
    assert (work.prompt, work.response, work.calls, set(sources.values())) == (10, 20, 3, {"given"})
    assert work.rows == 6 * 8 * 3 and work.sampled_tokens == 6 * 8 * 3 * 20
    with pytest.raises(ValueError, match="prompt=0: expected a number > 0"):
        workload_of(config, lambda: tiny, prompt=0)


# ---------------------------------------------------------------------------------------------------------------------
# The fit
# ---------------------------------------------------------------------------------------------------------------------
POOL = {
    "cluster": {
        "learner": {"count": 26},
        "engines": {"main": {"count": 38, "options": {"max_num_seqs": 128}}},
    },
    "loop": {"max_staleness": 4},
}


def write_run(folder, rows, calls=()):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows)))
    if calls:
        rollout = {"step": 1, "steps": calls, "children": []}
        (folder / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    return folder


def test_a_fit_returns_the_constants_that_made_the_metrics(tmp_path):
    c = Constants()
    true = replace(
        c,
        sampling_efficiency=c.sampling_efficiency.measured(0.6, ""),
        train_flops_share=c.train_flops_share.measured(0.25, ""),
        unique_token_share=c.unique_token_share.measured(0.5, ""),
        sync_scale=c.sync_scale.measured(3.0, ""),
        tail=c.tail.measured(1.0, ""),
    )
    split = split_of(config_from_dict(POOL))
    found = predict(workload(calls=2), split, H100, true)
    row = {
        "seconds_update": found.training + found.sync,
        "inference/sync_seconds": 38 * found.sync,  # a pool adds up its engines
        "inference/tokens_per_second": 2 * 16384 * 4096 / (38 * found.sampling),
        "unique_token_share": 0.5,
        "sampled_tokens": 16384 * 4096 * 2,
    }
    calls = [{"prompt_token_ids": [1] * 1024, "completion_token_ids": [1] * 4096}]
    run = write_run(tmp_path / "run", [{**row, "seconds_update": 1e9}, row, row], calls)
    fit = refit(run, config_from_dict(POOL), workload(), H100, c)
    for name, constant in true.rows():
        assert getattr(fit.constants, name) == pytest.approx(constant), name
    assert fit.constants.sync_scale.mark == "measured" and fit.constants.sync_scale.source == str(run)
    assert fit.constants.load_bandwidth.mark == "assumed" and not fit.kept
    assert (fit.workload.prompt, fit.workload.response, fit.workload.calls) == (1024, 4096, 2)
    assert any(line.startswith("train_flops_share 0.35 -> 0.25: ") for line in fit.changed)


def test_a_fit_says_what_the_run_does_not_tell(tmp_path):
    run = write_run(tmp_path / "run", [{"seconds_update": 2.0, "seconds_rollout": 3.0, "sampled_tokens": 60}])
    fit = refit(run, config_from_dict({}), workload(), H100, Constants())
    assert [line.partition(":")[0] for line in fit.kept] == ["prompt, response, calls", "sync_scale"]
    assert fit.workload == workload() and fit.constants.sync_scale.mark == "assumed"
    assert any("20 tokens/s of an engine" in line for line in fit.changed)
    # A folder without steps is refused.
    with pytest.raises(FileNotFoundError):
        refit(tmp_path, config_from_dict({}), workload(), H100, Constants())
    with pytest.raises(ValueError, match="expected a run with a trained step"):
        refit(write_run(tmp_path, [{"validation": 1.0}]), config_from_dict({}), workload(), H100, Constants())


def test_the_split_of_a_config():
    assert split_of(config_from_dict(POOL)) == Split(38, 1, 26, 128, 4)
    wide = {"cluster": {"engines": {"main": {"gpus": 4, "count": 2}}, "learner": {"count": 8}}}
    assert split_of(config_from_dict(wide), 16) == Split(2, 4, 8, 256, 0)
    with pytest.raises(ValueError, match="take 16 GPUs: expected at most --gpus 8"):
        split_of(config_from_dict(wide), 8)
    with pytest.raises(ValueError, match=r"2 pools \(a, b\): expected one"):
        split_of(config_from_dict({"cluster": {"engines": {"a": {}, "b": {}}}}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split(0, 1, 1), "engines=0: expected at least 1"),
        (lambda: Split(1, 1, 1, max_staleness=-1), "max_staleness=-1: expected a count"),
        (lambda: workload(groups=0), "groups=0: expected a number > 0"),
        (lambda: workload(longest=10), "longest=10: expected at least the mean completion, response=4096"),
    ],
)
def test_impossible_numbers_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
