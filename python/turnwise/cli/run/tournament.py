"""``turnwise tournament``: a round robin among checkpoints and scripted players, with payoffs, ratings and intervals.

Every pair plays the same held-out questions from every seat with the same seeds. At most two checkpoints of a run are
in memory at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from turnwise.arena import Arena
from turnwise.cli.options import EXIT_OK
from turnwise.run.build import Run, build_run
from turnwise.run.checks import task_of
from turnwise.tasks import Player, Task, build_task
from turnwise.tasks.base import MatchTask, ScriptedTask
from turnwise.train.checkpoint.checkpoint import load_weights
from turnwise.train.checkpoint.files import read_tensors
from turnwise.train.checkpoint.listing import list_checkpoints
from turnwise.train.checkpoint.progress import find_checkpoint
from turnwise.train.config.rewards import FilterConfig
from turnwise.train.config.sampling import LoopConfig, TreeConfig
from turnwise.train.config.schema import HealthConfig, LeagueConfig, LogConfig, TrainConfig
from turnwise.train.config.toml import CONFIG_FILE
from turnwise.train.league.build import FOLDER
from turnwise.train.league.payoffs import GameResult, Payoffs, Ratings, bradley_terry, game_of
from turnwise.train.league.pool import members_in, slot_name
from turnwise.train.run_folder import check_episode_types
from turnwise.train.validate import load_config
from turnwise.types import ModelError, ModelRequest, ModelResponse, TaskCapabilities, capabilities_of
from turnwise.utils.output import say
from turnwise.utils.registry import announce_code_of_run, did_you_mean
from turnwise.utils.threads import run_in_program

ALL = "all"
"""Name for every checkpoint of a run, including the members of its league."""


def run(options: argparse.Namespace) -> int:
    for run_dir in options.run_dirs:
        announce_code_of_run(run_dir)
    result = play_tournament(
        options.run_dirs,
        checkpoints=options.checkpoints,
        games=options.games,
        task=options.task,
        baselines=options.baselines,
    )
    say(json.dumps(to_json(result), indent=1) if options.json else render(result))
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Participant:
    """A participant: a checkpoint or league member of run ``run``, or a scripted player of the task, without a run.

    A league member has ``files``, the weights of each policy, instead of a checkpoint.
    """

    name: str
    run: int | None = None
    checkpoint: Path | None = None
    files: Mapping[str, Path] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a round robin; ``payoffs`` has the record of each pair by their names."""

    task: str
    games: int
    participants: tuple[str, ...]
    payoffs: Payoffs
    ratings: Ratings

    def ranking(self) -> list[int]:
        """Return the indices of ``participants``, best first."""
        return [int(index) for index in np.argsort(-self.ratings.elo, kind="stable")]


def play_tournament(
    run_dirs: Sequence[Path],
    *,
    checkpoints: Sequence[str] = (ALL,),
    games: int = 200,
    task: str | None = None,
    baselines: Sequence[str] | None = None,
) -> Result:
    """Play ``games`` games per pair among the checkpoints of ``run_dirs`` and the task's scripted players.

    ``checkpoints`` are names as in ``turnwise eval --checkpoint``, or ``"all"``. By default ``task`` is what the runs
    trained on, with its options, and ``baselines`` are all of its scripted players. The runs' models may be of
    different families. Raises ``ValueError`` for a task without seats that play against each other.
    """
    if games < 2:
        raise ValueError(f"games={games!r}: expected at least 2, one from each seat")
    # The task, its scripted players and the checkpoints.
    configs = [_config_of(folder) for folder in run_dirs]
    if not configs:
        raise ValueError("run_dirs is empty: expected at least one run folder")
    played = _task_for(configs, task)
    scripted = {name: Participant(name) for name in _chosen_players(played, baselines)}
    participants = [*_checkpointed(run_dirs, configs, checkpoints), *scripted.values()]
    if len(participants) < 2:
        raise ValueError(f"{len(participants)} participant: expected at least two, more checkpoints or a baseline")
    # Play with one client over all runs.
    runs = [build_run(config, warm=False) for config in configs]
    try:
        client = MatchClient(runs, played, participants)
        payoffs = run_in_program(_round_robin(client, played, participants, games))
    finally:
        for run in runs:
            run.close()
    names = tuple(participant.name for participant in participants)
    return Result(played.name, games, names, payoffs, bradley_terry(*payoffs.matrices(names)))


async def _round_robin(client: MatchClient, task: Task, participants: Sequence[Participant], games: int) -> Payoffs:
    payoffs, seats = Payoffs(), capabilities_of(task, TaskCapabilities).seats
    for first, second in combinations(participants, 2):
        client.seat(first, 0)
        client.seat(second, 1)
        for match in await _matches(client.arena(), task, seats, games):
            payoffs.add(first.name, second.name, match)
    return payoffs


