"""Experts of a mixture: their weights in a replay by hand, the recorded choice, and mixtures that are refused."""

from __future__ import annotations

import base64
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from turnwise.arena.recording.lossless_json import decode, encode
from turnwise.arena.recording.rollouts_jsonl import jsonable
from turnwise.arena.runtime.model_call import check_response, to_step
from turnwise.inference import TransformersClient
from turnwise.inference.common.base import cut_at_stop
from turnwise.inference.common.experts import NO_RECORD, experts_from_text, experts_to_text
from turnwise.inference.common.routed_experts import _find_rule, _Hook, recording, replaying, watch_routers
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import ModelError, ModelRequest, RoutedExperts, Sampling

from .mixtures import KINDS, build

KNOWN = ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"]


def router_of(model) -> nn.Module:
    """The first router of ``model``, whose logits are its weights: its input is one number, 1."""
    return next(module for module in model.modules() if hasattr(module, "top_k") and hasattr(module, "num_experts"))


def routed(router, logits, ids):
    """The weights with which ``router`` takes the experts ``ids``, or those of its own choice, given ``logits``."""
    hidden = torch.zeros(1, router.weight.shape[1])
    hidden[0, 0] = 1
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor(logits)
    router.register_forward_hook(_Hook(0, _find_rule(router)))
    with replaying(torch.tensor([[ids]], dtype=torch.int16)):
        _, weights, chosen = router(hidden)
    return weights[0].tolist(), chosen[0].tolist()


def test_weights_by_a_softmax():
    logits = [math.log(share) for share in (5, 4, 3, 2, 1, 1)]
    router = router_of(build("qwen3_moe"))
    assert router.norm_topk_prob
    weights, chosen = routed(router, logits, [2, 0])
    assert chosen == [2, 0]
    assert weights == pytest.approx([3 / 8, 5 / 8])
    assert routed(router, logits, [NO_RECORD] * 2) == (pytest.approx([5 / 9, 4 / 9]), [0, 1])
    # Without the second normalisation, they are the shares of all 16.
    weights, _ = routed(router_of(build("qwen3_moe", norm_topk_prob=False)), logits, [2, 0])
    assert weights == pytest.approx([3 / 16, 5 / 16])
    # gpt-oss normalises over the chosen ones.
    router = router_of(build("gpt_oss"))
    with torch.no_grad():
        router.bias.zero_()
    assert routed(router, logits[:4], [2, 0])[0] == pytest.approx([3 / 8, 5 / 8])


def test_weights_by_sigmoids():
    """The bias counts in the choice, not in the weights: https://arxiv.org/abs/2412.19437, eq. 13 to 16."""
    router = router_of(build("deepseek_v3", n_group=1, norm_topk_prob=True, routed_scaling_factor=2.5))
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.tensor([0, 0, 9.0, 0, 0, 0, 0, 0]))
    logits = [0.0, math.log(4), -math.log(4), -9, -9, -9, -9, -9]  # sigmoids 0.5, 0.8, 0.2
    weights, chosen = routed(router, logits, [0, 1])
    assert chosen == [0, 1]
    assert weights == pytest.approx([2.5 * 0.5 / 1.3, 2.5 * 0.8 / 1.3])
    weights, chosen = routed(router, logits, [NO_RECORD] * 2)
    assert dict(zip(chosen, weights, strict=True)) == pytest.approx({2: 2.5 * 0.2, 1: 2.5 * 0.8})


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_of_its_own_choice_keeps_a_models_bits(kind, dtype):
    model, ids = build(kind, dtype), torch.arange(3, 40)[None] * 7 % 299
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        routers = watch_routers(model)
        assert routers == watch_routers(model), "hooks are added once"
        with recording(routers) as record:
            recorded = model(input_ids=ids, use_cache=False).logits
        experts = record.take()
        assert experts.shape == (37, 3, 2) and int(experts.max()) < routers.experts
        with replaying(experts.to(torch.int16)):
            again = model(input_ids=ids, use_cache=False).logits
        other = (experts.to(torch.int16) + 1) % routers.experts
        with replaying(other):
            different = model(input_ids=ids, use_cache=False).logits
        with recording(routers) as record, replaying(torch.full_like(other, NO_RECORD)):
            own = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(plain, recorded) and torch.equal(plain, again) and torch.equal(plain, own)
    assert not torch.allclose(plain, different, atol=0.05)
    if kind == "deepseek_v3":
        assert routers.of_layers == (1, 2) and not experts[:, 0].any(), "the first layer is dense"


