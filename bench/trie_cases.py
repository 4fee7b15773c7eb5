"""Batches and methods for ``bench_trie.py``: siblings that share prompts over turns, and four ways to run such rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from train_cases import EagerForward, Trained, updates

from turnwise.ops import linear_logprob
from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import MicroBatch
from turnwise.train.model.prefix_tree import PrefixTree
from turnwise.types import TrainingBatch
from turnwise.types.passes import LOGPROBS, Needs, Read

OBSERVATION = 16  # tokens between a completion and the next turn's
ROWS = 8  # of the longest of which a forward pass holds the tokens; TRL's default rows per pass
SMALL, LARGE = 1_000, 20_000  # tokens below and from which a case runs a model of one layer, for the time it takes
# Below SMALL, which is --quick alone, the layer is also narrow.
LR = 1e-6


class Case(NamedTuple):
    """Rows of ``turns`` turns, each with ``siblings`` completions of one prompt. The next turn's prompt is this one
    with the first completion and an observation after it. With ``shared="no"``, for one turn, each row has its own
    prompt."""

    prompt: int
    completion: int
    siblings: int
    turns: int
    shared: str = "yes"

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        grown = self.turns * (self.turns - 1) // 2 * (self.completion + OBSERVATION)
        return self.siblings * (self.turns * (self.prompt + self.completion) + grown)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return self.turns * (self.completion + OBSERVATION) - OBSERVATION + self.prompt

    @property
    def layers(self) -> int:
        return 4 if SMALL <= self.tokens < LARGE else 1

    @property
    def width(self) -> int:
        return 512 if self.tokens >= SMALL else 64


def make_model(case: Case) -> nn.Module:
    """Build a Qwen3 with random weights, the same at each call. At hidden size 512 the head has a third as many weights
    as the layers, about the share that it has in Qwen3 0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048 * case.layers,
        hidden_size=case.width,
        intermediate_size=3 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64,
        num_key_value_heads=max(1, case.width // 128),
        head_dim=64,
        max_position_embeddings=2 * case.longest,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)


def make_batch(case: Case, seed: int = 0) -> TrainingBatch:
    """Build a batch of random tokens. All completions have one length, so the padded method needs little padding."""
    rng = np.random.default_rng(seed)
    prompt, rows = rng.integers(0, 2048, case.prompt), []
    for _ in range(case.turns):
        answers = rng.integers(0, 2048, (case.siblings, case.completion))
        prompts = [prompt if case.shared == "yes" else rng.integers(0, 2048, case.prompt) for _ in answers]
        rows += list(zip(prompts, answers, strict=True))
        prompt = np.concatenate([prompt, answers[0], rng.integers(0, 2048, OBSERVATION)])
    lengths, count = [len(prompt) + len(answer) for prompt, answer in rows], len(rows)
    return TrainingBatch.of_rows(
        token_ids=np.concatenate([part for row in rows for part in row]),
        cu_seqlens=np.cumsum([0, *lengths]),
        loss_mask=np.concatenate([np.repeat(np.array([0, 1], np.uint8), [len(p), len(a)]) for p, a in rows]),
        rollout_logprobs=np.zeros(sum(lengths), np.float32),
        advantages=rng.normal(size=count).astype(np.float32),
        rewards=np.zeros(count, np.float32),
        temperatures=np.ones(count, np.float32),
        actor_index=np.zeros(count, np.int64),
        policy_index=np.zeros(count, np.int64),
        min_version=np.zeros(count, np.int64),
        actors=["player"],
        policies=["default"],
    )


def unique_tokens(batch: TrainingBatch) -> int:
    """Return the number of tokens in the rows' trie."""
    return len(PrefixTree(batch.token_ids, batch.cu_seqlens, least=0))


