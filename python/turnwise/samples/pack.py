"""Packs samples into the trainer's batch, and selects rows of one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

import numpy as np

from turnwise.samples.collect import step_name
from turnwise.samples.training_samples import Drops
from turnwise.types import Column, Sample, TrainingBatch
from turnwise.types.columns import Places
from turnwise.types.prompts import TOKENS, Prefix, prompt_tokens

K = TypeVar("K", bound=Hashable)

MAX_TOKEN_ID = 2**31 - 1


def pack(samples: Sequence[Sample], drops: Drops, metrics: dict[str, float]) -> TrainingBatch:
    """Pack samples as columns, see :class:`TrainingBatch`. No samples give an empty batch.

    All completion tokens train, the stop token included, unless a sample has a loss mask ``[C]`` of 0 and 1, or its
    grammar allowed only one token there. The batch has the columns that any sample has. Raises ``ValueError`` or
    ``TypeError`` with the step's name for an invalid token id, a log-probability that is not finite, and lengths that
    differ.
    """
    prompts, completion_ids, logprobs, lengths = _join(samples)
    contexts, columns, lengths = _cut(samples, prompts, lengths)
    targets, of_completion = completion_ids, np.ones(len(completion_ids), dtype=bool)
    if lengths[:, 0].any():
        of_completion = np.repeat(np.tile([False, True], len(samples)), lengths.ravel())
        targets = np.zeros(len(of_completion), dtype=np.int64)
        targets[of_completion] = completion_ids
        ends = [prompt.behind(len(context)) for prompt, context in zip(prompts, contexts, strict=True)]
        targets[~of_completion] = np.concatenate(ends)
    target_logprobs = np.zeros(len(targets), dtype=np.float32)
    target_logprobs[of_completion] = logprobs
    mask = of_completion.astype(np.uint8)
    _set_own_masks(mask, samples, lengths)
    for column in columns.values():
        mask = column.trained(mask)
    actors, actor_index = _index_of_unique([sample.actor for sample in samples])
    policies, policy_index = _index_of_unique([sample.policy for sample in samples])
    return TrainingBatch(
        contexts=contexts,
        targets=targets,
        cu_targets=np.concatenate([np.zeros(1, dtype=np.int64), lengths.sum(axis=1).cumsum()]),
        target_mask=mask,
        target_logprobs=target_logprobs,
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float32),
        rewards=np.array([sample.reward for sample in samples], dtype=np.float32),
        temperatures=np.array([sample.temperature for sample in samples], dtype=np.float32),
        actor_index=actor_index,
        policy_index=policy_index,
        min_version=np.array(_oldest([sample.policy_versions for sample in samples]), dtype=np.int64),
        actors=actors,
        policies=policies,
        drops=drops,
        metrics=metrics,
        columns=columns,
    )


def _oldest(spans: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    try:
        return [version for ((_, version),) in spans]  # nearly always, one version sampled all of a completion
    except ValueError:
        return [min([version for _, version in each]) for each in spans]


def _cut(
    samples: Sequence[Sample], prompts: list[Prefix[int]], lengths: np.ndarray
) -> tuple[list[Prefix[int]], dict[str, Column], np.ndarray]:
    """Check and join the columns that any of ``samples`` has. ``lengths [B, 2]`` count prompts and completions.

    Return the prompts without the ends that a column has values of, the columns, and the lengths ``[B, 2]`` of these
    ends and the completions: the targets.
    """
    kinds: dict[str, type[Column]] = {}
    for sample in samples:
        for name, column in sample.columns.items():
            kinds.setdefault(name, type(column))
    contexts, counts = prompts, lengths.copy()
    reading = {name for name, kind in kinds.items() if kind.first is not Column.first}
    if reading:
        for row, sample in enumerate(samples):
            prompt = int(lengths[row, 0])
            for name in reading.intersection(sample.columns):
                counts[row, 0] = min(counts[row, 0], sample.columns[name].first(prompt))
        contexts = [prompt.first(length) for prompt, length in zip(prompts, counts[:, 0].tolist(), strict=True)]
    counts[:, 0] = lengths[:, 0] - counts[:, 0]

    def join(name: str, kind: type[Column]) -> Column:
        parts = [sample.columns.get(name) for sample in samples]
        return kind.checked(parts, lengths, counts, lambda row: f"{step_name(samples[row])}: {name}")

    return contexts, {name: join(name, kind) for name, kind in kinds.items()}, counts


def _join(samples: Sequence[Sample]) -> tuple[list[Prefix[int]], np.ndarray, np.ndarray, np.ndarray]:
    """Return the prompts, the token ids ``[N]`` int64 and log-probabilities ``[N]`` float32 of all completions in turn,
    and the lengths ``[B, 2]`` of each prompt and completion."""
    given = [prompt_tokens(sample) for sample in samples]
    ids = [sample.completion_token_ids for sample in samples]
    values = [sample.rollout_logprobs for sample in samples]
    try:
        prompts = [each if type(each) is Prefix else _as_prompt(each) for each in given]
        of_prompts = [prompt.length + len(prompt.tail) for prompt in prompts]
        lengths = np.array([of_prompts, list(map(len, ids))], np.int64).T.copy()
        valid = list(map(len, values)) == lengths[:, 1].tolist()
        if valid:
            token_ids, logprobs = _flat(ids, "q"), _flat(values, "f")
            valid = len(token_ids) == len(logprobs) == lengths[:, 1].sum()
            valid = valid and _are_ids(token_ids) and _are_ids(_tokens_of(prompts))
            valid = valid and bool(np.isfinite(logprobs).all())
    except (TypeError, OverflowError):
        valid = False
    if not valid:
        for sample in samples:
            _check_lists(sample)
        raise RuntimeError("a sample's token ids or log-probabilities changed while they were packed")
    return prompts, token_ids, logprobs, lengths


def _as_prompt(ids: Any) -> Prefix[int]:
    """Return a prompt's token ids. Raises ``TypeError`` and ``OverflowError`` for what is none."""
    whole = _flat([ids], "q")
    if len(whole) != len(ids) or not _are_ids(whole):
        raise TypeError
    return Prefix(None, 0, array(TOKENS, whole.astype(np.int32).tobytes()))