def test_mixtures_of_other_kinds_are_refused():
    assert watch_routers(build("qwen3")) is None
    with pytest.raises(ValueError, match="PhimoeTopKRouter computes the weights of its experts by no known rule"):
        watch_routers(build("phimoe"))
    with pytest.raises(ValueError, match="GraniteMoeTopKRouter computes"):
        watch_routers(build("granitemoe"))
    model = build("qwen3_moe")
    del model.model.layers[1].mlp.gate.num_experts
    assert watch_routers(model).of_layers == (0, 2)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = None
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has num_experts = 6, but not one known router"):
        watch_routers(model)


def test_routers_are_found_before_their_weights_are_there():
    """As on the ranks of a sharded model, whose parameters have no memory."""
    assert watch_routers(build("deepseek_v3").to("meta")) == watch_routers(build("deepseek_v3"))


def test_a_wrong_record_is_an_error():
    routers = watch_routers(build("qwen3_moe"))
    routers.check(np.zeros((5, 3, 2), dtype=np.uint8), "row 3")
    with pytest.raises(ValueError, match=r"row 3: experts of shape \(5, 4, 2\): expected \[tokens, 3, 2\]"):
        routers.check(np.zeros((5, 4, 2), dtype=np.uint8), "row 3")
    with pytest.raises(
        ValueError, match=r"expected \[tokens, 3, 2\], as the model has 3 layers and 2 experts per token"
    ):
        routers.check(np.zeros((5, 3, 4), dtype=np.uint8), "row 3")
    with pytest.raises(ValueError, match="row 3: expert 6: expected one from 0 to 5"):
        routers.check(np.full((5, 3, 2), 6, dtype=np.uint8), "row 3")


def test_other_threads_keep_their_own_choice():
    model, ids, results = build("qwen3_moe"), torch.arange(3, 12)[None], []
    watch_routers(model)
    with torch.no_grad(), replaying(torch.zeros(9, 3, 2, dtype=torch.int16)):
        thread = threading.Thread(target=lambda: results.append(model(input_ids=ids).logits.detach()))
        thread.start()
        thread.join()
        here = model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(results[0], model(input_ids=ids).logits)
    assert not torch.allclose(results[0], here)


# -- the client --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
async def test_the_client_returns_the_experts_of_all_tokens_but_the_last(kind):
    model, rng = build(kind, torch.float64), np.random.default_rng(0)
    prompts = [rng.integers(1, 250, length).tolist() for length in (3, 7, 7, 12)]
    # Greedy siblings stay one node, and the others split early. Limits end rows at different steps.
    asked = [
        ModelRequest(prompt, Sampling(temperature, 2 + 3 * n, seed=n))
        for n, prompt in enumerate([*prompts, *prompts, *prompts])
        for temperature in (0.0, 1.0)
    ]
    async with TransformersClient(model, ByteTokenizer(), routed_experts=True) as client:
        responses = await client.generate(asked)
        [single] = await client.generate([ModelRequest([5], Sampling(max_tokens=1))])
    assert single.routed_experts.ids.shape == (1, 3, 2)
    routers = watch_routers(model)
    assert len({len(response.completion_token_ids) for response in responses}) > 5
    for request, response in zip(asked, responses, strict=True):
        passed = [*request.prompt_token_ids, *response.completion_token_ids][:-1]
        with torch.no_grad(), recording(routers) as record:
            model(input_ids=torch.tensor([passed]), use_cache=False)
        assert response.routed_experts.ids.dtype == np.uint8
        assert (np.sort(response.routed_experts.ids) == np.sort(record.take().numpy())).all()
        check_response(request, response)


async def test_clients_that_return_none():
    async with TransformersClient(build("qwen3_moe"), ByteTokenizer()) as client:
        assert (await client.generate([ModelRequest([1, 2])]))[0].routed_experts is None
    async with TransformersClient(build("qwen3"), ByteTokenizer(), routed_experts=True) as client:
        assert (await client.generate([ModelRequest([1, 2])]))[0].routed_experts is None
    with pytest.raises(ValueError, match="PhimoeTopKRouter computes"):
        TransformersClient(build("phimoe"), ByteTokenizer(), routed_experts=True)


