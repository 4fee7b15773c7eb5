"""TRL's GRPOTrainer with shared prefixes computed once. Runs in seconds on a CPU: `python trl_trie.py`

Two trainers with equal weights take the same batch in TRL's own form: prompts are padded on the left, completions on
the right. One is TRL's trainer. The other gets its log-probs from `turnwise.train.model.prefix_tree`. Loss and gradient
must be the same.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from turnwise.ops import linear_logprob
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.model.prefix_tree import PrefixTree, use_trees

QUESTIONS, ANSWERS, PROMPT, LONGEST = 2, 8, 200, 24


class TrieTrainer(GRPOTrainer):
    """Replaces the one method of TRL's trainer that runs the model. Supports text only, without an auxiliary loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        use_trees(self.model)  # raises ValueError for unsupported models

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **others
    ) -> tuple[Tensor, Tensor | None, None]:
        assert not any(value is not None and value is not False for value in others.values()), (
            f"only text is supported: {others}"
        )
        lm = self.accelerator.unwrap_model(model)
        real = attention_mask.bool()
        kept = real[:, -logits_to_keep:]
        lengths = kept.sum(1).cpu()
        trie = PrefixTree(input_ids[real].cpu(), torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).cpu())
        self.tokens = (len(trie), trie.num_tokens)

        hidden = lm.get_decoder()(**trie.inputs(lm.device)).last_hidden_state[0]
        found = linear_logprob(
            hidden,
            lm.get_output_embeddings().weight,
            trie.targets(lengths).to(lm.device),
            positions=trie.sources(lengths).to(lm.device),
            temperature=self.temperature,
            entropy=compute_entropy,
        )
        logprobs, entropies = found if compute_entropy else (found, None)
        padded = [torch.zeros(kept.shape, device=lm.device) for _ in range(2)]
        logprobs = padded[0].masked_scatter(kept, logprobs)
        return logprobs, None if entropies is None else padded[1].masked_scatter(kept, entropies), None


def make_trainer(kind: type[GRPOTrainer], model: torch.nn.Module, tokenizer: Any) -> GRPOTrainer:
    with tempfile.TemporaryDirectory() as folder:
        rows = QUESTIONS * ANSWERS
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], temperature=0.9,
            per_device_train_batch_size=rows, num_generations=ANSWERS, max_completion_length=LONGEST, loss_type="grpo",
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": ["1"] * rows})
        return kind(
            model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=data, processing_class=tokenizer,
        )  # fmt: skip


def make_rows() -> dict[str, Tensor]:
    """A batch in TRL's form: prompts and completions of different lengths."""
    prompts, completions = [], []
    for question in range(QUESTIONS):
        prompt = torch.randint(10, 250, (PROMPT - 30 * question,))
        prompts += [prompt] * ANSWERS
        completions += [torch.randint(10, 250, (int(n),)) for n in torch.randint(1, LONGEST + 1, (ANSWERS,))]
    ones = [[torch.ones_like(row) for row in rows] for rows in (prompts, completions)]
    return {
        "prompt_ids": pad(prompts, padding_side="left"),
        "prompt_mask": pad(ones[0], padding_side="left"),
        "completion_ids": pad(completions, padding_side="right"),
        "completion_mask": pad(ones[1], padding_side="right"),
        "advantages": torch.randn(len(prompts)),
        "num_items_in_batch": sum(len(row) for row in completions),
    }


def main() -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer(["0123456789 abcdefghijklmnopqrstuvwxyz"])
    model, rows = build_model(tokenizer), make_rows()
    found = []
    for kind in (GRPOTrainer, TrieTrainer):
        trainer = make_trainer(kind, copy.deepcopy(model), tokenizer)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, dict(rows))
        loss.backward()
        found.append((loss.detach(), [p.grad for p in trainer.model.parameters()]))
    (loss, grads), (ours, our_grads) = found
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    off = torch.cat([(a - b).flatten() for a, b in zip(our_grads, grads, strict=True)]).norm() / norm
    assert off < 1e-5, f"the gradient is off by {off:.2g} of its norm"
    padded = rows["prompt_ids"].numel() + rows["completion_ids"].numel()
    unique, tokens = trainer.tokens
    print(f"loss and gradient are TRL's; {unique} tokens computed of {tokens}, which TRL pads to {padded}")


if __name__ == "__main__":
    main()
