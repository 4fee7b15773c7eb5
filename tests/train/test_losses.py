from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from turnwise.ops import GSPO, Clip, Custom, policy_loss
from turnwise.train.config.optimization import LossConfig
from turnwise.train.update.loss import check_loss
from turnwise.train.update.loss_types import make_variant, registry
from turnwise.train.validate import load_config

OWN = """
import torch
from turnwise.ops import Clip

def ppo(logprobs, old_logprobs, advantages, low=0.2, high=0.2):
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))

def strict(logprobs, old_logprobs, advantages, *, power):
    return -advantages * logprobs ** power

class Scaled:
    def __init__(self, by=1.0):
        if by <= 0:
            raise ValueError(f"by={by!r}: expected a number > 0")
        self.by = by

    def __call__(self, logprobs, old_logprobs, advantages):
        return -self.by * advantages * logprobs

class Silent:
    pass

class WideClip(Clip):
    pass

answer = 42
"""


@pytest.fixture
def own_losses(tmp_path, monkeypatch):
    """The name of a module of losses in PYTHONPATH, as a user's own is."""
    (tmp_path / "own_losses_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_losses_of_test"


@pytest.mark.parametrize("kind", sorted(registry))
def test_every_name_makes_a_loss(kind):
    made = make_variant(LossConfig(type=kind, options={"beta": 0.05} if kind == "dro" else {}))
    assert made.compiled == (kind not in ("dppo", "dro", "vespo"))


def test_what_a_loss_needs_is_said_before_training():
    (problem,) = check_loss(LossConfig(type="luspo"))
    assert "aggregation='token-mean': expected 'seq-mean-token-sum' or" in problem
    assert check_loss(LossConfig(type="luspo", aggregation="seq-mean-token-sum")) == []
    (problem,) = check_loss(LossConfig(type="dro"))
    assert "'beta'" in problem


def test_options_go_to_the_loss():
    assert make_variant(LossConfig(type="clip-higher")) == Clip(0.2, 0.28)
    assert make_variant(LossConfig(type="clip-higher", options={"high": 0.4, "dual_clip": 3.0})) == Clip(0.2, 0.4, 3.0)
    assert make_variant(LossConfig(type="turnwise.ops:GSPO", options={"low": 0.1})) == GSPO(low=0.1)


def test_functions_and_classes_of_ones_own(own_losses):
    streams = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0]), torch.tensor([1.0, -3.0])
    loss = make_variant(LossConfig(type=f"{own_losses}:ppo", options={"high": 0.5}))
    assert isinstance(loss, Custom)
    assert loss.function(*streams).tolist() == pytest.approx([-1.5, 3.0])
    scaled = make_variant(LossConfig(type=f"{own_losses}:Scaled", options={"by": 2.0}))
    assert scaled.function(*streams).tolist() == [2.0, -12.0]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pppo", {}, r"'loss.type' = 'pppo': unknown; did you mean 'ppo'\?"),
        ("ppo", {"hihg": 0.3}, r"unknown config key 'loss.options.hihg'; did you mean 'high'\?"),
        ("ppo", {"low": -1}, r"config key 'loss.options' = \{'low': -1\}: Clip.low=-1"),
        ("own_losses_of_test:ppo", {"hihg": 0.3}, r"unknown config key 'loss.options.hihg'; did you mean 'high'\?"),
        ("own_losses_of_test:ppo", {"advantages": 0.3}, r"unknown config key 'loss.options.advantages'"),
        ("own_losses_of_test:strict", {}, r"config key 'loss.options' = \{\}: missing a required .*'power'"),
        ("own_losses_of_test:Scaled", {"by": 0}, r"config key 'loss.options' = \{'by': 0\}: by=0: expected"),
        ("own_losses_of_test:Silent", {}, r"'own_losses_of_test:Silent': expected a function of .*, got <class"),
        ("own_losses_of_test:answer", {}, r"'own_losses_of_test:answer': expected a function of .*, got 42"),
        ("os:system", {}, r"'os:system': expected a function of .*, got <built-in function system>"),
        ("subprocess:run", {"shell": True}, r"'subprocess:run': expected a function of .*, got <function run"),
        ("subprocess:Popen", {"args": ["true"]}, r"'subprocess:Popen': expected a function of .*, got <class"),
    ],
)
@pytest.mark.usefixtures("own_losses")
def test_what_makes_no_loss_is_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_variant(LossConfig(type=kind, options=options))


def test_the_loss_of_the_documentation_is_that_of_its_formula(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    module = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "# my_losses.py" in block)
    section = next(block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "my_losses:" in block)
    (tmp_path / "my_losses.py").write_text(module)
    (tmp_path / "run.toml").write_text(section)
    monkeypatch.syspath_prepend(tmp_path)
    own = make_variant(load_config(tmp_path / "run.toml").loss)
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 50, generator=generator).unbind()
    cut = {"cu_seqlens": torch.tensor([0, 20, 50])}
    got = policy_loss(logprobs, old, advantages, variant=own, **cut)
    want = policy_loss(logprobs, old, advantages, variant=Clip(0.2, 0.3), **cut)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
