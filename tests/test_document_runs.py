"""Every block of settings in the documents trains: two tiny steps of each, with what its page shows beside it."""

from __future__ import annotations

import json
import re
import socket
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

from turnwise.run.build import train_from_config
from turnwise.train.validate import config_from_dict

from .test_documents import DOCUMENTS, ROOT, WRITTEN, blocks
from .trained import rows_of

pytestmark = pytest.mark.usefixtures("narrow_model")

ELSEWHERE = {
    "agents.md 3": "starts Claude Code",
    "agents.md 4": "starts mini-SWE-agent",
    "agents.md 5": "starts Codex",
    "agents.md 6": "starts opencode",
    "agents.md 7": "starts Qwen Code",
    "containers.md 1": "starts bubblewrap",
    "cluster.md 1": "starts a Ray cluster with GPUs",
    "environments.md 6": "talks to an OpenEnv server",
    "servers.md 1": "talks to a vLLM server",
    "policies.md 4": "takes models of two families",
    "servers.md 2": "talks to three vLLM servers",
    "other_trainers.md 1": "is a config of PRIME-RL",
    "tinker.md 1": "talks to a Tinker server",
    "tinker.md 2": "talks to a Tinker server",
    "verifiers.md 1": "needs a taskset of verifiers 0.4, which make test-verifiers installs",
}
"""Blocks that can't run on a CPU without network, with the reason."""

NOT_RUN = {
    "agents.md": "parts of an agent, whose other parts are the reader's",
    "gateway.md": "parts of an agent, whose other parts are the reader's",
    "other_trainers.md": "needs rLLM and SkyRL",
    "trl.md": "needs TRL and a model of the Hub",
    "verifiers.md": "a module of a package that verifiers installs",
    "verl.md": "needs verl",
}
"""Pages with Python that no test runs (in blocks ``py``), with the reason."""

NEEDS = {
    "environments.md 1": "gymnasium",
    "environments.md 2": "pettingzoo",
    "environments.md 3": "textarena",
    "environments.md 4": "pyspiel",
    "environments.md 5": "reasoning_gym",
    "agents.md 1": "openai",
    "agents.md 2": "openai",
}
"""Packages that a block needs."""

SLOW = {"agents.md 2", "environments.md 3", "environments.md 4", "environments.md 5"}
"""Blocks whose two steps take seconds."""

BESIDE: dict[str, dict[str, Any]] = {
    "credit.md 1": {"task": "lookup"},
    "credit.md 2": {"task": "scored:Scored"},
    "credit.md 3": {"task": "proposer_solver"},
    "policies.md 3": {"policy_sharing": "model_per_actor"},
    "policies.md 5": {"actors": {"reviser": {"teacher": "big"}}},
    "policies.md 6": {"task": "lookup"},
    "models.md 1": {"task": "scored:Scored"},
    "trees.md 2": {"task": "sudoku"},
}
"""What a page says in words: the task whose actors or rewards its block names."""

