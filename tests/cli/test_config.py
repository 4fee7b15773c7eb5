"""``turnwise config``: the reference covers every key of the models, and finds the nearest name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from turnwise.cli import main as cli
from turnwise.cli.look.config import Key, explain, list_sections
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.train import TrainConfig

KEYS = {key.name: key for section in list_sections() for key in section.keys}


@pytest.mark.parametrize(
    ("name", "type_", "bounds", "default"),
    [
        ("update.lr", "number", "> 0", "1e-06"),
        ("steps", "integer", "≥ 0", "100"),
        ("seed", "integer", "≥ 0, < 2**63", "0"),
        ("run_dir", "path", "", '"runs/default"'),
        ("resume", "true or false", "", "true"),
        ("max_seconds", "number", "> 0", "unset"),
        ("update.schedule", '"cosine", "linear"', "", '"cosine"'),
        ("update.betas", "list of 2, each number ≥ 0, < 1", "", "[0.9, 0.95]"),
        ("policies.NAME.lora.target_modules", '"all-linear" or list of text', "", '"all-linear"'),
        ("health.signals.NAME.threshold", "number", "", "unset"),
        ("phases.steps", "integer", "≥ 1", "required"),
    ],
)
def test_types_ranges_and_defaults_are_those_of_the_model(name: str, type_: str, bounds: str, default: str) -> None:
    key = KEYS[name]
    assert (key.type, key.range, key.default) == (type_, bounds, default)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for argument in get_args(annotation):
        yield from models(argument)


def test_every_key_has_a_description_a_type_and_a_default() -> None:
    """Counted over the models themselves, so that no key can be left out."""
    fields = sum(not any(models(f.annotation)) for model in models(TrainConfig) for f in model.model_fields.values())
    assert len(KEYS) == fields > 100
    for key in KEYS.values():
        assert key.type and key.default and key.description.endswith("."), key
        assert (len(key.description) <= 120 and key.description[0].isupper()) or key.description[0] == "`", key
    assert all(len(section.summary) > 10 for section in list_sections())


def test_a_section_lists_its_keys_and_the_sections_below() -> None:
    text = explain("rollout")
    assert "rollout.branches = 1    (integer, ≥ 1)" in text and "  rollout.tree " in text and "tree.select" not in text
    assert explain("policies") == explain("policies.NAME") == explain("policies.mine")
    assert explain("policies.my-own.path") == explain("policies.NAME.path")
    assert explain("warm-start.steps") == explain("warm_start.steps")
    assert "steps = 100" in explain("top")
    assert KEYS["update.lr"] == Key("update.lr", "number", "> 0", "1e-06", "Peak learning rate.")
    assert explain("update.lr") == "update.lr = 1e-06    (number, > 0)\n    Peak learning rate."


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("update.lrr", "did you mean update.lr?"),
        ("updte", "did you mean update?"),
        ("policies.mine.pth", "did you mean policies.NAME.path?"),
        ("betas", "did you mean update.betas?"),
        ("zzzz", "`turnwise config` lists the sections"),
    ],
)
def test_a_mistyped_name_gets_the_nearest(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", name]) == EXIT_USAGE
    assert capsys.readouterr().err == f"turnwise: KEY={name!r}: no such section or key; {hint}\n"


def test_every_section_is_in_the_overview_and_in_the_help_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == EXIT_OK
    overview = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    help_text = capsys.readouterr().out
    assert "turnwise config SECTION" in help_text
    for section in list_sections():
        assert f"  {section.name} " in overview and f"    {section.name} " in help_text
