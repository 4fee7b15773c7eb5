"""turnwise without its requirements, as beside another trainer: what runs, and how the rest says what it lacks.

Each environment is an empty one with links to turnwise and to some of the packages of this one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import turnwise

from .installed import closure, link

STATE = """
from turnwise.state import Store
left, right = Store().state({"board": [0, 0], "seen": {1}}).fork(2)
left.data["board"][0] = 1
assert right.data["board"][0] == 0 and left.data["board"][0] == 1
"""
CREDIT = """
import sys
from turnwise.credit import credit_columns, registry
questions, actors = ["q"] * 8, ["solver", "verifier"] * 4
found = credit_columns("dr_mas", [1, 0, 0, 1, 1, 1, 0, 0], questions=questions, actors=actors)
assert [round(float(a), 3) for a in found] == [0.866, -0.866, -0.866, 0.866, 0.866, 0.866, -0.866, -0.866], found
for rule in sorted(set(registry) - {"levels", "vine"}):
    made = credit_columns(
        rule, [1.0, 0.0, 0.0, 1.0], questions=["q"] * 4, states=[0] * 4, lengths=[3] * 4,
        components={"right": [1.0, 0.0, 0.0, 1.0]},
        options={"constant": {"value": 1.0}, "gdpo": {"rewards": {"right": 1.0}}}.get(rule, {}),
    )
    assert len(made) == 4, rule
assert "torch" not in sys.modules
"""
OPS = """
import torch
from turnwise import ops
ids, count = ops.factorize(["a", "a", "b"])
assert ops.group_advantage(torch.tensor([1.0, 0.0, 3.0]), ids, num_groups=count).tolist()[2] == 0
logprobs = torch.full((2, 3), -1.0, requires_grad=True)
loss = ops.policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), mask=torch.ones(2, 3)).loss
loss.backward()
assert abs(float(logprobs.grad.sum())) < 1e-6
hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
assert ops.linear_logprob(hidden, weight, torch.arange(5)).shape == (5,)
"""


def refused(room: str, *missing: str) -> str:
    named = f"{room} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
    return f"""
try:
    import {room}
except ImportError as error:
    assert str(error) == {named!r}, error
else:
    raise AssertionError("{room} imported")
"""


CASES = {
    "state with nothing": ((), STATE),
    "types with numpy": (("numpy",), "from turnwise import Actor; Actor('solver')"),
    "the version with nothing": ((), "import turnwise; assert turnwise.__version__"),
    "credit with nothing": ((), refused("turnwise.credit", "numpy")),
    "credit with numpy": (("numpy",), CREDIT),
    "ops with numpy": (("numpy",), refused("turnwise.ops", "torch")),
    "credit, ops and training with torch and numpy": (  # in one process: an import of torch takes seconds
        ("torch", "numpy"),
        CREDIT + OPS + refused("turnwise.train", "transformers", "tokenizers", "safetensors", "pydantic", "rich"),
    ),
    "tasks with numpy": (("numpy",), refused("turnwise.tasks", "pydantic")),
}


@pytest.mark.parametrize("case", CASES)
def test_without_requirements(case: str, tmp_path: Path) -> None:
    packages, program = CASES[case]
    (tmp_path / "turnwise").symlink_to(Path(turnwise.__file__).parent)
    for name in closure(packages):
        link(name, tmp_path)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    # -I -S: neither this environment's packages nor the user's
    done = subprocess.run([sys.executable, "-I", "-S", "-c", start + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
