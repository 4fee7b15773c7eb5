"""Files are replaced whole or not at all."""

from __future__ import annotations

import pytest

from turnwise.utils.files import replace_text, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "note.json"
    for text in ("first", "größer"):
        replace_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    with pytest.raises(OSError, match="no room"), replacing(path) as stream:
        stream.write(b"half")
        raise OSError("no room")
    assert path.read_text(encoding="utf-8") == "größer" and list(tmp_path.iterdir()) == [path]
