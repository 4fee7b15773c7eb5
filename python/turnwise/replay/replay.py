"""``turnwise replay``: runs a recorded episode again. The record answers every model call and input.

The replay runs the task's current code. If it behaves differently than in the record, the replay reports the first
difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pprint import pformat
from typing import Any

from turnwise.arena import Arena, ArtifactStore
from turnwise.arena.recording.rollouts_jsonl import EpisodeRecord, RecordError, json_line, nodes_of, plain_result
from turnwise.arena.runtime.context import ModelCall
from turnwise.inference.weights.load import copy_weights
from turnwise.replay.diff import FirstDifference, first_difference
from turnwise.replay.idle_loop import DeadlockDetectingLoop
from turnwise.replay.replayer import Replayer, replay_episode
from turnwise.run.build import Run, arena_for_client, build_run
from turnwise.run.checks import resolve_config, task_of, tiny_model
from turnwise.state import to_python
from turnwise.train.checkpoint.checkpoint import load_weights
from turnwise.train.checkpoint.files import read_tensors
from turnwise.train.checkpoint.listing import LARGEST, checkpoint_at, list_checkpoints
from turnwise.train.checkpoint.progress import START, find_checkpoint
from turnwise.train.config.schema import TrainConfig
from turnwise.train.config.toml import CONFIG_FILE, Problems
from turnwise.train.league.build import FOLDER
from turnwise.train.league.pool import Snapshot, members_in
from turnwise.train.log.lines import newest_lines
from turnwise.train.log.run_log import RunLog
from turnwise.train.model.loading import check_models
from turnwise.train.model.policy import Policy
from turnwise.train.run_folder import foreign_episode
from turnwise.train.validate import read_config
from turnwise.types import GenerateResult, ModelError, ModelRequest, ModelResponse
from turnwise.utils.files import damage_named, read_json


@dataclass(slots=True)
class Replayed:
    """The result of a replay."""

    record: EpisodeRecord
    played: int
    """Number of model calls answered from the record."""
    result: GenerateResult | None = None
    """``None`` if the replay stopped early."""
    divergence: FirstDifference | None = None
    """``None`` if the replay equals the record."""
    waiting: list[str] = field(default_factory=list)
    """State and prompt of each model call without an answer, as text."""
    sampled: list[str] = field(default_factory=list)
    """Model calls that were sampled again, as text."""

    def __str__(self) -> str:
        row, calls = self.record.row, len(self.record.calls)
        name = f"episode {row['id']} of step {row['step']} ({row['episode_type']})"
        if self.divergence is not None:
            return f"{name}: the re-run is not the recorded one\n{self.divergence}"
        if self.result is None:
            return "\n".join([f"{name}: stopped after {self.played} of {calls} model calls; next:", *self.waiting])
        if self.sampled:
            head = f"{name}: {self.played} model calls from the record, {len(self.sampled)} sampled again:"
            return "\n".join([head, *self.sampled, *_rewards(row, self.result)])
        readings, nested = len(self.record.readings), len(nodes_of(row)) - 1
        return (
            f"{name}: the re-run equals the record, bit for bit: {calls} model calls, {readings} readings, "
            f"{nested} nested episodes"
        )


def replay(
    run_dir: Path,
    episode: str | None = None,
    *,
    step: int | None = None,
    until: int | None = None,
    swap: Sequence[str] = (),
    allow_pickle: bool = False,
) -> Replayed:
    """Replay ``episode`` of ``run_dir``: an id such as ``"e5"``, also of a nested episode; by default the newest.

    ``step`` limits the search to that training step. ``until`` stops after that many model calls. ``swap`` has items
    ``"actor=policy"`` or ``"actor=policy@checkpoint"``: these actors are sampled again, from the start or after
    ``until`` calls. ``allow_pickle`` reads objects of any class from the record, which can run code. Raises
    ``ValueError`` for an episode or policy that the run doesn't have.
    """
    if until is not None and until < 0:
        raise ValueError(f"until={until!r}: expected a number of model calls >= 0")
    config = read_config(run_dir / CONFIG_FILE).model_copy(update={"run_dir": run_dir})
    task_of(config)  # imports the task's modules: the record names their data classes, and its reader never imports
    with damage_named(run_dir / "rollouts.jsonl"):
        record = EpisodeRecord(find_episode(run_dir / "rollouts.jsonl", episode, step), allow_pickle=allow_pickle)
    with asyncio.Runner(loop_factory=DeadlockDetectingLoop) as runner:
        return runner.run(_replay(config, record, until, parse_swaps(swap)))


async def _replay(
    config: TrainConfig, record: EpisodeRecord, until: int | None, swaps: Mapping[str, SwapPolicy]
) -> Replayed:
    arena = recorded_arena(config, record)
    if record.request.episode_type not in arena.episodes:
        raise ValueError(foreign_episode(config, record.row["id"], record.request.episode_type))
    if unknown := [actor for actor in swaps if actor not in arena.actors]:
        raise ValueError(f"swap: no actor {unknown[0]!r}, expected one of {sorted(arena.actors)}")
    if swaps:
        _fill(arena.stores, config.run_dir / "checkpoints")
    arena.stores = {name: store.frozen() for name, store in arena.stores.items()}
    async with contextlib.AsyncExitStack() as clients:
        live = await LivePolicies.open(config, swaps, record, clients) if swaps else None
        sample = None if live is None else live.sample
        playback = Replayer(record, arena.own_tokenizers, until=until, live=sample, swapped=list(swaps))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DeadlockDetectingLoop)
        loop.on_idle = playback.idle
        with damage_named(config.run_dir / "rollouts.jsonl"):  # an error of the episode is in its result
            result = await replay_episode(arena, playback)
    if result is not None and playback.divergence is None and live is None:
        arena.shape_rewards([result])
        found = json.loads(json_line(plain_result(result)))
        with damage_named(config.run_dir / "rollouts.jsonl"):
            playback.divergence = first_difference(record.row, found, arena.own_tokenizers)
    waiting = [_shown(context, call, record) for context, call in playback.left]
    sampled = [] if live is None else live.said
    return Replayed(record, playback.played, result, playback.divergence, waiting, sampled)


def recorded_arena(config: TrainConfig, record: EpisodeRecord) -> Arena:
    """Build the run's arena without models, so that it can't sample."""
    problems = Problems()
    task = task_of(config)
    resolved, actors = resolve_config(config, task, problems)
    problems.raise_any()
    tokenizers = check_models(resolved.policies, partial(tiny_model, resolved, task))
    client: Any = RecordedClient(record.versions)
    return arena_for_client(client, resolved, task, actors, tokenizers, record.arena["max_context"])


def _fill(stores: Mapping[str, ArtifactStore], checkpoints: Path) -> None:
    """Load in-memory stores from the newest checkpoint, for swapped actors that sample from them."""
    if saved_steps := list_checkpoints(checkpoints):
        saved = read_json(saved_steps[-1] / "manifest.json", follow=True, most=LARGEST)["state"]["arena"]["stores"]
        for name, store in stores.items():
            if store.path is None and name in saved:
                store.load_state_dict(saved[name])


class RecordedClient:
    """A client that returns the record's policy versions and can't sample."""

    def __init__(self, versions: Mapping[str, int]) -> None:
        self._versions = dict(versions)

    def version(self, policy: str) -> int:
        if policy not in self._versions:
            raise RecordError(f"policy {policy!r} was not there when the episode was recorded")
        return self._versions[policy]

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        raise ModelError("a replay samples nothing: model calls outside of the episode have no record")


# ---------------------------------------------------------------------------------------------------------------------
# Which episode
# ---------------------------------------------------------------------------------------------------------------------
def find_episode(path: Path, episode: str | None, step: int | None) -> Mapping[str, Any]:
    """Return the newest line of ``rollouts.jsonl`` that is or contains ``episode``, in ``step``; ``None``: any."""
    names: list[str] = []
    for row in (line.row for line in newest_lines(path)):
        try:
            ids = [node["id"] for node in nodes_of(row)]
        except (LookupError, TypeError) as error:
            raise ValueError(f"{path}: a line of step {row['step']} is no episode ({error!r})") from error
        if (step is None or row["step"] == step) and (episode is None or episode in ids):
            return row
        if len(names) < 20:
            names.append(f"{ids[0]} (step {row['step']})")
    shown = ", ".join(reversed(names)) or "none"
    raise ValueError(f"episode={episode!r}, step={step!r}: not in {path}, which has {shown}")


# ---------------------------------------------------------------------------------------------------------------------
# Policies that play on
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """A policy of the run at a checkpoint. ``None`` is the newest checkpoint, or the start of a run without one."""

    name: str
    checkpoint: str | None = None


def parse_swaps(words: Sequence[str]) -> dict[str, SwapPolicy]:
    """Parse swaps: ``["player1=default@best"]`` gives ``{"player1": SwapPolicy("default", "best")}``."""
    swaps = {}
    for word in words:
        actor, equals, policy = word.partition("=")
        name, at, checkpoint = policy.partition("@")
        if not (actor and equals and name) or (at and not checkpoint):
            raise ValueError(
                f"swap={word!r}: expected actor=policy or actor=policy@checkpoint, as in solver=default@best"
            )
        if actor in swaps:
            raise ValueError(f"swap={word!r}: actor {actor!r} is swapped twice")
        swaps[actor] = SwapPolicy(name, checkpoint or None)
    return swaps


class LivePolicies:
    """Samples swapped actors from their policies, and the others at the first swap's checkpoint."""

    def __init__(self, swaps: Mapping[str, SwapPolicy], runs: Mapping[str | None, Run]) -> None:
        self.swaps, self.runs = swaps, runs
        self.said: list[str] = []

    @classmethod
    async def open(
        cls,
        config: TrainConfig,
        swaps: Mapping[str, SwapPolicy],
        record: EpisodeRecord,
        clients: contextlib.AsyncExitStack,
    ) -> LivePolicies:
        """Load one set of weights for each checkpoint that ``swaps`` names.

        The first set also gets the past policies that the recorded episode played against. ``clients`` closes theirs.
        """
        runs: dict[str | None, Run] = {}
        for actor, swap in swaps.items():
            if swap.checkpoint in runs:
                run = runs[swap.checkpoint]
            else:
                run = runs[swap.checkpoint] = load_run(config, swap.checkpoint)
                clients.push_async_callback(run.arena.client.close)
                await run.trainer.sync_weights()
            if swap.name not in run.trainer.policies:
                raise ValueError(f"swap: no policy {swap.name!r}, expected one of {sorted(run.trainer.policies)}")
            played = record.request.policies.get(actor, run.arena.actors[actor].policy)
            if not run.arena.own_tokenizers.alike(swap.name, played):
                raise ValueError(
                    f"swap: actor {actor!r} played with policy {played!r}, whose tokens policy {swap.name!r} can't "
                    "read: expected a policy of the same tokenizer"
                )
        seat_past(next(iter(runs.values())), record, swaps)
        return cls(swaps, runs)

    async def sample(self, call: ModelCall) -> ModelResponse:
        request = call.request
        assert request is not None
        first = next(iter(self.swaps.values()))
        policy = self.swaps.get(str(call.actor_id), replace(first, name=request.policy))
        run = self.runs[policy.checkpoint]
        response = await run.arena.generate(replace(request, policy=policy.name))
        tokenizer = run.arena.own_tokenizers[policy.name]
        text = response.text or tokenizer.decode(response.completion_token_ids, skip_special_tokens=True)
        self.said.append(f"  turn {call.turn}, actor {call.actor_id!r}, policy {policy.name!r} ({call.key}): {text!r}")
        return response


