"""A policy: named weights with their optimizer, their learning rate and their log-probabilities."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.inference.common.hf_model import count_tokens, limit_head, recompute_layers, recomputes
from turnwise.inference.weights.lora import AdaptedModel, SharedBase
from turnwise.train.config.policies import OptimizerConfig
from turnwise.train.config.schedule import RunPlace
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import SINGLE_RANK, MicroBatch, explain_out_of_memory, micro_batches, smallest
from turnwise.train.model.support import causal_lm, drops_out, linear_bytes_per_token
from turnwise.train.model.weights import MasterWeights, bit_sums, count_not_finite, named_parameters, named_weights
from turnwise.types import ByPolicy, Tokenizers, TrainingBatch
from turnwise.types.passes import ENTROPIES, LOGPROBS, Needs, Read
from turnwise.utils.memory import memory_capacity

_SHARES = {"cuda": 0.5, "cpu": 0.25}
"""Share of the memory left by weights and optimizer that activations may take; a CPU's has other users, too."""
_ADDS_WIDE = {"cuda"}
"""Devices whose products of narrow matrices add to float32. A CPU would round each product first, and then add it."""
_BACKWARD = 2.0
"""Peak of a backward pass over the activations that it reads."""
_FEWEST, _MAX = 7, 14
"""Exponents of the smallest and the largest automatic micro-batch."""


class TrainedHead(NamedTuple):
    """A module that trains with a policy's model, with its peak learning rate."""

    module: Any
    lr: float


