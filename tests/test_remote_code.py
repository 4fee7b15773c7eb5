"""A model folder's Python never runs: transformers would ask at a terminal, and a ``y`` would run it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import turnwise
from turnwise.run.models import _dtype_of_files, _is_here
from turnwise.train.config.policies import PolicyConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import check_models, load_model

PACKAGE = Path(turnwise.__file__).parent
ROOT = Path(__file__).parents[1]
DATA = {"GenerationConfig", "LoraConfig"}
"""Classes that read data alone: they know no remote code."""
LORA = {"LoraConfig"}
"""Read by ``peft``, after a check of its own."""
LOADER = PACKAGE / "inference" / "common" / "model_files.py"
"""The file that checks the sizes of a model's files, and reads them."""


def test_models_are_read_at_one_place_which_checks_the_sizes_of_their_files():
    found = [
        f"{path}:{call.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path != LOADER and "examples" not in path.relative_to(PACKAGE).parts
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _reads(call.func)
    ]
    assert found == []
    functions = {each.name: ast.unparse(each) for each in ast.parse(LOADER.read_text()).body if hasattr(each, "args")}
    readers = [text for text in functions.values() if ".from_pretrained(" in text]
    assert len(readers) == 4 and all("check_sizes(path)\n" in text.split(".from_pretrained(")[0] for text in readers)


def _reads(function: ast.Attribute) -> bool:
    owner = ast.unparse(function.value).rpartition(".")[2]
    return function.attr in ("from_pretrained", "from_config") and (owner.startswith("Auto") or owner in DATA - LORA)


def test_every_load_of_a_model_or_data_set_refuses_remote_code():
    bare = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _loads(call.func):
                given = {word.arg: word.value for word in call.keywords}.get("trust_remote_code")
                if not (isinstance(given, ast.Constant) and given.value is False):
                    bare.append(f"{path}:{call.lineno}")
    assert bare == []


def _loads(function: ast.Attribute) -> bool:
    owner = ast.unparse(function.value).rpartition(".")[2]
    from_config = function.attr == "from_config" and owner.startswith("Auto")
    return from_config or function.attr == "load_dataset" or (function.attr == "from_pretrained" and owner not in DATA)


@pytest.mark.parametrize(
    "load",
    [
        lambda path: check_models({"team": PolicyConfig(path=path)}, pytest.fail),
        lambda path: load_model(path, "float32", pytest.fail),
        lambda path: load_model(path, "float32", pytest.fail, empty=True),
        _dtype_of_files,
        lambda path: not _is_here(path) or load_model(path, "float32", pytest.fail),
    ],
    ids=["tokenizer", "model", "empty", "dtype", "is here"],
)
def test_code_of_a_folder_is_refused_without_a_question(tmp_path, monkeypatch, load):
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Config", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": names}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    with pytest.raises((ValueError, ConfigError), match="custom code"):
        load(str(tmp_path))
    assert not asked and not ran.exists()