def load_run(config: TrainConfig, checkpoint: str | None) -> Run:
    """Build the run with the weights of ``checkpoint`` (default: the newest), ready to sample. It writes no files.

    ``"start"`` means the start of the run. A league's snapshot has the name of its step's checkpoint.
    """
    root = config.run_dir / "checkpoints"
    if checkpoint is None and list_checkpoints(root):
        checkpoint = "newest"
    log = RunLog(config.run_dir, 0, writers=[], progress=False)
    begins = checkpoint in (None, START)
    run = build_run(config.model_copy(update={"resume": False}), warm=begins, log=log)
    if checkpoint is not None and not begins:
        _load_into(run.trainer.policies, root, checkpoint)
    return run


def _load_into(policies: Mapping[str, Policy], root: Path, checkpoint: str) -> None:
    chosen = find_checkpoint(root, checkpoint)
    snapshot: Mapping[str, Path] = {}
    if not chosen.is_dir():
        trained = [name for name, policy in policies.items() if policy.trainable]
        members = members_in(root.parent / FOLDER, trained)
        snapshot = {checkpoint_at(root, step).name: files for step, files in members.items()}.get(checkpoint, {})
    # Frozen weights, such as base models, are the same in all checkpoints.
    load_weights(find_checkpoint(root, "newest") if snapshot else chosen, policies)
    for name, file in snapshot.items():
        expected = sum(1 for _ in policies[name].weights())
        copy_weights(policies[name].model, read_tensors(file, expected).items(), name)


