"""TRL's ``GRPOTrainer`` with turnwise's forward pass, fused loss and credit rules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

try:
    import trl
    from accelerate.utils import gather_object
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError(f"TRL doesn't import here ({error}): pip install 'turnwise[trl]'") from error

from turnwise.credit.base import Credit
from turnwise.integrations.trl.loss import fused_loss, gather, unsupported_reason
from turnwise.integrations.trl.rows import COLUMNS, RowCredit, RowScorer, check_layout
from turnwise.train.model.support import causal_lm

Base: Any = object  # the methods of the GRPOTrainer that comes after the mixin

TESTED = "1.16."
"""Version of TRL whose private methods are overridden here."""

Scored = tuple[Tensor, Tensor | None]  # log-probs [N] and, on request, entropies [N]
OTHER_INPUTS = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids",
    "token_type_ids", "mm_token_type_ids",
)  # fmt: skip
NOTHING_TRAINS = "none of its tokens trains"


class TurnwiseGRPOMixin(Base):
    """Put before a ``GRPOTrainer`` in a class's bases. The weights and metrics stay those of that trainer.

    - ``sequence_layout``: ``"packed"`` runs each row's tokens without padding, ``"trie"`` runs a prefix that rows share
      once, ``"auto"`` does that where it saves a tenth of the tokens.
    - ``credit``: a rule of :mod:`turnwise.credit`, or its name. It replaces TRL's advantages in training. It reads the
      columns ``question``, ``agent``, ``turn``, ``trajectory``, ``node`` and ``state``, as far as the dataset has them.

    Where turnwise can't compute the same as TRL, TRL's own code runs, with one ``RuntimeWarning`` per cause. Raises
    ``ValueError`` for an unknown layout or rule.

    Example: ``class Mine(TurnwiseGRPOMixin, MyGRPOTrainer): ...``
    """

    def __init__(
        self, *args: Any, sequence_layout: str = "auto", credit: Credit | str | None = None, **kwargs: Any
    ) -> None:
        check_layout(sequence_layout)
        if not trl.__version__.startswith(TESTED):
            text = f"turnwise's loss equals that of TRL {TESTED}x in its tests, and this is TRL {trl.__version__}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self._row_credit = None if credit is None else RowCredit(credit)
        self._rewards: tuple[Tensor, list[dict[str, Any]], list[int]] | None = None
        self._warned: set[str] = set()
        self._scorers: dict[int, RowScorer] = {}
        super().__init__(*args, **kwargs)
        try:
            if reason := self._unsupported_reason():
                raise ValueError(reason)
            for model in (self.model, self.ref_model):
                if model is not None:
                    lm = self._lm(model)
                    self._scorers[id(lm)] = RowScorer(lm, sequence_layout)
        except (ValueError, TypeError) as error:
            if sequence_layout != "auto":
                raise ValueError(f"sequence_layout={sequence_layout!r}: not available, as {error}") from error
            self._fall_back("TRL's forward pass and loss are used", str(error))

    # -----------------------------------------------------------------------------------------------------------------
    # Forward pass
    # -----------------------------------------------------------------------------------------------------------------
    def _lm(self, model: Any) -> Any:
        return causal_lm(self.accelerator.unwrap_model(model, keep_torch_compile=False))

    def _unsupported_reason(self) -> str:
        """Return why turnwise can't score any model; empty if its own checks decide."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return "the model is sharded by FSDP or DeepSpeed"
        if self.args.torch_compile:
            return "torch_compile=True compiles a forward pass that is always the same"
        if self.args.use_transformers_continuous_batching:
            return "use_transformers_continuous_batching=True needs an attention of its own"
        if self.args.cast_lm_head_to_fp32:
            return "cast_lm_head_to_fp32=True changes the LM head"
        if len(set(getattr(self.model, "hf_device_map", {}).values())) > 1:
            return "the model is split over devices"
        return "the loss has an auxiliary term of a mixture of experts" if self.aux_loss_enabled else ""

    def _fall_back(self, what: str, reason: str) -> None:
        """Warn once per cause that TRL's own code is used."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"{type(self).__name__}: {what}, as {reason}", RuntimeWarning, stacklevel=3)

    def _score(self, model: Any, ids: Tensor, attended: Tensor, scored: Tensor, entropy: bool) -> Scored:
        """Return log-probs and, on request, entropies ``[N]`` of the ``scored [B, T]`` tokens, row after row."""
        scorer = self._scorers[id(self._lm(model))]
        micro = scorer.rows(ids, attended, scored, self.temperature)
        with self.accelerator.autocast():
            return model(turnwise_call=lambda: scorer.forward(micro, entropy=entropy))

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return TRL's log-probs and, on request, entropies ``[B, logits_to_keep]``; 0 at padding."""
        kept = attention_mask[:, -logits_to_keep:].bool()
        size, parts = batch_size or len(input_ids), []
        for start in range(0, len(input_ids), size):
            part = slice(start, start + size)
            if not (torch.is_grad_enabled() or kept[part].any()):
                none = torch.zeros(0, device=kept.device)
                parts.append((none, none if compute_entropy else None))
                continue
            if not self._serves(model, attention_mask[part], logits_to_keep, kwargs):
                kwargs |= {"batch_size": batch_size, "compute_entropy": compute_entropy}
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, **kwargs
                )
            scored = torch.zeros_like(attention_mask[part], dtype=torch.bool)
            scored[:, -logits_to_keep:] = kept[part]
            parts.append(self._score(model, input_ids[part], attention_mask[part], scored, compute_entropy))
        logprobs, entropies = zip(*parts, strict=True)
        padded = [
            values[0].new_zeros(kept.shape).masked_scatter(kept, torch.cat(values))
            for values in ((logprobs, entropies) if compute_entropy else (logprobs,))
        ]
        return padded[0], padded[1] if compute_entropy else None, None

    def _serves(self, model: Any, attention_mask: Tensor, logits_to_keep: int, others: dict[str, Any]) -> bool:
        """True if turnwise can score these rows; says reason if not."""
        if id(self._lm(model)) not in self._scorers:
            return False  # the trainer has warned at its start
        reason = ""
        if extra := [name for name, value in others.items() if value is not None and value is not False]:
            reason = f"the model has the inputs {', '.join(extra)}"
        elif not bool(attention_mask[:, :-logits_to_keep].any(1).all()):
            reason = "a prompt is empty"
        elif not bool(attention_mask[:, -logits_to_keep:].any()):
            reason = NOTHING_TRAINS
        if reason:
            self._fall_back("TRL's forward pass and loss are used for a batch", reason)
        return not reason

    # -----------------------------------------------------------------------------------------------------------------
    # Loss
    # -----------------------------------------------------------------------------------------------------------------
    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        prompt_mask, mask = inputs["prompt_mask"], inputs["completion_mask"]
        attended = torch.cat([prompt_mask, mask], dim=1)
        trained = (mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]).bool()
        extra = {name: inputs.get(name) for name in OTHER_INPUTS}
        if reason := unsupported_reason(self, inputs):
            self._fall_back("TRL's loss is used", reason)
        elif not bool(trained.any()):
            self._fall_back("TRL's forward pass and loss are used for a batch", NOTHING_TRAINS)
            reason = NOTHING_TRAINS
        if reason or not self._serves(model, attended, mask.shape[1], extra):
            return super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        scored = torch.cat([torch.zeros_like(prompt_mask, dtype=torch.bool), trained], dim=1)
        logprobs, entropies = self._score(model, ids, attended, scored, entropy=True)
        assert entropies is not None
        return fused_loss(self, inputs, gather(self, inputs, trained, logprobs, entropies), self.model.training)

    # -----------------------------------------------------------------------------------------------------------------
    # Advantages
    # -----------------------------------------------------------------------------------------------------------------
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._row_credit is not None:
            columns = [{name: row[name] for name in COLUMNS if name in row} for row in inputs]
            self._rewards = rewards, columns, [len(ids) for ids in completion_ids_list]
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._row_credit is None or not self.model.training:
            return output
        # Rewards are those of all processes; each takes its own rows' advantages.
        assert self._rewards is not None
        rewards, columns, lengths = self._rewards
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = torch.nan
        advantages = torch.from_numpy(
            self._row_credit(
                total.double().numpy(force=True), gather_object(columns), gather_object(lengths), self.num_generations
            )
        )
        count = len(output["advantages"])
        first = self.accelerator.process_index * count
        output["advantages"] = advantages[first : first + count].to(output["advantages"])
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages))):
            logged.pop()
        logged.extend(advantages.tolist())
        return output


class TurnwiseGRPOTrainer(TurnwiseGRPOMixin, GRPOTrainer):
    """TRL's ``GRPOTrainer`` with :class:`TurnwiseGRPOMixin`: the same arguments, and the mixin's two.

    Example: ``TurnwiseGRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=dataset, credit="dr_mas")``
    """
