"""``turnwise export``: checkpoints of both formats as Hugging Face folders, and their way to a hub on the loopback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from turnwise.cli import main as cli
from turnwise.inference.common.norms import fuse_norms
from turnwise.run.export import export_checkpoint
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.checkpoint.checkpoint import SHARDED_FORMAT, save_checkpoint
from turnwise.train.checkpoint.files import fingerprint, read_manifest, write_manifest
from turnwise.train.checkpoint.progress import RunProgress
from turnwise.train.config.toml import to_toml
from turnwise.train.model.export import export_policies
from turnwise.train.model.loading import attach_adapters, build_policies, load_models
from turnwise.train.model.policy import Policy
from turnwise.train.validate import config_from_dict, read_config

from .hub import TOKEN, Hub, serving

IDS = torch.tensor([[5, 3, 9, 100, 7, 1]])
ADAPTERS = ("writer", "editor")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Policy]]:
    """A run folder with a checkpoint at step 2, and its policies: a whole one, two adapters, and their frozen base."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = build_tokenizer(["0123456789 abcdefghijklmnopqrstuvwxyz"])
    model: Any = build_model(tokenizer, seed=3, num_hidden_layers=1)
    model.generation_config = GenerationConfig(temperature=0.25, do_sample=True)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "base")
    path = str(folder / "base")
    config = config_from_dict(
        {
            "run_dir": str(folder),
            "steps": 4,
            "task": "sudoku",
            "actors": {"proposer": "writer", "reviser": "whole"},
            "policies": {
                "whole": {"path": path, "dtype": "bfloat16"},
                **{name: {"path": path, "lora": {"rank": 2}} for name in ADAPTERS},
                "judge": {"path": path, "trainable": False},
            },
        }
    )
    models = attach_adapters(load_models(config.policies, lambda: ()), config.policies, config.seed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("whole", *ADAPTERS):
            for parameter in models[name].parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    policies = build_policies(config, models)
    progress = RunProgress(step=2, episodes=64, sampled_tokens=900, evaluations={"0": 0.25, "2": 0.625})
    save_checkpoint(folder / "checkpoints", 2, policies, {"progress": asdict(progress)})
    (folder / "config.toml").write_text(to_toml(config))
    rows = [{"step": step, "validation": 0.25, "validation/solved": 0.25 * step + 0.25} for step in (0, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export_policies(policies, AutoTokenizer.from_pretrained(path), folder, own_bases=False)
    return folder, policies


@pytest.fixture(scope="module")
def sharded(run: tuple[Path, dict[str, Policy]]) -> Path:
    """The checkpoint with its weights in the files of ``torch.distributed.checkpoint``."""
    whole, path = run[0] / "checkpoints" / "step_00000002", run[0] / "elsewhere" / "step_00000002"
    path.mkdir(parents=True)
    parts = {file.stem: load_file(file) for file in whole.glob("*.safetensors") if file.stem != "rng"}
    state: Any = {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    with pytest.warns(UserWarning):
        dcp.save(state, checkpoint_id=path, no_dist=True)
    manifest = read_manifest(whole, (4,))
    files = {file.name: fingerprint(file) for file in path.iterdir()}
    write_manifest({**manifest, "format": SHARDED_FORMAT, "files": files}, path)
    return path


def export(run_dir: Path, *words: str) -> int:
    return cli.main(["export", str(run_dir), *words])


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module", params=["whole tensors", "shards"])
def exported(run: Any, sharded: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    which = "newest" if request.param == "whole tensors" else str(sharded)
    assert export(run[0], "--checkpoint", which, "--out", str(out), "--merge") == 0
    return out / "policies"


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.log_softmax(-1)


def test_the_files_are_those_that_the_run_exports_at_its_end(run: Any, exported: Path) -> None:
    got = {name: content for name, content in bytes_in(exported).items() if not name.endswith("README.md")}
    assert got == bytes_in(run[0] / "policies")
    assert GenerationConfig.from_pretrained(exported / "whole").temperature == 0.25


@pytest.mark.parametrize("name", ["whole", "judge"])
def test_transformers_loads_the_weights_bit_for_bit(run: Any, exported: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported / name)
    assert model.dtype == (torch.bfloat16 if name == "whole" else torch.float32)
    live = AutoModelForCausalLM.from_pretrained(run[0] / "base", dtype=model.dtype)
    if name == "whole":  # with the attention that transformers chooses, not the trainer's
        live.load_state_dict(run[1][name].model.state_dict())
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in live.state_dict().items())
    assert torch.equal(logprobs(model), logprobs(live))
    assert AutoTokenizer.from_pretrained(exported / name).chat_template


def test_peft_loads_an_adapter_bit_for_bit(run: Any, exported: Path) -> None:
    for name in ADAPTERS:
        live = logprobs(run[1][name].model)
        base = AutoModelForCausalLM.from_pretrained(run[0] / "base")
        fuse_norms(base)  # the run's kernel adds the squares in another order
        assert torch.equal(logprobs(peft.PeftModel.from_pretrained(base, exported / name)), live)
        merged = AutoModelForCausalLM.from_pretrained(exported / name / "merged")
        torch.testing.assert_close(logprobs(merged), live, rtol=1e-5, atol=1e-5)


def test_an_adapter_needs_no_weights_of_its_base(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    from turnwise.run import export as module

    def watched(path: Path, part: Any, manifest: Any, whole: Any = module.read_weight_set) -> Any:
        read.append(part.file)
        return whole(path, part, manifest)

    monkeypatch.setattr(module, "read_weight_set", watched)
    config = read_config(run[0] / "config.toml")
    (one,), manifest = export_checkpoint(config, tmp_path, only=["editor"])
    assert read == ["policy-editor.safetensors"] and manifest["step"] == 2
    assert one.base == str(run[0] / "base") and not (one.folder / "merged").exists()
    adapter = json.loads((one.folder / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == one.base and not (tmp_path / "bases").exists()
    assert (adapter["r"], adapter["peft_type"], adapter["inference_mode"]) == (2, "LORA", True)


def test_what_is_not_there_is_named(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], hub: Hub) -> None:
    for words, message in (
        (["--policy", "writr"], "did you mean 'writer'"),
        (["--checkpoint", "start"], "expected a checkpoint"),
        (["--checkpoint", "step_00000009"], "step_00000009/manifest.json can't be read"),
        (["--private"], "--private, --revision: expected --push"),
        (["--push", "me/model"], "expected one of whole, writer, editor, judge with --policy"),
    ):
        assert export(run[0], *words, "--out", str(tmp_path)) != 0
        assert re.search(message, capsys.readouterr().err), words
    assert not list(tmp_path.iterdir())
    # An adapter whose base nobody has is not pushed.
    assert export(run[0], "--policy", "writer", "--out", str(tmp_path), "--push", "me/writer") == 2
    assert "has a base that is not on the Hub" in capsys.readouterr().err
    assert not hub.asked and not list(tmp_path.iterdir())


# ---- the hub ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_push_keeps_every_byte(run: Any, sharded: Path, tmp_path: Path, hub: Hub) -> None:
    words = ["--checkpoint", str(sharded), "--policy", "whole", "--out", str(tmp_path), "--push", "me/team-whole"]
    assert export(run[0], *words, "--private") == 0
    assert hub.private == {"me/team-whole": True}
    files = hub.files["me/team-whole"]["main"]
    assert files == bytes_in(tmp_path / "policies" / "whole") and "model.safetensors" in files
    assert len(hub.blobs) == 1, "the weights are in the large file storage, the other files in the commit"
    # Nothing in it tells of this machine or its keys.
    assert not [name for name, content in files.items() if str(run[0]).encode() in content or TOKEN.encode() in content]
    card = files["README.md"].decode()
    for line in (
        "library_name: transformers",
        "| base model | a local model |",
        "| task | sudoku |",
        "| actors | reviser |",
        "| step | 2 of 4 |",
        "| validation at step 2: success | 62.5% |",
        "| validation at step 2: solved | 0.75 |",
        'from_pretrained("me/team-whole")',
    ):
        assert line in card, card
    assert "base_model" not in card


def test_a_merged_adapter_is_pushed_to_a_branch(run: Any, tmp_path: Path, hub: Hub) -> None:
    words = ["--policy", "writer", "--out", str(tmp_path), "--push", "me/writer", "--merge"]
    assert export(run[0], *words, "--revision", "step2") == 0
    files = hub.files["me/writer"]
    assert files["main"] == {} and files["step2"] == bytes_in(tmp_path / "policies" / "writer" / "merged")
    # Once more, to a branch that is there.
    assert export(run[0], *words, "--revision", "main") == 0
    assert files["main"] == files["step2"]


def test_an_adapter_over_a_model_of_the_hub_is_pushed_alone(
    run: Any, tmp_path: Path, hub: Hub, monkeypatch: Any
) -> None:
    """Its card and its configuration name that model."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text((run[0] / "config.toml").read_text().replace(str(run[0] / "base"), "some/base"))
    (folder / "checkpoints").symlink_to(run[0] / "checkpoints")
    shutil.copy(run[0] / "metrics.jsonl", folder)
    monkeypatch.chdir(tmp_path)
    for source in ("AutoTokenizer", "AutoConfig", "GenerationConfig"):  # in the cache, say
        kind = getattr(__import__("transformers"), source)
        found = kind.from_pretrained(run[0] / "base")
        monkeypatch.setattr(kind, "from_pretrained", lambda path, found=found, **_: found)
    earlier = folder / "export" / "step_00000002" / "policies" / "writer" / "merged"  # is not part of the adapter
    earlier.mkdir(parents=True)
    (earlier / "model.safetensors").touch()
    assert export(folder, "--policy", "writer", "--push", "me/writer") == 0
    files = hub.files["me/writer"]["main"]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "some/base"
    assert "adapter_model.safetensors" in files and "merged/model.safetensors" not in files
    card = files["README.md"].decode()
    assert "base_model: some/base" in card and "library_name: peft" in card and "| actors | proposer |" in card
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]


def test_what_the_hub_refuses_is_explained(
    run: Any, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--policy", "judge", "--out", str(tmp_path), "--push"]

    def refused(repo: str, message: str, *more: str) -> None:
        assert export(run[0], *words, repo, *more) == 2
        error = capsys.readouterr().err
        assert re.search(message, error.splitlines()[-1]), error

    hub.files["me/there"] = {"main": {"README.md": b"mine"}}
    hub.private["me/there"] = False
    refused("me/there", "the repository exists: expected a new name, or --revision")
    refused("me/there", "exists and is public", "--private", "--revision", "main")
    assert hub.files["me/there"] == {"main": {"README.md": b"mine"}}
    refused("others/model", "answered 403, the token may not write there .*rights to create")
    refused("a/b/c", "expected OWNER/NAME")
    hub.refused = "/api"
    refused("me/new", "answered 400: as the test wants it")
    hub.refused = "/storage"
    refused("me/half", "Error while uploading 'model.safetensors' to the Hub.*as the test wants it")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused("me/new", "answered 401, the token is not valid .*HF_TOKEN")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("me/new", "http://127.0.0.1:9 can't be reached")
    monkeypatch.delenv("HF_TOKEN")
    refused("me/new", "HF_TOKEN: expected the environment variable")
    assert hub.files == {"me/there": {"main": {"README.md": b"mine"}}, "me/half": {"main": {}}}