def seat_past(run: Run, record: EpisodeRecord, swapped: Collection[str]) -> None:
    """Load the league snapshot that the recorded episode played against.

    Raises ``ValueError`` if its weights are gone, unless its seats are ``swapped``.
    """
    if (game := record.request.facts.league) is None:
        return
    step, folder = game["member"], run.config.run_dir
    folders = [folder / FOLDER, *reversed(list_checkpoints(folder / "checkpoints"))]
    for actor, slot in record.request.policies.items():
        if actor in swapped:
            continue
        policy = run.arena.actors[actor].policy
        files = [each / Snapshot(step, {}).file(policy) for each in folders]
        weights = next((file for file in files if file.is_file()), None)
        if weights is None:
            raise ValueError(
                f"swap: actor {actor!r} was played by the league's snapshot of step {step}, which is gone (league.size "
                f"= {run.config.league.size} stay): swap {actor!r} too"
            )
        run.arena.client.load_weights(slot, read_tensors(weights).items(), record.versions[slot])


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------
def _shown(context: Any, call: ModelCall, record: EpisodeRecord) -> str:
    number = record.calls[call.key].number if call.key in record.calls else "?"
    data = pformat(to_python(context.state.data), width=100, compact=True)
    prompt = "\n".join(f"{message['role']}: {message['content']}" for message in call.messages)
    told = [f"call {number} ({call.key}): turn {call.turn}, actor {call.actor_id!r}", "state:", data, "prompt:", prompt]
    return "\n".join([told[0], *("  " + line for part in told[1:] for line in part.splitlines())])


def _rewards(row: Mapping[str, Any], result: GenerateResult) -> list[str]:
    now, lines = result.rollout, []
    for actor in dict.fromkeys([*row["rewards"], *now.rewards]):
        lines.append(f"reward of {actor!r}: recorded {row['rewards'].get(actor)}, now {now.rewards.get(actor)}")
    if now.error is not None:
        lines.append(f"the episode failed: {now.error.strip().splitlines()[-1]}")
    return lines