class Policy:
    """Weights behind one or more actors.

    ``model`` is a Hugging Face causal LM or an :class:`AdaptedModel`; then only the adapter belongs to the policy, not
    the shared base. ``trainable=False`` builds no optimizer. ``reference`` is the frozen model of a KL term;
    ``with_reference`` makes one of the starting weights: for an adapter its base with adapters off.
    ``total_steps`` is the planned number of updates, over which the learning rate falls; a run, where steps may have
    fewer, calls :meth:`follow_run`. ``layout`` is the rows' layout in the forward pass (a key of
    ``turnwise.train.model.forward.LAYOUTS``). ``head_memory`` bounds the bytes of the head's logits. Updates use
    dropout only if ``dropout`` is set; the sampler uses none.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        total_steps: int,
        trainable: bool = True,
        with_reference: bool = False,
        reference: nn.Module | None = None,
        layout: str = "auto",
        dropout: bool = False,
        head_memory: int | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.trainable = trainable
        self.version = 0
        self.updates = 0
        self.skipped = 0  # updates in a row that were not finite
        self.is_stepping = False  # an optimizer step has begun and not ended
        self.terms: Any = None  # the terms of its loss, once an update or a learner needs them
        self.heads: dict[str, TrainedHead] = {}  # modules that train with the model, by name
        self.reads: list[Policy] = []  # other policies whose distributions its updates read
        self._auto_tokens: int | None = None  # tokens of a micro-batch, once chosen
        self._halved = False
        self.max_grad_norm = config.max_grad_norm
        self.ranks = SINGLE_RANK  # the processes that hold its shards
        if with_reference and reference is None:
            reference = model.shared.plain() if isinstance(model, AdaptedModel) else copy.deepcopy(model)
        # Models and their forward passes.
        self.reference = None if reference is None else reference.requires_grad_(False).eval()
        self.check_finite("at the start")
        if trainable and any(parameter.dtype == torch.float16 for parameter in model.parameters()):
            raise ValueError(f"policy {name!r}: float16 is too narrow to train in; expected bfloat16 or float32")
        self.model.requires_grad_(trainable)
        self.dropout = dropout
        self._set_mode(dropout)
        self.forward: Any = Forward(model, layout, dropout=dropout and trainable, head_memory=head_memory)
        self.reference_forward: Any = (
            None if self.reference is None else Forward(self.reference, layout, head_memory=head_memory)
        )
        self.optimizer: torch.optim.AdamW | None = None
        self._config, self._place = config, RunPlace(total_steps)
        self.masters = MasterWeights(())
        self.computes_in: dict[str, torch.dtype] = {}  # dtype of sharded weights in a pass, if it is another one
        self.build_optimizer()

    def release(self) -> None:
        """End the training of this policy, and give back the memory for it: masters, gradients and moments."""
        self.discard_gradient()
        self.masters.drop()
        self.optimizer = None

    def _set_mode(self, dropout: bool) -> None:
        """Let layers recompute in evaluation mode too, and warn of the effect of ``dropout``."""
        if recomputes(lm := causal_lm(self.model if self.base is None else self.base.model)):
            recompute_layers(lm) if self.base is None else self.base.enable_gradient_checkpointing()
        drops = drops_out(self.model) if self.trainable else {}
        if dropout and drops:
            listed = ", ".join(f"{name} = {share:g}" for name, share in drops.items())
            text = f"updates use dropout ({listed}), so the ratio of the first update is not 1"
        elif "lora_dropout" in drops and not dropout:
            text = f"lora.dropout = {drops['lora_dropout']:g} has no effect, as updates run without dropout"
        else:
            return
        warnings.warn(f"policy {self.name!r}: {text}", RuntimeWarning, stacklevel=3)

    def build_optimizer(self) -> None:
        """Make a new optimizer of the present parameters, unless the policy is frozen."""
        config = self._config
        self.masters.drop()
        if self.trainable:
            self.masters = MasterWeights(self._own_parameters())
            groups: list[dict[str, Any]] = [{"params": self.trained_parameters(), "peak": config.lr}]
            for head in self.heads.values():
                groups.append({"params": list(head.module.parameters()), "peak": head.lr, "weight_decay": 0.0})
            self.optimizer = torch.optim.AdamW(
                groups, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
            )

    def add_head(self, name: str, module: Any, lr: float) -> None:
        """Train ``module`` with the policy, at the peak rate ``lr``. The optimizer starts again."""
        self.heads[name] = TrainedHead(module, lr)
        self.build_optimizer()

    def read(self, micro: MicroBatch, needs: Needs = LOGPROBS) -> Read:
        """Return what is needed of each packed completion token (:class:`~turnwise.types.passes.Read`)."""
        read: Read = self.forward.read(micro, needs)
        return read._replace(reference_N=self.reference_logprobs(micro)) if needs.reference else read

    def head_gradient(self) -> Tensor | None:
        """Return the gradient ``[V, H]`` of the head's master, to which a loss may add; ``None`` without one."""
        lm = causal_lm(self.model if self.base is None else self.base.model)
        weight = lm.get_output_embeddings().weight
        master = self.masters.of(weight)
        if master is weight or not weight.requires_grad or weight.device.type not in _ADDS_WIDE:
            return None
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> Any:
        """Return log-probs ``[N]``; with ``entropy`` a pair of them and the entropies ``[N]``."""
        read = self.read(micro, ENTROPIES if entropy else LOGPROBS)
        return (read.logprobs_N, read.entropies_N) if entropy else read.logprobs_N

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        """Return log-probs ``[N]`` under the reference, with its own experts; ``None`` if the policy has none."""
        return (
            None
            if self.reference_forward is None
            else self.reference_forward.read(micro.for_another_model()).logprobs_N
        )

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Give the reference the policy's present weights."""
        assert self.reference is not None, f"policy {self.name!r} has no reference"
        for (_, tensor), (_, weight) in zip(named_weights(self.reference), named_weights(self.model), strict=True):
            tensor.copy_(weight)

    def cut(self, batch: TrainingBatch, rows: np.ndarray, max_tokens: int) -> list[MicroBatch]:
        """Cut ``rows`` of ``batch`` into micro-batches of at most ``max_tokens`` tokens, the same on every rank.

        Their number is a multiple of the number of ranks, if the rows allow it.
        """
        size, trie_share = self.ranks.size, self.trie_share
        # A padded block is one pass through the model, and all ranks make equally many.
        blocks = size > 1 and not all(forward.packed for forward in self.forwards())
        micros = micro_batches(batch, rows, max_tokens, trie_share=trie_share, blocks=blocks)
        if len(micros) % size:
            wanted = -(-len(micros) // size) * size
            fewer = max(1, -(-sum(micro.num_tokens for micro in micros) // wanted))
            micros = micro_batches(batch, rows, min(fewer, max_tokens), trie_share=trie_share, blocks=blocks)
        return micros

    def micro_batch_tokens(self, configured: int | str) -> int:
        """Return the most tokens of a micro-batch: ``configured``, or for ``"auto"`` what fits this machine's memory.

        ``"auto"`` is a power of two up to 16,384. It depends on the model and on the machine's whole memory, not on
        what is free at the moment, and a checkpoint keeps it: so equal runs have equal bits.
        """
        if not isinstance(configured, int):
            if self._auto_tokens is None:
                self._auto_tokens = min(self.ranks.gather([self._fitting_tokens()]))
            configured = self._auto_tokens
        return max(1, configured // 2) if self._halved else configured

    def halve_micro_batches(self, micros: Sequence[MicroBatch]) -> bool:
        """Discard the gradient of an update of ``micros`` that ran out of memory, and halve them from now on.

        Return False if that can't help: they are halved already, have one row each, or other ranks wait in their pass.
        """
        if self._halved or self.ranks.size > 1 or all(len(micro.lengths) == 1 for micro in micros):
            return False
        self.discard_gradient()
        self._halved = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"policy {self.name!r}: memory ran out in a micro-batch of {max(m.num_tokens for m in micros)} tokens, so "
            "update.micro_batch_tokens is halved for the rest of the run; set it to a smaller number",
            RuntimeWarning,
            stacklevel=2,
        )
        return True

    def _fitting_tokens(self) -> int:
        """Return a power of two of tokens whose activations fit a share of the memory left by weights and AdamW."""
        if self.device.type == "cuda":
            memory, share = float(torch.cuda.get_device_properties(self.device).total_memory), _SHARES["cuda"]
        else:  # the ranks of a machine share its memory
            memory, share = memory_capacity() / self.ranks.size, _SHARES["cpu"]
        lm = causal_lm(self.model if self.base is None else self.base.model)
        used = sum(parameter.numel() * parameter.element_size() for parameter in lm.parameters())
        used += sum(parameter.numel() * 16 for parameter in self.trained_parameters() if self.trainable)
        free = share * max(0.0, memory - used / self.ranks.size)
        # A trial would fragment the memory of a rank, and all ranks would have to make it together.
        whole = isinstance(self.forward, Forward)  # a shard, of one process too, has no pass outside of its root
        per_token = self.forward.bytes_per_token() if whole else linear_bytes_per_token(lm)
        tokens = free / (_BACKWARD * per_token)
        return int(2 ** np.clip(np.floor(np.log2(max(tokens, 1.0))), _FEWEST, _MAX))

    def over_stream(self, length: int, micros: Sequence[MicroBatch], read: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Return ``read`` of all ``micros`` as values per token of the batch's stream; 0 for the others.

        ``read`` returns ``[N, ...]`` of a micro-batch, and the result is ``[length, ...]``.

        Each rank reads its own micro-batches, and gets the values of all.
        """
        stream: Tensor | None = None
        for index in self.ranks.indices(len(micros)):
            micro = (smallest(micros) if index is None else micros[index]).to(self.device)
            with explain_out_of_memory(micro):
                values = read(micro)
            stream = values.new_zeros(length, *values.shape[1:]) if stream is None else stream
            if index is not None:
                stream[micro.token_N] = values
        return self.ranks.total(torch.zeros(length, device=self.device) if stream is None else stream)

    def step(self) -> float:
        """Clip the gradient, take one optimizer step, and return the norm before clipping.

        Raises ``FloatingPointError`` for a gradient that is not finite; the weights then stay as they are.
        """
        assert self.optimizer is not None, f"policy {self.name!r} is frozen"
        clipped: Any = nn.utils.clip_grad_norm_(self.trained_parameters(), self.max_grad_norm)
        norm = float(clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"policy {self.name!r}: gradient norm is {norm} at update {self.updates}")
        self.is_stepping = True
        factor = self._place.rate(self._config, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        self.masters.write()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.is_stepping = False
        return norm

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        assert self.optimizer is not None, f"policy {self.name!r} is frozen"
        return self._config.lr * self._place.rate(self._config, self.updates)

    def follow_run(self, share: float) -> None:
        """Set the learning rate's place to ``share`` of the run, 0 to 1; the step's updates go on from there.

        A run calls this before each step, as steps without an update, and skipped updates, also bring it nearer to its
        end.
        """
        self._place.follow(min(1.0, share), self.updates)

    def discard_gradient(self) -> None:
        """Skip an update: weights and optimizer stay as they are."""
        assert self.optimizer is not None, f"policy {self.name!r} is frozen"
        self.optimizer.zero_grad(set_to_none=True)

    def extra_state(self) -> dict[str, Any]:
        """Return the JSON-serialisable state that a checkpoint keeps beside weights, optimizer and terms."""
        return {"skipped": self.skipped, "auto_tokens": self._auto_tokens, "halved": self._halved}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`extra_state`."""
        self.skipped, self._auto_tokens, self._halved = (state[key] for key in ("skipped", "auto_tokens", "halved"))

    @property
    def trie_share(self) -> float:
        """Largest share of the rows' tokens that a trie may have to be used instead of the rows."""
        return min(float(forward.trie_share) for forward in self.forwards())

    def forwards(self) -> list[Any]:
        """Return all forward passes of its micro-batches: its own, its reference's, and those of policies it reads."""
        reference = [] if self.reference_forward is None else [self.reference_forward]
        return [self.forward, *reference, *(other.forward for other in self.reads)]

    @property
    def device(self) -> torch.device:
        """Device of the forward pass, to which micro-batches must be moved."""
        return self.ranks.device or self.model.get_input_embeddings().weight.device  # type: ignore[operator]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates, for an adapter without its base; masters replace those in
        bfloat16."""
        return self.masters.trained if self.trainable else self._own_parameters()

    def _own_parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def base(self) -> SharedBase | None:
        """The frozen base that this policy shares with others; ``None`` for a full model."""
        return self.model.shared if isinstance(self.model, AdaptedModel) else None

    def fingerprint(self) -> tuple[int, ...]:
        """Return one number per tensor, and per master, to detect changed bits. It does not depend on the number of
        ranks, unless there are masters."""
        return bit_sums([*named_weights(self.model), *self.masters.named()], self.ranks)

    def check_finite(self, when: str) -> None:
        """Raise ``FloatingPointError`` naming the first weight of policy, base or reference that is NaN or infinite."""
        problems: list[str] = []
        # An adapter's reference is its base with adapters off.
        models = {"": self.model, "its base's ": self.base, "its reference's ": self.reference}
        for owner, model in models.items():
            for name, tensor in () if model is None else named_parameters(model):
                if bad := count_not_finite(tensor):
                    problems.append(f"{owner}weight {name!r} is not finite {when}: {bad} of {tensor.numel()}")
                    break
        if problems := self.ranks.gather(problems[:1]):
            raise FloatingPointError(f"policy {self.name!r}: {problems[0]} elements are NaN or infinite")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` of this policy's own weights, as the client gets them: for an adapter without its
        base, in the dtype that computes."""
        for name, tensor in named_weights(self.model):
            yield name, tensor.to(self.computes_in.get(name, tensor.dtype))

    def saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of :meth:`weights` in the dtype that trains: masters instead of rounded weights."""
        return named_weights(self.model, self.masters)

    def all_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` of its own weights and of its shared base, for a client without the base."""
        yield from self.weights()
        if self.base is not None:
            yield from named_weights(self.base)


def limit_heads(policies: Mapping[str, Policy], tokenizer: Tokenizers) -> None:
    """Leave the rows of heads that are no tokens out of the distributions of ``policies`` and their references."""
    counts = ByPolicy.of(tokenizer, "tokenizer").mapped(count_tokens)
    for name, policy in policies.items():
        rows = counts[name]
        for part in ("model", "reference"):  # a policy of other processes may have neither
            limit_head(getattr(policy, part, None), rows)


def fingerprints(policies: Mapping[str, Policy]) -> dict[str, tuple[int, ...]]:
    """Return the fingerprint of each policy by name, and of each shared base as ``"the base of <a policy>"``."""
    bits = {name: policy.fingerprint() for name, policy in policies.items()}
    bases: dict[int, tuple[str, SharedBase]] = {}
    for name, policy in policies.items():
        if policy.base is not None:
            bases.setdefault(id(policy.base), (name, policy.base))
    for name, base in bases.values():
        bits[f"the base of {name}"] = bit_sums(named_weights(base), policies[name].ranks)
    return bits