def _tokens_of(prompts: Sequence[Prefix[int]]) -> np.ndarray:
    """Return the tokens ``[n]`` int32 of all prompts in any order, what several share once."""
    shared: dict[int, tuple[Any, int]] = {}
    for prompt in prompts:
        if prompt.shared is not None:
            _, length = shared.get(id(prompt.shared), (None, 0))
            shared[id(prompt.shared)] = prompt.shared.items, max(length, prompt.length)
    parts = [items[:length] for items, length in shared.values()]
    parts += [prompt.tail for prompt in prompts]
    return np.frombuffer(b"".join(parts), np.int32)


def _are_ids(ids: np.ndarray) -> bool:
    return bool(ids.min(initial=0) >= 0 and ids.max(initial=0) <= MAX_TOKEN_ID)


_CODES: dict[str, tuple[Any, str]] = {"q": (np.int64, "iu"), "f": (np.float32, "iuf"), "d": (np.float64, "biuf")}
"""Type codes of ``array``, with NumPy's type and the kinds of arrays that it takes."""


def _flat(parts: Sequence[Any], code: str) -> np.ndarray:
    """Join sequences of numbers to one array of a type code: ``"q"`` int64, ``"f"`` float32, ``"d"`` float64.

    Arrays are copied by their buffers. ``array`` reads lists, as it takes less time than NumPy, and rejects floats as
    token ids. Raises ``TypeError`` and ``OverflowError`` for what is no such number.
    """
    dtype, kinds = _CODES[code]
    types = set(map(type, parts))
    if not types <= {list, tuple}:
        try:
            joined = np.concatenate(parts if types == {np.ndarray} else [_array(part, code) for part in parts])
        except ValueError:  # not all of them have one axis
            joined = np.empty((0, 0))
        if joined.ndim == 1 and joined.dtype.kind in kinds:
            with np.errstate(over="ignore"):  # infinite log-probabilities are found later
                return joined.astype(dtype, copy=False)
    numbers = array(code)
    read = numbers.fromlist
    for part in parts:
        read(part if type(part) is list else list(part))
    return np.frombuffer(numbers, dtype)


def _array(part: Any, code: str) -> np.ndarray:
    """Return an array of any type as NumPy's, and the numbers of a list as one."""
    if isinstance(part, np.ndarray):
        return part
    if isinstance(part, array):
        return np.asarray(part)
    if hasattr(part, "__array__"):
        try:
            return np.asarray(part.__array__())
        except (TypeError, RuntimeError):  # a tensor on a GPU, or with a gradient
            pass
    return np.array(array(code, list(part)))


def _check_lists(sample: Sample) -> None:
    """Raise an error for the first of the sample's token ids and log-probabilities that is invalid."""
    name = step_name(sample)
    prompt, completion, logprobs = sample.prompt_token_ids, sample.completion_token_ids, sample.rollout_logprobs
    columns: dict[str, Sequence[float]] = {
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "logprobs": logprobs,
    }
    for column, values in columns.items():
        if not hasattr(values, "__len__"):
            raise TypeError(f"{name}: {column}={values!r:.80}: expected a list")
    if len(completion) != len(logprobs):
        raise ValueError(
            f"{name}: expected equal lengths, "
            f"got {len(completion)} completion tokens, {len(logprobs)} log-probabilities"
        )
    for column, values in columns.items():
        code, expected = "q", f"a token id, a whole number from 0 to {MAX_TOKEN_ID}"
        if column == "logprobs":
            code, expected = "f", "a log-probability, a finite number"
        for index, value in enumerate(values):
            error: type[Exception] | None = None
            try:
                [number] = array(code, [value])
                if not (isfinite(number) if code == "f" else 0 <= number <= MAX_TOKEN_ID):
                    error = ValueError
            except TypeError:
                error = TypeError
            except OverflowError:
                error = ValueError
            if error is not None:
                raise error(f"{name}: {column}[{index}]={value!r:.80}: expected {expected}")