async def test_a_stop_string_cuts_the_experts_too():
    async with TransformersClient(build("qwen3_moe"), ByteTokenizer(), routed_experts=True) as client:
        [whole] = await client.generate([ModelRequest([1, 2, 3], Sampling(max_tokens=12, seed=1))])
    text = ByteTokenizer().decode(whole.completion_token_ids[:5])
    cut = cut_at_stop(whole, Sampling(stop=(text[-1],)), ByteTokenizer())
    count = len(cut.completion_token_ids)
    assert count <= 5 and (cut.routed_experts.ids == whole.routed_experts.ids[: 3 + count - 1]).all()


async def test_steps_have_them_and_records_leave_them_out():
    request = ModelRequest([1, 2, 3], Sampling(max_tokens=4, seed=1))
    async with TransformersClient(build("qwen3_moe"), ByteTokenizer(), routed_experts=True) as client:
        [response] = await client.generate([request])
    step = to_step("solver", 0, [], request, response)
    assert step.facts.routed_experts is response.routed_experts
    assert to_step(None, 0, [], request, response).facts.routed_experts is None, "a judge never trains"
    assert "routed_experts" not in jsonable(step)["info"]
    assert "RoutedExperts" not in str(encode(step)) and decode(encode(step)).facts.routed_experts is None
    short = replace(response, routed_experts=RoutedExperts(response.routed_experts.ids[1:]))
    with pytest.raises(ModelError, match="the experts of 5 tokens, expected all of prompt and completion but the last"):
        check_response(request, short)


def test_as_text():
    ids = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    assert (experts_from_text(experts_to_text(ids)) == ids).all()
    assert (experts_from_text(experts_to_text(ids.T)) == ids.T).all(), "in Fortran's order"
    assert (experts_from_text(experts_to_text(np.asfortranarray(ids))) == ids).all()
    for wrong in ("?", experts_to_text(ids[0]), experts_to_text(ids.astype(np.float32))):
        with pytest.raises(ValueError):
            experts_from_text(wrong)
    data = base64.b64decode(experts_to_text(ids))
    heads = [data.replace(b"(2, 3, 2)", shape) for shape in (b"(2, 3, 3)", b"(-2,3,-2)", b"(2**40,3)")]
    huge = data.replace(b"(2, 3, 2), }" + b" " * 18, b"(2, 3, 20000000000000), }     ")
    deep = data[:10] + (b"(" * 100 + data[10:])[: len(data) - 10]
    for wrong in (*heads, huge, deep, data[:-1], data + b"x", b"PK\x03\x04", b"\x93NUMPY\x03\x00" + data[8:]):
        with pytest.raises(ValueError):
            experts_from_text(base64.b64encode(wrong).decode())


def test_an_expert_below_all_is_an_error():
    routers = watch_routers(build("qwen3_moe"))
    with pytest.raises(ValueError, match="row 3: expert -2: expected one from 0 to 5"):
        routers.check(np.full((5, 3, 2), -2, dtype=np.int16), "row 3")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(2, 3, 2), }        ", b"(999999999, 999, 99)"),
        (b"(2, 3, 2), }   ", b"(2, 3, 2000), }"),
        (b"(2, 3, 2), }", b"(2, 3, -2),}"),
        (b"'|u1'", b"'|O' "),
        (b"|u1", b"|u8"),
        (b"NUMPY\x01", b"NUMPY\x03"),
        (b"(2, 3, 2)", b"((((((((("),
    ],
)
def test_a_header_that_says_more_than_there_is_allocates_nothing(old, new):
    content = base64.b64decode(experts_to_text(np.zeros((2, 3, 2), np.uint8)))
    assert old in content
    with pytest.raises(ValueError, match=r"it is (no|an) array"):
        experts_from_text(base64.b64encode(content.replace(old, new)).decode())


def test_every_kind_is_tried():
    assert set(KNOWN) | {"phimoe", "granitemoe", "qwen3"} == set(KINDS)
