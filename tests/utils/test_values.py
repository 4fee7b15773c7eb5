from __future__ import annotations

import json

import pytest

from turnwise.utils.files import read_json_lines
from turnwise.utils.values import check_texts, listed


@pytest.mark.parametrize(
    "value", ["\ud83d", ["ok", "a\udc00b"], {"a": {"b": ("\ud83d\u0020",)}}, {"\udfff": 1}, {1: "a"}, {None: 1}]
)
def test_what_no_model_reads_and_json_does_not_keep(value):
    with pytest.raises(ValueError, match=r"half of a character|is no text"):
        check_texts(value)
    check_texts(["😀", {"é": [1, None, True, 2.5, ("a",)]}])


def test_a_bad_line_of_a_file_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n\n{"a": "\\ud83d"}\n')
    rows = read_json_lines(path)
    assert next(rows)[1] == {"a": "😀"}
    with pytest.raises(ValueError, match=r"rows.jsonl:3: .*half of a character \(a lone surrogate, '\\ud83d'\)"):
        next(rows)
    path.write_text(json.dumps({"a": "ok"}))
    assert [value for _, value in read_json_lines(path)] == [{"a": "ok"}]


@pytest.mark.parametrize("values", [{0: 1.0}, {1.0}, frozenset([1]), "12", b"12", {0: 1}.keys(), 3])
def test_values_without_an_order_are_no_list(values):
    with pytest.raises(TypeError, match="here: expected a list"):
        listed(values, "here")
    assert listed((n for n in range(3)), "here") == [0, 1, 2] == listed({"a": 0, "b": 1, "c": 2}.values(), "here")
