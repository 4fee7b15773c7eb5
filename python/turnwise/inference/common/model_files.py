"""Reads the files of models: nothing else in turnwise loads a model, tokenizer or configuration with transformers.

A file that is too large to be what its name says raises ``ValueError`` before it is read. No code of a folder runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.utils.files import open_regular

MAX_JSON, MAX_VOCABULARY = 64 << 20, 1 << 30
"""Bytes of a configuration or template, and of a vocabulary."""
MAX_HEADER = 16 << 20
"""Bytes of the table of tensors in a file of a model's weights. The largest models have a few hundred thousand."""
HEADER_OF_TENSOR = 1 << 10
"""Bytes of that table for each tensor whose name is known, and for what else stands there."""


def is_local(path: str) -> bool:
    """Return True for what can be no ``owner/name`` of the Hub, or lies in a folder that is there: a folder's path.

    Example: ``./model``, ``/data/model``, ``runs/one/policies/default``, and ``models/one`` if there is a folder
    ``models``.
    """
    folder = Path(path).parent
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or (str(folder) != "." and folder.is_dir())


def read_config(path: str, **options: Any) -> Any:
    """Return the configuration of a folder or of the Hub. Raises ``OSError`` or ``ValueError``."""
    from transformers import AutoConfig

    check_sizes(path)
    return AutoConfig.from_pretrained(path, **options, trust_remote_code=False)


def read_generation_config(path: str) -> Any:
    """Return the generation config of a folder or of the Hub. Raises ``OSError`` if there is none."""
    from transformers import GenerationConfig

    check_sizes(path)
    return GenerationConfig.from_pretrained(path)


def read_tokenizer(path: str) -> Any:
    """Return the tokenizer of a folder or of the Hub. Raises ``OSError`` or ``ValueError``."""
    from transformers import AutoTokenizer

    check_sizes(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def read_model(path: str, dtype: Any) -> Any:
    """Return the causal LM of a folder or of the Hub. Raises ``OSError`` or ``ValueError``."""
    from transformers import AutoModelForCausalLM

    check_sizes(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)


def make_model(config: Any, dtype: Any) -> Any:
    """Return a causal LM of this configuration, with random weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def check_sizes(folder: str | Path) -> None:
    """Raise ``ValueError`` for a file in a model's ``folder`` that is too large to be what it says.

    A model of the Hub is no folder, and is not checked.
    """
    folder = Path(folder)
    for file in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        most = MAX_VOCABULARY if file.name in ("tokenizer.json", "vocab.json") else MAX_JSON
        if file.is_file() and file.stat().st_size > most:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes: expected at most {most}")
    for file in folder.glob("*.safetensors"):
        if file.is_file():
            check_header(file)


def check_header(file: Path, tensors: int | None = None) -> None:
    """Raise ``ValueError`` for a safetensors file whose table is too long for ``tensors``, by default for any model.

    safetensors takes about 2 KB and 30 µs for each tensor that a file names.
    """
    most = MAX_HEADER if tensors is None else (tensors + 64) * HEADER_OF_TENSOR
    with open_regular(file, follow=True) as opened:
        header = int.from_bytes(opened.read(8), "little")
    if header > most:
        wanted = "" if tensors is None else f" for {tensors} tensors"
        raise ValueError(f"{file.name} has a table of {header} bytes: expected at most {most}{wanted}")
