"""Names of foreign tasks: their prefix, their options, and the sentence about a missing package."""

from __future__ import annotations

import sys

import pytest

from turnwise.integrations.environments.base.texts import listed_moves, plain_text, read_move, with_moves
from turnwise.tasks import FOREIGN, build_task

NEEDED = {
    "gymnasium:FrozenLake-v1": "gymnasium",
    "openenv:http://127.0.0.1:1": "openenv.core",
    "openspiel:kuhn_poker": "pyspiel",
    "pettingzoo:tictactoe_v3": "pettingzoo",
    "reasoning_gym:countdown": "reasoning_gym",
    "textarena:KuhnPoker-v0": "textarena",
}


def test_moves_by_hand():
    prompt = with_moves("Card: K", ("check", "bet"))
    assert prompt == "Card: K\nLegal moves: [check] [bet]"
    assert listed_moves(prompt) == ["[check]", "[bet]"]
    assert read_move("No [check]. I say [BET]!", ("check", "bet")) == "bet"
    assert read_move(" bet ", ("check", "bet")) == "bet"
    assert read_move("I bet", ("check", "bet")) is None
    # Chess has a bishop's Bxc3 and a pawn's bxc3.
    assert read_move("[Bxc3]", ("bxc3", "Bxc3")) == "Bxc3" and read_move("[BXC3]", ("bxc3", "Bxc3")) is None
    assert listed_moves(with_moves("", ("O-O", "a [b] c"))) == ["[O-O]", "[a [b] c]"]
    assert plain_text({"x": (1, 2.5), "y": "z"}) == "x: [1, 2.5]\ny: z"


def test_a_picture_is_refused():
    np = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match=r"an observation of 12288 numbers is no text: expected task_options.render"):
        plain_text(np.zeros((64, 64, 3)))


@pytest.mark.parametrize("task", NEEDED)
def test_a_missing_package_is_one_sentence_with_its_extra(task, monkeypatch):
    assert {name.partition(":")[0] for name in NEEDED} <= set(FOREIGN)
    module, extra = NEEDED[task], task.partition(":")[0]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"^{module} needs {module}, .* not installed: .*'turnwise\[{extra}\]'$"):
        build_task(task)


@pytest.mark.parametrize("prefix", sorted({name.partition(":")[0] for name in NEEDED}))
def test_a_name_is_needed_and_options_are_checked(prefix):
    with pytest.raises(ValueError, match=f"task='{prefix}:': expected a name after the colon"):
        build_task(f"{prefix}:")
    with pytest.raises(ValueError, match="unknown option 'max_tokenz'; did you mean 'max_tokens'"):
        build_task(f"{prefix}:anything", {"max_tokenz": 3})
