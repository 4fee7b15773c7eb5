"""Arguments that argparse does not know: overrides and pairs."""

from __future__ import annotations

import pytest

from turnwise.cli.options import parse_pairs, split_overrides

KNOWN = {"--dry-run", "--traceback", "-h", "--help"}


@pytest.mark.parametrize(
    ("arguments", "rest", "overrides"),
    [
        ([], [], {}),
        (["run.toml"], ["run.toml"], {}),
        (["run.toml", "--loop.steps", "5"], ["run.toml"], {"loop.steps": "5"}),
        (["--loop.steps=5", "run.toml"], ["run.toml"], {"loop.steps": "5"}),
        (["--loop.steps", "5", "run.toml", "--seed=3"], ["run.toml"], {"loop.steps": "5", "seed": "3"}),
        (["run.toml", "--dry-run", "--seed", "-1"], ["run.toml", "--dry-run"], {"seed": "-1"}),
        (["run.toml", "--name=a=b"], ["run.toml"], {"name": "a=b"}),
        (["run.toml", "--name="], ["run.toml"], {"name": ""}),
    ],
)
def test_split_overrides(arguments: list[str], rest: list[str], overrides: dict[str, str]) -> None:
    assert split_overrides(arguments, KNOWN) == (rest, overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loop.steps"], "--loop.steps: expected a value"),
        (["--loop.steps", "--dry-run"], "--loop.steps: expected a value"),
        (["--seed=1", "--seed", "2"], "--seed: given twice, as '1' and '2'"),
        (["--", "5"], "expected the name of a config key"),
        (["--=5"], "expected the name of a config key"),
    ],
)
def test_bad_overrides_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_overrides(arguments, KNOWN)


def test_pairs() -> None:
    assert parse_pairs("--x", ["a=b=c"], str) == {"a": "b=c"}
    for words in (["a=1", "a=2"], ["a"], ["=1"]):
        with pytest.raises(ValueError, match=r"--x '.*': expected NAME=VALUE, each name once"):
            parse_pairs("--x", words, int)