# ---------------------------------------------------------------------------------------------------------------------
# PrefixGrouper
# ---------------------------------------------------------------------------------------------------------------------
class PrefixGrouperForward:
    """The package ``prefix_grouper`` (https://arxiv.org/abs/2506.05433), used as in its readme: each prompt once, with
    its completions after it, which shares one level. The head is ours, on the completions' hidden states only."""

    trie_share = 0.0

    def __init__(self, model: nn.Module) -> None:
        from prefix_grouper.utils.register_transformers import register_attention
        from transformers import AttentionInterface

        register_attention()
        AttentionInterface.register("prefix_grouper_sdpa", sdpa_of_padding)
        self.model: Any = model
        self.model.set_attn_implementation("prefix_grouper_attention")

    def read(self, micro: MicroBatch, needs: Needs = LOGPROBS) -> Read:
        from prefix_grouper import PrefixGrouper

        rows = micro.token_ids_T.split(micro.lengths)
        counts = torch.diff(micro.cu_seqlens).tolist()
        groups: dict[bytes, list[int]] = {}
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            groups.setdefault(row[: len(row) - count].numpy().tobytes(), []).append(i)
        order = [i for group in groups.values() for i in group]
        prompts = {group[0]: rows[group[0]][: len(rows[group[0]]) - counts[group[0]]] for group in groups.values()}
        ids, positions = [], []
        for group in groups.values():
            prompt = prompts[group[0]]
            ids.append(torch.cat([prompt, *(rows[i][len(prompt) :] for i in group)]))
            places = [torch.arange(len(prompt), len(rows[i])) for i in group]
            positions.append(torch.cat([torch.arange(len(prompt)), *places]))
        info = [[len(prompts[group[0]]), *(counts[i] for i in group)] for group in groups.values()]
        grouper = PrefixGrouper(info, padding_mode="right")
        hidden = self.model.get_decoder()(
            input_ids=nn.utils.rnn.pad_sequence(ids, batch_first=True),
            position_ids=nn.utils.rnn.pad_sequence(positions, batch_first=True),
            use_cache=False,
            prefix_grouper=grouper,
            prefix_grouper_attn_func="prefix_grouper_sdpa",
        ).last_hidden_state
        _, _, hidden, mask = grouper.split_output(hidden, include_prefix_last=1)
        tokens = torch.arange(len(micro.targets_N)).split(counts)
        token = torch.cat([tokens[i] for i in order])
        result: Any = linear_logprob(
            hidden.flatten(0, 1),
            self.model.get_output_embeddings().weight,
            micro.targets_N[token],
            positions=torch.nonzero(mask[:, 1:].flatten())[:, 0]
            + torch.arange(len(mask)).repeat_interleave(
                mask[:, 1:].sum(1)
            ),  # a row of `hidden` has one place more than completions have tokens
            entropy=needs.entropy,
        )
        logprobs, entropies = result if needs.entropy else (result, None)
        back = token.argsort()
        return Read(logprobs[back], None if entropies is None else entropies[back])


def sdpa_of_padding(module: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, **kwargs: Any) -> Any:
    """Compute causal SDPA for PrefixGrouper, which passes only a padding mask ``[b, K]``, as FlashAttention takes it.
    The last query is at the last key."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    queries, keys = query.shape[2], key.shape[2]
    mask = None
    if queries != keys or not padding.all():
        upto = torch.arange(queries)[:, None] + keys - queries
        at = torch.arange(keys)
        mask = (at <= upto) & padding[:, None, None, :] | (at == upto)  # of its own, so that no row is empty
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=mask is None, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Methods
# ---------------------------------------------------------------------------------------------------------------------
class Method(NamedTuple):
    """A way to run the rows: ``forward`` of the model; with ``whole`` one pass takes all rows, so that rows with one
    prompt stay together."""

    forward: Callable[[nn.Module], Any]
    whole: bool = False


METHODS: dict[str, Method] = {
    "padded": Method(EagerForward),
    "packed": Method(lambda model: Forward(model, "packed")),
    "prefix_grouper": Method(PrefixGrouperForward, whole=True),
    "turnwise trie": Method(lambda model: Forward(model, "trie")),
    "turnwise auto": Method(lambda model: Forward(model, "auto")),
}


def make_trained(name: str, case: Case) -> Trained:
    gc.collect()
    batch, method = make_batch(case), METHODS[name]
    update = UpdateConfig(lr=LR, micro_batch_tokens=case.tokens if method.whole else ROWS * case.longest)
    return updates(make_model(case), batch, update, method.forward)
