"""Make a tiny Qwen3-style model and its tokenizer from scratch: no network, no download, seconds on one core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BYTES = 256

# One token opens a message and names its role, and one closes it. So three messages cost six tokens plus their text.
# Tools are part of the system's message, a call is text of the assistant, and a result is a message of the user.
CHAT_TEMPLATE = (
    "{% set ns = namespace(tools='') %}"
    "{% for tool in tools or [] %}"
    "{% set ns.tools = ns.tools + '\n' + tool.function.name + '(' "
    "+ (tool.function.parameters.properties or {}) | join(', ') + ')' %}"
    "{% endfor %}"
    "{% if ns.tools and messages[0]['role'] != 'system' %}{{ '<|system|>' + ns.tools + '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role ' + message['role'] + ': expected system, user, assistant or tool') }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'system' %}{{ ns.tools }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' "
    "+ call.function.arguments | tojson + '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on ``texts``. Equal texts give equal tokenizers.

    Each digit, newline and punctuation mark is its own token, so a grid or a number never merges with its
    surroundings. The vocabulary holds the five special tokens, the 256 bytes and then merges, at most ``vocab_size``
    (fewer for small texts). The end of a turn is the end-of-sequence token; padding is on the left. A chat with an
    unknown role raises.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size!r}: expected at least {smallest} (256 bytes and the special tokens)")
    # Split digits, newlines and punctuation off before the merges, so that no merge crosses them.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9\r\n]"), behavior="isolated"),
            pre_tokenizers.Punctuation(behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    # All 256 bytes are in the vocabulary, so the tokenizer can encode any text.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 128,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = True,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """Make a float32 Qwen3 model with random weights for ``tokenizer``: 0.85M parameters by default.

    Equal arguments give equal weights. Torch's global random state stays unchanged. Raises ``ValueError`` for widths
    and depths that do not fit together.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads={num_key_value_heads!r}: expected a divisor of "
            f"num_attention_heads={num_attention_heads!r}"
        )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        attention_dropout=0.0,
        dtype="float32",
    )
    # Draw the weights from ``seed`` without a change to the global random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()
