"""Where episodes keep what they make: questions, positions, opponents. In memory, or in a file."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from turnwise.arena import lineage
from turnwise.arena.context import current_context, derive_seed, outlasting, rng_state, set_rng_state
from turnwise.arena.drawing import Drawable, Outcome, Pool, SamplingRule, find_rule
from turnwise.arena.split import SplitRule, StoreSide
from turnwise.arena.store_contents import UNKNOWN, Contents
from turnwise.arena.store_file import StoreFile
from turnwise.arena.tape import logged_method
from turnwise.types import Artifact

_AT_ONCE = contextlib.nullcontext()


class ArtifactStore(Drawable):
    """Artifacts by id, in order of arrival, with sampling by its own seeded generator.

    ``path`` keeps them in a file (SQLite), where each change is on its own at once; without it they live in memory and
    in the run's checkpoints. A file's checkpoints hold a revision: a resumed run goes back to it, and what the run did
    after it is gone from the file too. One process writes to a file, unless all open it with ``shared=True``; then what
    others did stays where a run goes back. Data that JSON can't hold is pickled; plain types and data classes are read
    back (dataclasses, named tuples, enums), other objects only with ``allow_pickle``: that can run any code.

    ``max_size`` drops the oldest. ``dedup`` refuses data that is already there. ``sampling`` is ``"uniform"``,
    ``"weighted"``, ``"prioritised"``, ``"learnability"`` or a :class:`~turnwise.arena.drawing.SamplingRule`; the last
    two go by what :meth:`record` was told, averaged over about ``window`` attempts of each artifact (``None``: all).
    Inside an episode, samples come from that episode's generator, so they do not depend on which episode ran first.

    Example::

        store = ArtifactStore("questions", path="pool/questions.db", max_size=1000, dedup=True)
        question = store.add({"question": "2 + 2 = ?"}, source="r-17")
        store.add({"question": "2 + 2 * 2 = ?"}, parents=[question.id])
        store.sample_one().data["question"]
    """

    def __init__(
        self,
        name: str,
        *,
        path: str | os.PathLike[str] | None = None,
        shared: bool = False,
        allow_pickle: bool = False,
        max_size: int | None = None,
        dedup: bool = False,
        sampling: str | SamplingRule = "uniform",
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        for option, count in (("max_size", max_size), ("window", window)):
            if count is not None and count < 1:
                raise ValueError(f"{option}={count!r}: expected at least 1, or None")
        if shared and path is None:
            raise ValueError("shared=True: a store in memory is no other process's; give it a path")
        self.name = name
        self.max_size = max_size
        self.dedup = dedup
        self.sampling = find_rule(sampling)
        self.window = window
        self._held = Contents(keyed=dedup)
        self._rng = random.Random(derive_seed("store", name, seed))
        self._drawn: tuple[Contents, int, Pool] | None = None
        self._split: SplitRule | None = None
        self._file = None if path is None else StoreFile(path, name, shared=shared, allow_pickle=allow_pickle)
        self._catch_up()
        self._inherited: frozenset[str] = frozenset() if self._file is None else self._file.inherited()

    @property
    def store(self) -> ArtifactStore:
        return self

    @property
    def label(self) -> str:
        return self.name

    @property
    def _contents(self) -> Contents:
        return self._held

    @property
    def path(self) -> str | None:
        """The file, ``None`` in memory."""
        return None if self._file is None else str(self._file.path)

    @property
    def run(self) -> str | None:
        """The run as the file's artifacts name it: ``"solve-3@9f86d081884c7d65"``, or the part behind the ``@`` alone,
        which no other run has and a resumed one keeps. ``None`` in memory, where there is no other."""
        return None if self._file is None else self._file.run

    def name_run(self, label: str) -> None:
        """What stands before the ``@`` from now on; a training run says its folder's name."""
        if self._file is not None:
            self._file.label = label

    @property
    def inherited(self) -> frozenset[str]:
        """Ids of what stood in the file before this run; of a run that was resumed, before it first began. In memory
        that is nothing."""
        return self._inherited

    def close(self) -> None:
        """Let go of the file; in memory nothing happens. Nothing can be done with a closed store."""
        if self._file is not None:
            self._file.close()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """``with store.together():`` many changes become one of the file, whole or not at all, and quicker."""
        return _AT_ONCE if self._file is None else self._file.writing(self._catch_up)

    # -- artifacts -----------------------------------------------------------------------------------------------------
    @logged_method()
    def add(
        self,
        data: Any,
        *,
        id: str | None = None,
        weight: float = 1.0,
        source: str | None = None,
        parents: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> Artifact | None:
        """Keep ``data`` (or a whole :class:`Artifact`); returns what is stored, or ``None`` if ``dedup`` refused it.

        Without ``id`` one is made. ``source`` names the rollout that made it, inside an episode that one, of this
        :attr:`run`; ``parents`` the artifacts that it was made from. Raises ``ValueError`` for an id that is taken, and
        for a weight below 0.
        """
        with self.together():
            if isinstance(data, Artifact):
                artifact = data
            else:
                context = current_context() if source is None else None
                made_by = source if context is None else context.rollout.id
                new_id = self._free_id() if id is None else id
                ids = lineage.as_ids(parents) if parents else ()
                artifact = Artifact(new_id, outlasting(data), weight, made_by, dict(meta or {}), ids, self.run)
            held = self._contents
            if artifact.id in held.artifacts:
                raise ValueError(f"id={artifact.id!r}: the store {self.name!r} already has an artifact of this id")
            _check_weight(artifact.weight)
            key = held.key(artifact)
            if held.has(key):
                return None
            outcome = Outcome(last=held.plays) if held.plays else UNKNOWN
            if self._file is not None:
                self._file.insert(artifact, outcome, held.added + 1)
            held.added += 1
            held.keep(artifact, outcome, key)
            while self.max_size is not None and len(held.artifacts) > self.max_size:
                self._remove(next(iter(held.artifacts)))
            return artifact

    @logged_method()
    def remove(self, id: str) -> None:
        """Forget one artifact; ``KeyError`` names an id that isn't there."""
        with self.together():
            self._of(id)
            self._remove(id)

    @logged_method()
    def set_weight(self, id: str, weight: float) -> None:
        """Change how often an artifact is drawn by a store with ``sampling="weighted"``."""
        _check_weight(weight)
        with self.together():
            self._of(id)
            self._put(self._contents.weigh(id, weight), self._contents.outcome(id))

    @logged_method()
    def get(self, id: str) -> Artifact:
        self._catch_up()
        return self._of(id)

    @logged_method()
    def __contains__(self, id: str) -> bool:
        self._catch_up()
        return id in self._contents.artifacts

    @logged_method()
    def count(self) -> int:
        self._catch_up()
        return len(self._contents.artifacts)

    @logged_method()
    def __iter__(self) -> Iterator[Artifact]:
        self._catch_up()
        return iter(list(self._contents.artifacts.values()))

    @logged_method()
    def ancestors(self, id: str) -> list[str]:
        """Ids of what ``id`` was made from, and those from, and so on; the nearest first. Those of artifacts that are
        gone are named, but not what those were made from."""
        self.get(id)
        return lineage.ancestors(self._contents.artifacts, id)

    @logged_method()
    def descendants(self, id: str) -> list[str]:
        """Ids of what was made from ``id``, and from those, and so on; in order of arrival. ``id`` may be gone."""
        self._catch_up()
        return lineage.descendants(self._contents.artifacts, id)

    # -- outcomes and drawing ------------------------------------------------------------------------------------------
    @logged_method()
    def record(
        self, id: str, reward: float | None = None, *, success: float | None = None, score: float | None = None
    ) -> Outcome:
        """One more attempt at artifact ``id``: what it earned and whether (or how far) it succeeded.

        Without ``success`` a ``reward`` above 0 is one; without ``reward`` the success is the reward. ``score`` is how
        much there is to learn, at least 0: by default how far the reward is from the mean of those before. An arena
        records what its training batches play, see ``Arena.record_outcomes``.
        """
        if reward is None and success is None:
            raise ValueError(f"reward=None, success=None: expected one of them for artifact {id!r}")
        if success is None:
            success = float(reward > 0)  # type: ignore[operator]
        reward = float(success) if reward is None else float(reward)
        if not (math.isfinite(reward) and 0 <= success <= 1 and (score is None or 0 <= score < math.inf)):
            raise ValueError(
                f"reward={reward!r}, success={success!r}, score={score!r}: expected a finite reward, a success from 0 "
                "to 1, and a score >= 0"
            )
        with self.together():
            artifact = self._of(id)
            held = self._contents
            held.plays += 1
            outcome = held.outcome(id).after(reward, float(success), score, plays=held.plays, window=self.window)
            self._put(artifact, outcome)
            if self._file is not None:
                self._file.set_plays(held.plays)
            return outcome

    @logged_method()
    def outcome(self, id: str) -> Outcome:
        """How the attempts at artifact ``id`` went."""
        self.get(id)
        return self._contents.outcome(id)

    def split(self, side: str, *, share: float = 0.1, key: Callable[[Any], Any] | None = None) -> StoreSide:
        """The ``"eval"`` or ``"train"`` side of the store: a live view, which follows what is added and removed.

        The content decides, or what ``key(data)`` makes of it, so data that is added twice lands on one side, today and
        after a reload. ``share`` is how much goes to ``"eval"``, about; name the same for both sides: a second division
        of one store would overlap with the first, and raises ``ValueError``.
        """
        rule = SplitRule(share, key)
        if self._split is not None and not rule.agrees(self._split):
            raise ValueError(
                f"share={share!r}, key={key!r}: the store {self.name!r} was split by share={self._split.share!r}, "
                f"key={self._split.key!r} before, and what was held out then would train now"
            )
        self._split = rule
        return StoreSide(self, rule.check_side(side), rule)

    def frozen(self) -> ArtifactStore:
        """A view for evaluation: today's artifacts, and a generator of its own. What an episode writes is there for it
        and its children alone, and written nowhere."""
        return FrozenStore(self)

    # -- saving --------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; JSON-ready as far as the artifacts' data are. Of a file a revision."""
        self._catch_up()
        state = {
            "added": self._contents.added,
            "plays": self._contents.plays,
            "rng": rng_state(self._rng),
            "split": None if self._split is None else self._split.share,
        }
        if self._file is not None:
            return {**state, **self._file.mark()}
        outcomes = {id: asdict(outcome) for id, outcome in self._contents.outcomes.items()}
        names = ("id", "data", "weight", "source", "meta", "parents", "run")
        artifacts = [{name: getattr(artifact, name) for name in names} for artifact in self]
        return {**state, "artifacts": artifacts, "outcomes": outcomes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be what :meth:`state_dict` described. Raises ``ValueError`` where a file can't go back to it."""
        where, there = ("file", "in a file") if self._file is not None else ("artifacts", "in memory")
        if where not in state:
            raise ValueError(f"state of the store {self.name!r}: it was not saved of a store {there}, as this one is")
        if self._file is not None:
            if others := self._file.go_back(state, state["added"], state["plays"]):
                warnings.warn(
                    f"store {self.name!r}: {others} changes by other runs since the checkpoint stay in {self.path}",
                    stacklevel=2,
                )
            self._catch_up()
            self._inherited = self._file.inherited()
        else:
            self._contents.clear()
            for item in state["artifacts"]:
                artifact = Artifact(**{**item, "parents": tuple(item.get("parents", ()))})
                known = state.get("outcomes", {}).get(artifact.id)
                outcome = UNKNOWN if known is None else Outcome(**known)
                self._contents.keep(artifact, outcome, self._contents.key(artifact))
            self._contents.added, self._contents.plays = state["added"], state.get("plays", 0)
        self._split = None if state.get("split") is None else SplitRule(state["split"], None, any_key=True)
        set_rng_state(self._rng, state["rng"])

    def forget_before(self, state: Mapping[str, Any]) -> None:
        """Let a file forget what only states older than ``state`` need; they can't be loaded any more."""
        if self._file is not None and state.get("file") == self._file.file:
            self._file.forget_before(state["revision"])

    # -- inside --------------------------------------------------------------------------------------------------------
    def _catch_up(self) -> None:
        """Take over what other processes changed in the file; at first and after going back everything."""
        news = None if self._file is None else self._file.news()
        if news is not None:
            self._contents.take(news)

    def _of(self, id: str) -> Artifact:
        if id not in self._contents.artifacts:
            raise KeyError(f"the store {self.name!r} has no artifact {id!r}")
        return self._contents.artifacts[id]

    def _remove(self, id: str) -> None:
        self._contents.drop(id)
        if self._file is not None:
            self._file.remove(id)

    def _put(self, artifact: Artifact, outcome: Outcome) -> None:
        self._contents.put(artifact.id, outcome)
        if self._file is not None:
            self._file.put(artifact, outcome)

    def _pool(self) -> Pool:
        self._catch_up()
        held = self._contents
        if self._drawn is None or self._drawn[0] is not held or self._drawn[1] != held.version:
            outcomes = [held.outcome(id) for id in held.artifacts]
            pool = Pool(list(held.artifacts.values()), outcomes, held.plays, self.sampling)
            self._drawn = held, held.version, pool
        return self._drawn[2]

    def _free_id(self) -> str:
        names = (f"{self.name}-{number}" for number in itertools.count(self._contents.added))
        return next(name for name in names if name not in self._contents.artifacts)


class FrozenStore(ArtifactStore):
    """A store as evaluation sees it, and as good as the store to an episode.

    What a top episode or one below it writes is laid over today's artifacts for these alone, so no result depends on
    which episode ran first; outside of episodes it is gone with the ``with store.together()`` that it is written in.
    """

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(
            store.name, max_size=store.max_size, dedup=store.dedup, sampling=store.sampling, window=store.window
        )
        store._catch_up()
        self._held = store._contents.copied()
        self._inherited, self._split = store.inherited, store._split
        self._run, self._layers = store.run, dict[int | None, Contents]()

    @property
    def run(self) -> str | None:
        return self._run

    @property
    def _contents(self) -> Contents:
        return self._layers.get(_root(), self._held)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        root = _root()
        outermost = root not in self._layers
        if outermost:
            self._layers[root] = self._held.layer()
        try:
            yield
        finally:
            if outermost and root is None:
                del self._layers[root]


def _root() -> int | None:
    """The number of the running top episode."""
    context = current_context()
    return None if context is None else context.root


def _check_weight(weight: float) -> None:
    if not weight >= 0 or weight == float("inf"):
        raise ValueError(f"weight={weight!r}: expected a finite number >= 0")
