"""Several tasks in one run, each with its weight: a step asks questions of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from turnwise.arena import Episode, TreeSampler
from turnwise.arena.stages.task_labels import SUCCESS, TaskLabels
from turnwise.tasks.base import Demonstration, NumberedTask, Player, Split, Task, task_problems
from turnwise.types import Actor, EpisodeRequest


class Part(NamedTuple):
    """A task of several, with its weight > 0."""

    task: Task
    weight: float = 1.0


class SeveralTasks:
    """A task made of others, by their names in the run.

    Of the questions of a step each part has the share of its weight. Where that is no whole number, the steps take
    turns, so that the counts of all steps so far are right to about one question. Each part keeps its episodes, actors
    and metric: actors of two parts may have the same name, and then play with the same policy, each with its own prompt
    and limits. An episode has its own type; if two parts have episodes of one type, they are called ``<part>/<type>``.
    The success of an episode is that of its part, under the name ``success``.

    Example: ``SeveralTasks({"easy": Part(Sudoku(blanks=(2, 4))), "hard": Part(Sudoku(blanks=(6, 8)), weight=2)})``
    """

    success_metric = SUCCESS

    def __init__(self, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise ValueError("parts={}: expected at least one task")
        for name, part in parts.items():
            if not part.weight > 0:
                raise ValueError(f"weight={part.weight!r} of task {name!r}: expected a number > 0")
            if not name or "/" in name:
                raise ValueError(f"task {name!r}: expected a name without '/'")
        self.parts = dict(parts)
        self.name = "+".join(parts)
        total = sum(part.weight for part in parts.values())
        self.shares = {name: part.weight / total for name, part in parts.items()}
        # The name of each episode in the run, by part and by its own type.
        types = {name: list(part.task.episodes()) for name, part in parts.items()}
        seen = Counter(kind for kinds in types.values() for kind in kinds)
        self.types = {
            name: {kind: kind if seen[kind] == 1 else f"{name}/{kind}" for kind in kinds}
            for name, kinds in types.items()
        }
        for name, kinds in self.types.items():
            if len(kinds) > 1 and any(kind != own for own, kind in kinds.items()):
                raise ValueError(
                    f"task {name!r} has several episodes ({', '.join(kinds)}), and another task has one of the same "
                    "type: expected other types, as its episodes start each other by them"
                )
        self._given: dict[int, list[dict[str, int]]] = {}  # questions of each part so far, by questions of a step

    # -- players -------------------------------------------------------------------------------------------------------
    @property
    def actors(self) -> list[Actor]:
        """One actor of each name, in the order of the parts; :meth:`teams` has the actors of each episode."""
        by_id: dict[str, Actor] = {}
        for part in self.parts.values():
            for actor in part.task.actors:
                by_id.setdefault(actor.id, actor)
        return list(by_id.values())

    def teams(self, actors: Sequence[Actor]) -> dict[str, dict[str, Actor]]:
        """Return the actors of each episode in the run, with the policies and limits of ``actors``."""
        given = {actor.id: actor for actor in actors}
        return {
            kind: {
                actor.id: replace(actor, policy=given[actor.id].policy, max_concurrency=given[actor.id].max_concurrency)
                for actor in part.task.actors
            }
            for name, part in self.parts.items()
            for kind in self.types[name].values()
        }

    def labels(self) -> TaskLabels:
        """Return the success metric of each part, and its share."""
        return TaskLabels({name: part.task.success_metric for name, part in self.parts.items()}, self.shares)

    def part_of_type(self) -> dict[str, str]:
        """Return the part of each episode in the run."""
        return {kind: name for name, kinds in self.types.items() for kind in kinds.values()}

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        return {
            self.types[name][kind]: episode
            for name, part in self.parts.items()
            for kind, episode in part.task.episodes(tree).items()
        }

    # -- questions -----------------------------------------------------------------------------------------------------
    def counts(self, step: int, questions: int) -> dict[str, int]:
        """Return the number of questions of each part in ``step`` (from 0 on), which add up to ``questions``."""
        given = self._given.setdefault(questions, [dict.fromkeys(self.parts, 0)])
        while len(given) <= step + 1:  # each question goes to the part that lacks most of its share
            total = dict(given[-1])
            for number in range((len(given) - 1) * questions + 1, len(given) * questions + 1):
                lacks = {name: share * number - total[name] for name, share in self.shares.items()}
                total[max(lacks, key=lacks.__getitem__)] += 1
            given.append(total)
        return {name: given[step + 1][name] - given[step][name] for name in self.parts}

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        asked: list[EpisodeRequest] = []
        for name, count in self.counts(step, questions).items():
            task = self.parts[name].task
            if count and isinstance(task, NumberedTask):
                first = self._given[questions][step][name]
                asked += self.labelled(name, task.requests_from(first, count, copies))
            elif count:
                asked += self.labelled(name, task.requests(step, count, copies))
        return asked

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """The first ``n`` questions of each part."""
        return [
            request
            for name, part in self.parts.items()
            for request in self.labelled(name, part.task.eval_requests(split, n))
        ]

    def labelled(self, name: str, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
        """Return the part's ``requests`` as requests of the run."""
        return [
            replace(
                request,
                episode_type=self.types[name].get(request.episode_type, request.episode_type),
                group_id=None if request.group_id is None else f"{name}/{request.group_id}",
                facts=replace(request.facts, task=name),
            )
            for request in requests
        ]

    def problems(self, requests: Sequence[EpisodeRequest], *, measured: bool = True) -> list[str]:
        """List the problems of each part with its ``requests``, as :func:`~turnwise.tasks.base.task_problems` does."""
        problems: list[str] = []
        for name, part in self.parts.items():
            own_type = {kind: own for own, kind in self.types[name].items()}
            own = [
                replace(request, episode_type=own_type.get(request.episode_type, request.episode_type))
                for request in requests
                if request.facts.task == name
            ]
            problems += task_problems(part.task, part.task.episodes(), own, measured=measured)
        return problems

    # -- warm start, baselines -----------------------------------------------------------------------------------------
    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """``n`` demonstrations, of each part in its share, each with its actor's system prompt."""
        shown: list[tuple[float, Demonstration]] = []
        for name, count in self.counts(0, n).items():
            prompts = {actor.id: actor.system_prompt for actor in self.parts[name].task.actors}
            for i, (actor, messages, text) in enumerate(self.parts[name].task.demonstrations(count, seed)):
                if prompts.get(actor) and messages[0]["role"] != "system":
                    messages = [{"role": "system", "content": prompts[actor]}, *messages]
                shown.append(((i + 0.5) / count, (actor, messages, text)))
        return [each for _, each in sorted(shown, key=lambda pair: pair[0])]

    def texts(self) -> list[str]:
        return [text for part in self.parts.values() for text in part.task.texts()]

    def oracle(self) -> Player:
        return self._player({name: part.task.oracle() for name, part in self.parts.items()})

    def random_player(self, seed: int) -> Player:
        return self._player({name: part.task.random_player(seed) for name, part in self.parts.items()})

    def _player(self, players: Mapping[str, Player]) -> Player:
        """Let the player of the part play whose actor has the system prompt that the chat begins with."""
        by_prompt: dict[tuple[str, Any], Callable[..., str]] = {}
        for name, part in self.parts.items():
            for actor in part.task.actors:
                by_prompt.setdefault((actor.id, actor.system_prompt), players[name])

        def play(actor: str, messages: Any) -> str:
            prompt = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
            return by_prompt[actor, prompt](actor, messages)

        return play