MODULES = {
    "scored.py": """
from turnwise import Rubric, SingleTurnEpisode
from turnwise.tasks import OwnTask


def correct(completion, artifact):
    return float(artifact["answer"] in completion)


def brief(completion):
    return 1 / (1 + len(completion))


class Ask(SingleTurnEpisode):
    episode_type, rubric = "scored", Rubric([correct, brief])

    def get_prompt(self, artifact):
        return artifact["question"]


class Scored(OwnTask):
    name, success_metric, system_prompts = "scored", "correct/solver", {"solver": ""}

    def questions(self):
        return [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(100)]

    def episodes(self, tree=None):
        return {"scored": Ask()}
""",
    "questions.jsonl": "".join(json.dumps({"text": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(100)),
}

SETTINGS = [
    pytest.param(
        path,
        text,
        id=name,
        marks=[pytest.mark.needs(NEEDS.get(name))] * (name in NEEDS) + [pytest.mark.slow] * (name in SLOW),
    )
    for path in DOCUMENTS
    for number, text in enumerate(blocks(path, r"toml[^\n]*"), start=1)
    if (name := f"{path.name} {number}") not in ELSEWHERE
]


def shortened(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings with two tiny steps of a tiny model on the CPU; all else stays."""
    settings = dict(given)
    policies = settings.get("policies") or {"default": {}}
    settings["policies"] = {name: {**each, "path": "tiny"} for name, each in policies.items()}
    rollout = dict(settings.get("rollout", {}))
    for key, most in {"prompts_per_step": 4, "group_size": 2, "branches": 2}.items():
        rollout[key] = min(rollout.get(key, most if key == "prompts_per_step" else 1), most)
    if rollout["branches"] == 1:
        rollout["group_size"] = 2
    settings["rollout"] = rollout
    if "phases" in settings:
        settings["phases"] = [{**phase, "steps": 1} for phase in settings["phases"]]
    if "curriculum" in settings:
        settings["curriculum"] = {**settings["curriculum"], "pool": 20}
    if "warm_start" in settings:
        settings["warm_start"] = {**settings["warm_start"], "steps": 2, "batch_size": 4}
    if "prometheus" in settings.get("log", {}):
        with socket.create_server(("127.0.0.1", 0)) as free:
            settings["log"] = {"prometheus": f"127.0.0.1:{free.getsockname()[1]}"}
    evaluation = {**settings.get("eval", {}), "num_prompts": 2}
    if "exploitability_every" in evaluation:
        evaluation["exploitability_every"] = 1
    health = {**settings.get("health", {}), "start_questions": 0}
    return {
        **settings, "steps": 2, "threads": 1, "device": "cpu", "run_dir": str(folder), "eval": evaluation,
        "health": health,
    }  # fmt: skip


@pytest.mark.parametrize(("path", "text"), SETTINGS)
def test_settings_train(
    path: Path, text: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps end, no episode fails, and nothing is said to train nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in [*blocks(path, "python"), *blocks(path, "py")]:
        if named := re.match(r"# (\w+\.py)$", block, flags=re.MULTILINE):
            Path(named[1]).write_text(block, encoding="utf-8")
        elif "TURNWISE_RESULT" in block:
            Path("agent.py").write_text(block, encoding="utf-8")
    for name, content in MODULES.items():
        Path(name).write_text(content, encoding="utf-8")
    beside = BESIDE.get(request.node.callspec.id, {})
    settings = shortened({**beside, **tomllib.loads(text)}, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model that knows nothing ties its groups
        run = train_from_config(config_from_dict(settings))
    run.close()
    rows = [row for row in rows_of(tmp_path / "run") if row["step"] and "episodes" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row.get("episodes/failed", 0) == 0 for row in rows)


def test_each_block_trains_or_says_why_not() -> None:
    """The lists name blocks that exist. All Python is run (``test_python_blocks_run``) or its page is listed."""
    every = {f"{path.name} {n + 1}" for path in DOCUMENTS for n in range(len(blocks(path, r"toml[^\n]*")))}
    assert {*ELSEWHERE, *NEEDS, *SLOW, *BESIDE} <= every
    assert {path.name for path in DOCUMENTS if blocks(path, "py")} == set(NOT_RUN)


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.parent.name == "docs"], ids=lambda path: path.name)
def test_each_page_opens_with_who_needs_it_and_an_example(path: Path) -> None:
    """A block that runs begins in the first 40 lines: settings, Python, or a command that does more than install.

    Python of packages that are not here counts (``NOT_RUN``). Generated pages begin with what they are.
    """
    text = path.read_text(encoding="utf-8")
    if "Written by scripts/docs_pages.py" in text:
        return
    title, opening = [part for part in text.split("\n\n", maxsplit=3) if not part.startswith("![")][:2]
    assert title.startswith("# ") and re.match(r"(For|Use|Read) ", opening), opening
    begun = re.findall(
        r"^```(\w+)\n((?:(?!```).*\n)*)", "".join(text.splitlines(keepends=True)[:40]), flags=re.MULTILINE
    )
    command = r"^(?:\w+=\S+ )*(?:\S*/)?(?:turnwise|make|python|torchrun) "
    runs = {"toml", "python", *(["py"] if path.name in NOT_RUN else [])}
    assert any(kind in runs or (kind == "bash" and re.search(command, block, flags=re.M)) for kind, block in begun)


def test_the_readme_trains_as_it_is_shown() -> None:
    """It names a warm start, without which a tiny model never succeeds, and the run that its command starts."""
    [shown] = blocks(ROOT / "README.md", "toml")
    example = tomllib.loads((ROOT / "examples" / "sudoku" / "prompt.toml").read_text(encoding="utf-8"))
    for section, values in tomllib.loads(shown).items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            assert (example[section][key] if key else example[section]) == value, f"{section}.{key}"
