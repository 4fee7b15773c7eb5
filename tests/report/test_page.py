"""The page: one file that asks nothing of the network, in which no text of a run is ever markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.report import read_run, write_report
from turnwise.report.page import embed, render

from .hand_made import HOSTILE


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "script" and self.scripts:
            self.scripts[-1] += data


def test_hostile_text_stays_data(made_run, tmp_path):
    page = render(read_run(made_run))
    elements = Elements(page)
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert not any(attributes.get("id") == "injected" for _, attributes in elements.found)
    data = json.loads(elements.scripts[0])
    assert data["episodes"][0]["steps"][0]["text"] == HOSTILE
    assert "{{data}}" in data["episodes"][0]["artifact"]["deal"]
    # A hostile folder name stays a title.
    folder = made_run.rename(tmp_path / "<b>&run")
    elements = Elements(render(read_run(folder)))
    assert "<title>&lt;b&gt;&amp;run · turnwise</title>" in render(read_run(folder))
    assert not any(tag == "b" for tag, _ in elements.found)


def test_written_whole_beside_the_run_or_where_asked(made_run, tmp_path):
    assert write_report(made_run) == made_run / "report.html"
    elsewhere = write_report(made_run, tmp_path / "new" / "page.html")
    assert elsewhere.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(made_run.glob(".*")) and not list(made_run.glob("*.tmp"))
    assert embed({"text": "\ud83d <!--"}) == '{"text":"? \\u003c!--"}'
    page = render(read_run(made_run))
    assert "default-src 'none'" in page
    for tag, attributes in Elements(page).found:
        loaded = [attributes.get(name) for name in ("src", "href", "srcset", "action") if attributes.get(name)]
        assert loaded in ([], ["data:,"]), (tag, attributes)
    assert re.findall(r"https?://[^\s\"']+", page.replace("http://www.w3.org/2000/svg", "")) == []
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page


@pytest.mark.parametrize("out", ["page.html", "a/b/page.html"])
@pytest.mark.parametrize("fails", ["os.replace", "turnwise.report.page.render", "turnwise.utils.files.create_beside"])
def test_a_view_that_fails_leaves_nothing_behind(made_run, tmp_path, monkeypatch, out, fails):
    """It left ``page.html.tmp``, and the folders made for it."""
    folder = tmp_path / "out"
    folder.mkdir()
    expected = read_run(made_run)
    monkeypatch.setattr("turnwise.report.page.read_run", lambda *_: expected)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fails, full)
        with pytest.raises(OSError, match="No space left"):
            write_report(made_run, folder / out)
    assert list(folder.iterdir()) == []
    write_report(made_run, folder / out)
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / out]


def test_a_view_takes_the_place_of_no_folder(made_run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert cli.main(["view", str(made_run), "--out", str(tmp_path / "mine")]) == EXIT_USAGE
    assert "mine': expected the name of a file to write, got a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path != made_run] == ["mine"]


def test_the_view_command(made_run, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["view", str(made_run)]) == EXIT_OK
    assert capsys.readouterr().out.strip() == str(made_run / "report.html")
    assert opened == []
    out = tmp_path / "x.html"
    assert cli.main(["view", str(made_run), "--out", str(out), "--open"]) == EXIT_OK
    assert opened == [out.as_uri()] and out.is_file()
    assert cli.main(["view", str(tmp_path / "nowhere")]) == EXIT_USAGE
    assert "no run folder" in capsys.readouterr().err
