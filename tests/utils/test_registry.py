from __future__ import annotations

from functools import partial

import pytest

from turnwise.utils.registry import (
    build_with_options,
    code_in,
    did_you_mean,
    import_by_name,
    import_class,
    name_of,
    names_code,
    unique_names,
)

KNOWN = {"grpo": int, "rloo": float}


def test_a_close_name_is_offered_and_else_all_of_them():
    assert did_you_mean("stepz", ["seed", "steps"]) == "did you mean 'steps'?"
    assert did_you_mean("zzz", ["b", "a"]) == "known: a, b"


def test_registered_names_and_import_paths_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_rules_of_naming.py").write_text("class Outer:\n    class Mine:\n        pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert import_by_name(KNOWN, "rloo", "credit.rule") is float
    assert import_by_name(KNOWN, "my_rules_of_naming:Outer.Mine", "credit.rule").__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gropo", r"'credit.rule' = 'gropo': unknown; did you mean 'grpo'\?"),
        ("no_such_module_here:X", r"'credit.rule' = 'no_such_module_here:X': ModuleNotFoundError"),
        ("math:sqroot", r"'credit.rule' = 'math:sqroot': no 'sqroot' in it; did you mean 'sqrt'\?"),
        ("math:", r"expected 'module:Name'"),
        (":Mine", r"expected 'module:Name'"),
        ("./rules.py:Mine", r"expected 'module:Name'"),
    ],
)
def test_what_is_not_there_is_answered_with_the_key(name, message):
    with pytest.raises(ValueError, match=message):
        import_by_name(KNOWN, name, "credit.rule")


def test_what_is_constructed_is_of_the_right_kind(tmp_path, monkeypatch):
    """Before it is: a class of another kind may do anything when it is made."""
    (tmp_path / "kinds_of_naming.py").write_text(
        "class Fits:\n    def pay(self): pass\nclass Inherits(Fits): pass\n"
        "class Called:\n    def __call__(self): pass\nclass Data:\n    pay = 3\ndef pay(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def found(name, method="pay"):
        return import_class(KNOWN, name, "edges.kind", methods=[method], like="my.Edge").__name__

    assert found("rloo") == "float", "what is registered fits"
    assert [found(f"kinds_of_naming:{name}") for name in ("Fits", "Inherits")] == ["Fits", "Inherits"]
    assert found("kinds_of_naming:Called", "__call__") == "Called"
    for name, method, said in (
        ("subprocess:Popen", "pay", "'pay' is missing"),
        ("kinds_of_naming:Fits", "__call__", "'__call__' is missing"),
        ("kinds_of_naming:Data", "pay", "'pay' is missing"),
        ("kinds_of_naming:pay", "pay", "it is a function"),
        ("os:environ", "pay", "it is a _Environ"),
    ):
        with pytest.raises(
            ValueError, match=rf"'edges.kind' = '{name}': expected a class with .*subclass of my.Edge; {said}"
        ):
            found(name, method)


def test_the_code_that_settings_can_name():
    settings = {
        "task": "my_game:HighCard", "run_dir": "runs/a", "steps": 3, "loss": {"type": "ppo"},
        "credit": {"rule": "level", "options": {"rule": "a.b:C.D", "edges": [{"kind": "x:Y"}, {"kind": "children"}]}},
        "health": {"signals": {"my:Signal": {}}},
        "rollout": {"server": {"url": "http://gpu1:8000"}}, "policies": {"a": {"path": "org/model:tag"}}, "none": None,
    }  # fmt: skip
    assert list(code_in(settings)) == [
        ("task", "my_game:HighCard"),
        ("credit.options.rule", "a.b:C.D"),
        ("credit.options.edges.kind", "x:Y"),
        ("health.signals", "my:Signal"),
    ]
    assert list(code_in({"task": "gateway:my_agent:agent"})) == [("task", "gateway:my_agent:agent")]


def test_a_module_that_fails_says_how(tmp_path, monkeypatch):
    (tmp_path / "broken_rules_of_naming.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        import_by_name(KNOWN, "broken_rules_of_naming:Mine", "credit.rule")


def test_options_are_held_against_the_signature():
    def make(rate=1.0, _hidden=0):
        if rate < 0:
            raise ValueError(f"rate={rate!r}: expected a number >= 0")
        return rate

    assert build_with_options(make, {"rate": 2}, "x.options") == 2
    assert build_with_options(lambda **fields: fields, {"anything": 1}, "x.options") == {"anything": 1}
    for options, message in (
        ({"rates": 1}, r"unknown config key 'x.options.rates'; did you mean 'rate'\?"),
        ({"_hidden": 1}, r"unknown config key 'x.options._hidden'"),
        ({"rate": -1}, r"config key 'x.options' = \{'rate': -1\}: rate=-1: expected"),
        ({"rate": "a"}, r"config key 'x.options' = \{'rate': 'a'\}: '<' not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            build_with_options(make, options, "x.options")
    with pytest.raises(ValueError, match=r"'x.options' = .*missing"):
        build_with_options(lambda needed: needed, {}, "x.options")
    with pytest.raises(ValueError, match="neither a class nor a function"):
        build_with_options(3.14, {}, "x.options")


def test_functions_are_named_by_what_they_wrap():
    class Contains:
        def __call__(self, completion):
            return 1.0

        def score(self, completion):
            return 1.0

    def contains(completion, word):
        return 1.0

    twice = partial(partial(contains, word="a"), word="b")
    assert [name_of(one) for one in (contains, twice, Contains(), Contains, partial(Contains()), lambda: 0)] == [
        *("contains", "contains", "Contains", "Contains", "Contains", "lambda"),
    ]
    assert name_of(Contains().score) == name_of(partial(Contains().score)) == "score"
    assert unique_names([contains, twice, contains, lambda: 0, lambda: 1], ["lambda"]) == [
        *("contains", "contains_2", "contains_3", "lambda_2", "lambda_3"),
    ]


@pytest.mark.parametrize(
    ("text", "is_code"),
    [
        ("module:Name", True),
        ("a.b:C.d", True),
        ("gateway:agents:play", True),
        ("ev\u00b7il:Task", True),  # an identifier with a character that is no letter
        ("gymnasium:my_games:Maze-v0", True),
        ("verifiers:my-env", True),
        ("gymnasium:FrozenLake-v1", False),
        ("http://host:80", False),
        ("12:30", False),
        ("a b:c", False),
        (":c", False),
        ("plain", False),
    ],
)
def test_what_can_be_imported_is_code(text, is_code):
    assert names_code(text) is is_code
