"""An episode written by hand, for what a short run does not show: text that looks like markup, secrets, failures."""

from __future__ import annotations

import json
from pathlib import Path

from turnwise.train.log.run_log import RunLog
from turnwise.types import CHILD, GenerateResult, Rollout, Step, StepFacts

HOSTILE = "</script><b id=injected>bold</b><!-- {{data}} & \u2028"
"""What would break out of the page if any text entered it as HTML."""


class Words:
    """A tokenizer for hand-made steps: token ``k`` is the ``k``-th of ``words``."""

    eos_token_id = None

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Tokens that are words with the space before them."""
        first, *others = text.split(" ")
        start = len(self.words)
        self.words += [first, *(f" {word}" for word in others)]
        return list(range(start, len(self.words)))

    def apply_chat_template(self, conversation, **kwargs):
        raise NotImplementedError("hand-made steps have their token ids")

    def decode(self, token_ids, **kwargs):
        return "".join(self.words[token] for token in token_ids)


def call(words: Words, actor: str | None, turn: int, text: str, **changes) -> Step:
    """A call whose first half version 3 sampled, and its other half version 4."""
    ids = words.encode(text)
    half = len(ids) // 2
    step = Step(
        actor,
        turn=turn,
        prompt=[{"role": "system", "content": "Play."}, {"role": "user", "content": "the board"}],
        completion=text,
        prompt_token_ids=[1, 2, 3],
        completion_token_ids=ids,
        completion_logprobs=[-0.25 * (1 + index) for index in range(len(ids))],
        policy_versions=[(half, 3), (len(ids) - half, 4)],
        finish_reason="stop",
    )
    for name, value in changes.items():
        setattr(step, name, value)
    return step


def hand_made(folder: Path, step: int) -> None:
    """Log an episode with hostile and private text, a failed branch, a judge, and a nested episode that failed."""
    words = Words()
    prompt = [{"role": "user", "content": "the board. Your card: ace", "private": "Your card: ace"}]
    node = {"prompt": prompt, "tree_node": 2**47}
    steps = [
        call(words, "alice", 0, HOSTILE, reward=1.0, advantage=0.5, info={"selected_by": "draw"}, **node),
        call(words, "alice", 0, "a worse move", reward=-1.0, advantage=-0.5, branch=1, selected=False, **node),
        call(words, "alice", 0, "never mind", branch=2, selected=False, trainable=False,
             facts=StepFacts(error="ModelError: the server is gone"), **node),
        call(words, "bob", 0, "my reply", reward=0.0,
             facts=StepFacts(env_response="bob moved to B2", private=["board"])),
        call(words, None, 1, "verdict fair", trainable=False, finish_reason="length"),
    ]  # fmt: skip
    half_done = [call(words, "alice", 0, "half done")]
    failed = Rollout("r9.0", "check", {"of": "r9"}, half_done, error="Boom: <i>line 3</i>")
    whose = {"actor": "bob", "attempt": "r9", "parent": "r9", "order": 0, "after": ["alice", 1], "inherits": True}
    failed.meta[CHILD] = whose
    rewards = {"alice": 1.0, "bob": float("nan")}
    rollout = Rollout("r9", "duel", {"deal": HOSTILE}, steps, rewards, seed=2**62 + 1)
    result = GenerateResult(rollout, children=[GenerateResult(failed, parent_id="r9")])
    RunLog(folder, step, tokenizer=words).step(step, {"reward": float("nan"), "default/loss": 0.5}, [result])


def chat_run(folder: Path) -> list[Step]:
    """Log a chat of three turns; returns its calls."""
    words, steps, chat, ids = Words(), [], [], [1]
    for turn, text in enumerate(("one", "two", "three")):
        chat = [*chat, {"role": "user", "content": f"turn {turn}"}]
        steps.append(call(words, "alice", turn, text, prompt=chat, prompt_token_ids=ids))
        chat = [*chat, {"role": "assistant", "content": text}]
        ids = [*ids, *steps[-1].completion_token_ids, 1]
    RunLog(folder, 1).step(1, {}, [GenerateResult(Rollout("r1", "chat", None, steps))])
    return steps


def cluster_run(folder: Path, start: float) -> None:
    """Write the files of a run on two nodes: three steps, an engine that died and came back, one that left and died."""
    log = RunLog(folder, 5)
    for step, began, rollout, update, sync in [(1, 10, 6, 4, 1), (2, 22, 30, 4, 0.5), (3, 60, 8, 2, 0)]:
        log.step(
            step,
            {"cluster/time": start + began, "seconds_rollout": rollout, "seconds_update": update,
             "cluster/sync_seconds": sync, "cluster/version/engine-main-0/default": step,
             "cluster/version_min/default": max(step - 2, 0), "cluster/version_max/default": step,
             "cluster/version/engine-main-1/default": max(step - 2, 0)},
        )  # fmt: skip
    events = [
        (0, "started", "rank-0", "n1", ""), (2, "started", "engine-main-0", "n1", ""),
        (30, "died", "engine-main-0", "n1", "exit code -9"), (45, "restarted", "engine-main-0", "n2", ""),
        (50, "started", "engine-main-1", "n2", ""), (90, "ended", "engine-main-1", "n2", ""),
        (100, "started", "engine-main-1", "n2", ""), (105, "died", "engine-main-1", "n2", HOSTILE),
        (110, "started", "worker-0", "n2", ""),
    ]  # fmt: skip
    (folder / "cluster").mkdir()
    lines = [
        json.dumps({"time": start + at, "event": event, "role": role, "node": node, "pid": 10 + at, "detail": detail})
        for at, event, role, node, detail in events
    ]
    (folder / "cluster" / "events.jsonl").write_text("\n".join(lines) + "\n")
    members = {"epoch": 6, "engines": {"main": {"engine-main-0": "http://10.0.0.2:41231"}}, "workers": {}, "ranks": 1}
    (folder / "cluster" / "members.json").write_text(json.dumps(members))
