"""A chat template of a folder renders as `transformers` renders it, and takes no more than a chat justifies."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from turnwise.sandbox import limited, templates
from turnwise.sandbox.templates import MAX_TEMPLATE, TemplateError, TemplateLimitError, render_template

CHAT = [{"role": "user", "content": "hi"}]
DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
SHARED = "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"

HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a loop that writes": "{% for a in range(99999) %}{% for b in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * 8000000 }}",
    "a repeated text": "{{ 'x' * 10**10 }}",
    "a repeated list": "{% set x = [0] * 10**10 %}",
    "a power": "{{ (10 ** 999999999) | string | length }}",
    "powers of powers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a width by %": "{{ '%1000000000d' % 1 }}",
    "a width by format": "{{ '{:1000000000}'.format(1) }}",
    "a width by filter": "{{ 'x' | center(1000000000) }}",
    "an indent": "{{ ('a\n' * 1000) | indent(10000000) }}",
    "an indent of JSON": "{{ {'a': {'b': 1}} | tojson(indent=1000000000) }}",
    "a doubled text": DOUBLED,
    "a replaced text": "{% set x = 'x' * 100000 %}{{ x.replace('x', x) | length }}",
    "shared lists as JSON": SHARED + "{{ n.x | tojson }}",
    "shared lists as text": SHARED + "{{ n.x }}",
    "shared lists compared": SHARED + "{% set m = n.x %}" + SHARED + "{{ m == n.x }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "slices": "{{ range(99999) | slice(1000000000) | list | length }}",
    "text of lorem ipsum": "{{ lipsum(n=100000000) }}",
    "a folded constant": "{{ 'ab' * 999999999 * 999 }}",
    "a long template": "x" * (MAX_TEMPLATE + 1),
}
ERRORS = {
    "a macro without an end": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nested blocks": "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000,
    "nested brackets": "{{ " + "(" * 200_000 + "1" + ")" * 200_000 + " }}",
    "long sums": "{{ 1" + "+1" * 200_000 + " }}",
    "attributes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a change of the chat": "{% set x = messages.append(1) %}",
    "a refusal": "{{ raise_exception('no') }}",
}


@pytest.fixture
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.1)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("few_seconds")
def test_hostile_template_ends_at_a_limit_that_names_its_folder(name: str) -> None:
    with pytest.raises(TemplateLimitError, match=r"the chat template of ./models/x. (takes|writes|has|ended)"):
        render_template(HOSTILE[name], {"messages": CHAT}, "/models/x")
    assert render_template("{{ messages[0].content }}", {"messages": CHAT}, "y") == "hi"


@pytest.mark.parametrize("name", ERRORS)
def test_template_that_fails_is_an_error_that_names_its_folder(name: str) -> None:
    with pytest.raises(TemplateError, match="the chat template of '/models/x'"):
        render_template(ERRORS[name], {"messages": CHAT}, "/models/x")
    assert render_template("{{ messages[0].content }}", {"messages": CHAT}, "y") == "hi"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'é' | tojson }}", '"é"'),
        ("{% for x in [1, 2] %}\n    {% if x == 2 %}{% break %}{% endif %}\n{{ x }}\n{% endfor %}", "1\n"),
        ("{% generation %}{{ m['content'] }}{% endgeneration %}!", "\ud800hi!"),
        ("{{ 'a\\u00e9'.encode('latin-1') }} {{ lipsum(n=1)[:3] }} {{ {1: 2} | pprint }}", "b'a\\xe9' <p> {1: 2}"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ m.none is none }} {{ m.role is defined }} {{ pair[0] }}", "False False 7"),
    ],
)
def test_what_templates_of_transformers_may_use(template: str, text: str) -> None:
    assert render_template(template, {"m": {"content": "\ud800hi"}, "pair": (7, 8)}, "x") == text


def test_long_chats_have_more_time_and_room() -> None:
    text = "word " * 2_000_000
    assert render_template("{{ messages[0].content }}", {"messages": [{"content": text}]}, "x") == text


def test_types_of_users_are_plain_for_a_template_and_objects_are_refused() -> None:
    class Text(str):
        pass

    assert render_template("{{ a }}{{ b.c }}", {"a": Text("x"), "b": {"c": [Text("y")]}}, "x") == "x['y']"
    with pytest.raises(TypeError, match=r"a chat template got .*object.*: expected a number, a text, a list"):
        render_template("", {"a": object()}, "x")


def test_a_renderer_that_was_killed_is_replaced_and_a_fork_has_its_own() -> None:
    def process() -> Any:
        return templates._renderer._process

    assert render_template("{{ 1 }}", {}, "x") == "1"
    first = process()
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert render_template("{{ 2 }}", {}, "x") == "2"
    second = process()
    assert second is not first
    if not (child := os.fork()):
        fine = process() is None and render_template("{{ 3 }}", {}, "x") == "3" and process().pid != second.pid
        templates._renderer.stop()
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_template("{{ 4 }}", {}, "x") == "4"
    assert process() is second


ESCAPES = {
    "open": "open('/etc/passwd').read()",
    "write": "open('/tmp/turnwise-escaped', 'w')",
    "list": "__import__('os').listdir('/')",
    "socket": "__import__('ctypes').CDLL(None).socket(2, 1, 0)",
    "shell": "__import__('os').system('true')",
    "fork": "__import__('os').fork()",
    "kill": "__import__('os').kill(1, 0)",
    "another's limits": "__import__('resource').prlimit(1, 7)",
}


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
def test_a_template_that_finds_a_hole_in_jinja_reaches_nothing(tmp_path: Path, escape: str, monkeypatch: Any) -> None:
    # As if Jinja's sandbox had a hole: this child's templates have Python's own functions.
    hole = 'made.globals["hole"] = lambda code: eval(code)\n    return made\n'
    source = Path(limited.__file__).with_name("limited_child.py").read_text(encoding="utf-8")
    (tmp_path / "limited_child.py").write_text(source.replace("return made\n", hole), encoding="utf-8")
    (tmp_path / "child.py").write_text(Path(limited.__file__).with_name("child.py").read_text(encoding="utf-8"))
    monkeypatch.setattr(limited, "__file__", str(tmp_path / "limited.py"))
    monkeypatch.setattr(templates, "_renderer", limited.LimitedProcess())
    try:
        assert render_template("{{ hole('1 + 1') }}", {}, "x") == "2"
        with pytest.raises(TemplateError, match=r"PermissionError|status -31"):
            render_template("{{ hole(code) }}", {"code": escape}, "x")
    finally:
        templates._renderer.stop()


def test_a_host_without_filters_renders_with_limits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limited._note_open.cache_clear()
    # A filter that is none: the kernel refuses it.
    monkeypatch.setattr(limited, "_filter", lambda: b"\xff" * 8)
    for _ in range(2):
        monkeypatch.setattr(templates, "_renderer", limited.LimitedProcess())
        assert render_template("{{ 1 }}", {}, "x") == "1"
        templates._renderer.stop()
    said = [record.message for record in caplog.records if "without a filter" in record.message]
    assert len(said) == 1 and said[0].endswith("[Errno 22] prctl(22): Invalid argument")