def _set_own_masks(loss_mask: np.ndarray, samples: Sequence[Sample], lengths: np.ndarray) -> None:
    """Set the places of the completions that bring a mask in ``loss_mask [N]`` uint8. ``lengths`` are those of targets.

    Raises ``ValueError`` unless each has a 0 or 1 per token.
    """
    rows = [row for row, sample in enumerate(samples) if sample.loss_mask is not None]
    if not rows:
        return
    masks: list[Any] = [samples[row].loss_mask for row in rows]
    try:
        values = _flat(masks, "d") if list(map(len, masks)) == lengths[rows, 1].tolist() else None
        valid = values is not None and bool(((values == 0) | (values == 1)).all())
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        given = [_check_loss_mask(samples[row].loss_mask, lengths[row, 1], step_name(samples[row])) for row in rows]
        values = np.concatenate(given)
    own = np.zeros(lengths.shape, dtype=bool)
    own[rows, 1] = True
    loss_mask[np.repeat(own.ravel(), lengths.ravel())] = values


def _check_loss_mask(mask: Any, length: int, name: str) -> np.ndarray:
    """Return the loss mask of a row as ``[C]`` uint8. Raises ``ValueError`` unless it has a 0 or 1 per token."""
    given = np.asarray(mask)
    if given.shape != (length,):
        raise ValueError(
            f"{name}: expected equal lengths, got {length} completion tokens and log-probabilities, "
            f"loss_mask of shape {given.shape}"
        )
    trains = np.equal(given, 1)
    if not (trains | np.equal(given, 0)).all():
        raise ValueError(f"{name}: loss_mask={mask!r:.80}: expected 0 or 1 for each token")
    return trains.astype(np.uint8)


def _index_of_unique(names: Sequence[K]) -> tuple[list[K], np.ndarray]:
    """Return the distinct ``names`` in order of appearance, and each name's index among them, ``[B]`` int64."""
    distinct = list(dict.fromkeys(names))
    index_of = {name: index for index, name in enumerate(distinct)}
    return distinct, np.fromiter(map(index_of.__getitem__, names), dtype=np.int64, count=len(names))


TARGET_FIELDS = ("targets", "target_mask", "target_logprobs")
ROW_FIELDS = ("advantages", "rewards", "temperatures", "actor_index", "policy_index", "min_version")
"""Fields of a batch with a value per target, and per row."""


def select(batch: TrainingBatch, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
    """Select rows of ``batch`` by indices, in their order, or by a mask ``[B]``.

    ``actors`` and ``policies`` stay whole, so that their indices stay valid. ``drops`` and ``metrics`` do not change.
    """
    chosen = np.arange(len(batch))[np.asarray(rows, dtype=None if len(rows) else np.int64)]
    counts = np.diff(batch.cu_targets)[chosen]
    ends = counts.cumsum()
    places = Places(chosen, np.arange(counts.sum()) + np.repeat(batch.cu_targets[chosen] - (ends - counts), counts))
    fields: dict[str, Any] = {name: getattr(batch, name)[places.tokens] for name in TARGET_FIELDS}
    fields["contexts"] = [batch.contexts[row] for row in chosen.tolist()]
    fields |= {name: getattr(batch, name)[chosen] for name in ROW_FIELDS}
    fields["cu_targets"] = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    fields["columns"] = {name: column.select(places) for name, column in batch.columns.items()}
    return replace(batch, **fields, drops=dict(batch.drops))


def drop_stale(batch: TrainingBatch, oldest: Mapping[str, int]) -> TrainingBatch:
    """Drop the rows with a token sampled by weights older than ``oldest[policy]``, and count them as ``stale``.

    Example: ``drop_stale(batch, {"default": trainer_version - max_staleness})``

    Policies that are not in ``oldest`` have no bound. A batch without stale rows is returned as it is.
    """
    unbounded = np.iinfo(np.int64).min
    bounds = np.array([oldest.get(policy, unbounded) for policy in batch.policies], dtype=np.int64)
    fresh = batch.min_version >= bounds[batch.policy_index]
    if fresh.all():
        return batch
    kept = select(batch, fresh)
    stale = Counter((batch.actors[index], "stale") for index in batch.actor_index[~fresh])
    kept.drops = dict(Counter(kept.drops) + stale)
    return kept