async def _matches(arena: Arena, task: Task, seats: Sequence[str], games: int) -> list[list[GameResult]]:
    """Play the games of one pair, and return the matches without failed games, from the first participant's side."""
    # Each question is one match, with a game from each seat.
    requests, sides = [], []
    for question in task.match_requests("eval", games // 2):  # type: ignore[attr-defined]  # a task with seats
        for seat in seats:
            policies = {actor: f"{int(actor != seat)}/{actor}" for actor in seats}
            requests.append(replace(question, policies=policies))
            sides.append(seat)
    results = await arena.evaluation(sampling=arena.sampling).generate_rollouts(requests)
    matches: list[list[GameResult]] = [[] for _ in range(0, len(requests), len(seats))]
    for index, (result, seat) in enumerate(zip(results, sides, strict=True)):
        if result.rollout.error is None:
            matches[index // len(seats)].append(game_of(result.rollout, [seat], seats))
    return [match for match in matches if match]


# ---------------------------------------------------------------------------------------------------------------------
# Participants
# ---------------------------------------------------------------------------------------------------------------------
def _config_of(folder: Path) -> TrainConfig:
    """Return a run's config for the tournament: two slots for its checkpoints, and the transformers client."""
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"run_dirs: {folder} holds no {CONFIG_FILE}: expected the folder of a run")
    config = load_config(folder / CONFIG_FILE).model_copy(update={"run_dir": folder})
    check_episode_types(config, task_of(config).episodes())
    rollout = config.rollout.model_copy(update={"client": "transformers", "branches": 1, "tree": TreeConfig()})
    sections = {"rollout": rollout, "loop": LoopConfig(), "filter": FilterConfig(), "log": LogConfig(progress=False)}
    slots = {"league": LeagueConfig(share=1.0, opponents_per_step=2), "health": HealthConfig()}
    return config.model_copy(update={**sections, **slots, "resume": False})


def _task_for(configs: Sequence[TrainConfig], name: str | None) -> Task:
    names = {config.task for config in configs}
    if name is None and len(names) > 1:
        raise ValueError(f"the runs trained on {', '.join(map(repr, sorted(names)))}: name one with task=...")
    trained = next((config for config in configs if name in (None, config.task)), None)
    task = build_task(str(name)) if trained is None else task_of(trained)
    if len(capabilities_of(task, TaskCapabilities).seats) < 2 or not isinstance(task, MatchTask):
        raise ValueError(f"task={task.name!r}: expected a task with seats that play against each other")
    return task


def _chosen_players(task: Task, chosen: Sequence[str] | None) -> list[str]:
    players = list(task.players) if isinstance(task, ScriptedTask) else []
    if chosen is None:
        return players
    if unknown := [name for name in chosen if name not in players]:
        raise ValueError(
            f"baselines={list(chosen)!r}: task {task.name!r} has no {unknown[0]!r}; {did_you_mean(unknown[0], players)}"
        )
    return list(chosen)


def _checkpointed(
    folders: Sequence[Path], configs: Sequence[TrainConfig], checkpoints: Sequence[str]
) -> list[Participant]:
    names = [folder.name for folder in folders]
    titles = [str(folder) if names.count(folder.name) > 1 else folder.name for folder in folders]
    participants: dict[Path, Participant] = {}
    for run, (folder, title) in enumerate(zip(folders, titles, strict=True)):
        root = folder / "checkpoints"
        for which in checkpoints:
            chosen = list_checkpoints(root) if which == ALL else [find_checkpoint(root, which)]
            for path in chosen:
                participants.setdefault(path.resolve(), Participant(f"{title}/{path.name}", run, path))
        if ALL in checkpoints:
            saved = {path.name for path in participants}
            trained = [name for name, settings in configs[run].policies.items() if settings.trainable]
            for step, files in sorted(members_in(folder / FOLDER, trained).items()):
                if (name := f"step_{step:08d}") not in saved:
                    participants[folder / FOLDER / name] = Participant(f"{title}/{name}", run, files=files)
    return sorted(participants.values(), key=lambda participant: (participant.run or 0, participant.name))


# ---------------------------------------------------------------------------------------------------------------------
# The client
# ---------------------------------------------------------------------------------------------------------------------
class MatchClient:
    """An inference client for two participants, side 0 and side 1; policy ``"1/player0"`` is side 1 in that seat.

    Checkpoints play in their run's client, which has a slot for each side. Scripted players are called directly.
    """

    def __init__(self, runs: Sequence[Run], task: Task, participants: Sequence[Participant]) -> None:
        self.runs, self.task, self.participants = runs, task, participants
        self.sides: list[Participant | None] = [None, None]
        for run in runs:
            if newest := list_checkpoints(run.trainer.checkpoints):
                load_weights(newest[-1], run.trainer.policies)  # for the bases and the frozen policies
            for policy in run.trainer.policies.values():
                run.arena.client.load_weights(policy.name, policy.all_weights(), policy.version)

    def arena(self) -> Arena:
        """Build an arena with the task's actors and episodes, for the two participants that are seated."""
        played = {
            f"{side}/{actor.id}": _player_of(self.runs[(participant and participant.run) or 0], actor.id)
            for side, participant in enumerate(self.sides)
            for actor in self.task.actors
        }
        tokenizers = {seat: arena.tokenizer_of(policy) for seat, (arena, policy) in played.items()}
        contexts = {seat: arena.context_of(policy) for seat, (arena, policy) in played.items()}
        arena = Arena(self, tokenizers, sampling=self.runs[0].arena.sampling, max_context=contexts)
        for actor in self.task.actors:
            arena.add_actor(replace(actor, policy=f"0/{actor.id}"))
        for name, episode in self.task.episodes().items():
            arena.add_episode(name, episode)
        return arena

    def seat(self, participant: Participant, side: int) -> None:
        """Load the weights of ``participant`` for ``side``."""
        if self.sides[side] is participant:
            return
        self.sides[side] = participant
        if participant.run is None:
            return
        run = self.runs[participant.run]
        trained = {name: policy for name, policy in run.trainer.policies.items() if policy.trainable}
        if participant.checkpoint is not None:
            load_weights(participant.checkpoint, run.trainer.policies)
        for name, policy in trained.items():
            weights = policy.weights()
            if participant.files is not None:
                weights = iter(read_tensors(participant.files[name], sum(1 for _ in weights)).items())
            run.arena.client.load_weights(slot_name(name, side), weights, 0)

    # -- the client protocol -------------------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        side, _, seat = request.policy.partition("/")
        participant = self.sides[int(side)]
        assert participant is not None, "both sides have a participant before a game"
        if participant.run is None:
            player: Player = self.task.players[participant.name](Random(request.sampling.seed))  # type: ignore[attr-defined]
            text = player(seat, request.messages or [])
            arena, policy = _player_of(self.runs[0], seat)
            format = arena.plain_format(None, policy)
            ids = [*format.encode(text), *format.end_token_ids]
            return ModelResponse(text, ids, [0.0] * len(ids), "stop", [(len(ids), 0)], trainable=False)
        run = self.runs[participant.run]
        _, policy = _player_of(run, seat)
        name = slot_name(policy, int(side)) if run.trainer.policies[policy].trainable else policy
        [response] = await run.arena.client.generate([replace(request, policy=name)])
        return response

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        raise ModelError("load_weights is not for tournaments: call seat(participant, side)")

    def version(self, policy: str) -> int:
        return 0

    async def pause(self) -> None:
        """Do nothing: nothing runs between two pairs."""

    async def resume(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing: ``play_tournament`` closes the runs."""


def _player_of(run: Run, seat: str) -> tuple[Arena, str]:
    """Return the arena of ``run`` and its policy that plays in ``seat``, by default its first one."""
    actor = run.arena.actors.get(seat)
    return run.arena, next(iter(run.trainer.policies)) if actor is None else actor.policy


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------
def to_json(result: Result) -> dict[str, Any]:
    """Convert to plain JSON data: ``ratings`` and, for each ordered pair, the record with its intervals."""
    pairs = []
    for player in result.participants:
        for opponent in result.participants:
            if player != opponent:
                record = result.payoffs.between(player, opponent)
                pairs.append(
                    {
                        "player": player, "opponent": opponent, "games": record.games, "matches": record.matches,
                        "wins": record.wins, "draws": record.draws, "losses": record.losses,
                        "payoff": record.mean_payoff(), "payoff_interval": record.payoff_interval(),
                        "share": record.mean_share(), "share_interval": record.share_interval(),
                    }
                )  # fmt: skip
    ratings = [
        {"player": result.participants[index], "elo": float(result.ratings.elo[index]),
         "interval": [float(result.ratings.low[index]), float(result.ratings.high[index])]}
        for index in result.ranking()
    ]  # fmt: skip
    return {"task": result.task, "games_per_pair": result.games, "ratings": ratings, "pairs": pairs}


def render(result: Result) -> str:
    """Show the ratings, best first, and the mean payoff of each row against each column, with 95% intervals."""
    order = result.ranking()
    names = [result.participants[index] for index in order]
    width = max(map(len, names))
    lines = [
        f"{result.task}: {len(names)} participants, {result.games} games per pair, each question from every seat",
        "",
    ]
    lines.append(f"{'':4}{'':{width}}  {'Elo':>6}  95% interval")
    ratings = result.ratings
    for rank, index in enumerate(order, start=1):
        elo, low, high = (float(values[index]) for values in (ratings.elo, ratings.low, ratings.high))
        lines.append(f"{rank:>3} {result.participants[index]:{width}}  {elo:>6.0f}  {low:.0f} to {high:.0f}")
    lines += ["", "mean payoff per game of the row against the column:"]
    lines.append(f"{'':4}{'':{width}}" + "".join(f"{column:>15}" for column in range(1, len(names) + 1)))
    for rank, player in enumerate(names, start=1):
        cells = ["-" if player == other else _cell(result.payoffs, player, other) for other in names]
        lines.append(f"{rank:>3} {player:{width}}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def _cell(payoffs: Payoffs, player: str, opponent: str) -> str:
    record = payoffs.between(player, opponent)
    interval = record.payoff_interval()
    half = "" if interval is None else f" ±{(interval[1] - interval[0]) / 2:.2f}"
    return f"{record.mean_payoff():+.2f}{half}" if record.matches else "?"
