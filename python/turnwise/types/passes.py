"""A pass of the model over a micro-batch: what it needs to read of each token, and what it read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """Selects what a pass reads of each of the ``N`` tokens.

    Example: ``Needs(entropy=True) | Needs(hidden=True)`` reads log-probs, entropies and hidden states
    """

    logprobs: bool = True
    """Log-probs with a gradient. Without them a pass can make a ``loss`` in one pass over the head's logits."""
    entropy: bool = False
    squares: bool = False
    """Sums of squares of all tokens' probabilities."""
    hidden: bool = False
    """Last hidden states of the tokens before, from packed rows."""
    reference: bool = False
    """Log-probs under the policy's reference, if it has one."""
    others_Nk: Tensor | None = None
    """Ids of other tokens whose log-probs are read; those of restricted distributions belong to none."""
    top_k: int = 0
    """Number of most likely tokens to read, without a gradient."""
    rows: int | None = None
    """Number of tokens among which the most likely ones are, those of a smaller head."""
    loss: Mapping[str, Any] | None = None
    """Arguments of :func:`turnwise.ops.linear_policy_loss` behind the head's own: the loss that the pass computes."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.logprobs or other.logprobs,
            self.entropy or other.entropy,
            self.squares or other.squares,
            self.hidden or other.hidden,
            self.reference or other.reference,
            self.others_Nk if other.others_Nk is None else other.others_Nk,
            max(self.top_k, other.top_k),
            self.rows if other.rows is None else other.rows,
            self.loss if other.loss is None else other.loss,
        )


class Restriction(NamedTuple):
    """Tokens whose distribution is over some tokens of the vocabulary alone.

    ``read(pairs, index, targets, temperature)`` returns log-probs and entropies ``[m]`` of the tokens ``index [m]``;
    ``pairs(index [P], ids [P])`` gives the logits ``[P]`` of pairs of a token and an id.
    """

    where_n: Any
    """``[n]`` bool: the tokens."""
    read: Callable[[Callable[[Any, Any], Any], Any, Any, Any], tuple[Any, Any]]


NOTHING, LOGPROBS, ENTROPIES = Needs(logprobs=False), Needs(), Needs(entropy=True)


class Read(NamedTuple):
    """Results of a pass, per token, with gradients; ``None`` for what was not needed.

    ``logprobs_N`` are those of ``log_softmax(logits / temperature)``, over fewer tokens where the sampler had fewer,
    float32 (float64 from a float64 model). Beside a
    ``loss`` they have no gradient. ``loss`` is the :class:`~turnwise.ops.HeadLoss` that was needed; ``None`` if the
    pass could not compute it, and read log-probs instead.
    """

    logprobs_N: Any
    entropies_N: Any = None
    squares_N: Any = None
    hidden_N: Any = None
    others_Nk: Any = None
    top_ids_Nk: Any = None
    top_Nk: Any = None
    reference_N: Any = None
    loss: Any = None
