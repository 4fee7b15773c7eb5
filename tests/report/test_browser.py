"""The report of a real run in a real browser: Chromium or Chrome, headless, whatever this machine has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from turnwise.report import write_report

from .hand_made import HOSTILE, chat_run, cluster_run

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """A browser on the PATH, or else in the place where macOS keeps it."""
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    return next(filter(None, map(shutil.which, NAMES)), mac if Path(mac).exists() else None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    executable = find_browser()
    if executable is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} on the PATH (on Debian: apt install chromium)")
    with sync_playwright() as playwright:
        # A container's root user can't have Chromium's sandbox; the page is our own file, which loads nothing.
        started = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, report: Path, **settings: str) -> Iterator[Page]:
    """A report that is open. The test fails if the browser complained, or asked anybody for anything."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, **settings)
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    yield page
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]
    page.close()


@pytest.fixture
def page(browser: Browser, real_run: Path, tmp_path: Path) -> Iterator[Page]:
    with opened(browser, write_report(real_run, tmp_path / "report.html")) as page:
        yield page


def open_episode(page: Page, name: str) -> None:
    page.click("[data-tab=episodes]")
    page.locator(".entry", has_text=name).first.click()


def test_the_head_tells_whose_success_it_is_and_what_the_run_was_warned_of(page):
    """The run's trees select; had it gone on without them, the newest success would be the policy's own."""
    assert page.locator("#head dt").all_inner_texts()[1:3] == ["validation", "success, selected"]
    page.evaluate(
        """() => {
          const run = JSON.parse(document.getElementById("data").textContent);
          run.warnings = [{ step: 2, warning: "<b>no</b> sample trains" }, { step: 3, warning: "a ratio of 30" }];
          run.curves.series.success = run.curves.step.map((_, at, all) => (at === all.length - 1 ? 0.125 : null));
          document.getElementById("head").replaceChildren(...headView(run));
        }"""
    )
    assert page.locator("#head dt").all_inner_texts()[1:3] == ["validation", "success"]
    assert page.locator("#head dd").all_inner_texts()[2] == "0.125"
    told = ["step 2: <b>no</b> sample trains", "step 3: a ratio of 30"]
    assert page.locator("#head .warnings li").all_inner_texts() == told


def test_the_head_says_what_was_learned_and_leads_to_episodes(page):
    told = page.locator("#head .learned").inner_text()
    assert re.search(r"Validation went from [\d.]+% at step 0 to [\d.]+% at step 3\. Held-out success is [\d.]+%", told)
    assert re.search(r"It took [\d,]+ sampled tokens and [\d.]+ minutes", told)
    page.evaluate(
        """() => {
          const run = JSON.parse(document.getElementById("data").textContent);
          document.getElementById("head").replaceChildren(...headView({ ...run, changed: [0, 1] }));
        }"""
    )
    page.locator("#head .learned a").last.click()
    page.locator("[data-tab=episodes][aria-selected=true]").wait_for()
    assert page.locator(".list [aria-current=true]").get_attribute("data-index") == "1"


def test_curves_are_drawn(page):
    families = page.locator(".chart").evaluate_all("charts => charts.map(chart => chart.dataset.family)")
    assert families[0] == "validation" and {"reward", "step_reward", "loss", "grad_norm"} <= set(families)
    reward = page.locator(".chart[data-family=reward]")
    legend = [entry.split()[0] for entry in reward.locator(".legend > span").all_inner_texts()]
    assert legend == ["all", "proposer", "reviser"]
    drawn = reward.locator("path.line").evaluate_all("lines => lines.map(line => line.getAttribute('d'))")
    assert len(drawn) == 3
    for line in drawn:
        points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", line) if point]
        assert len(points) == 3, "three steps were trained"
        assert points[0][0] < points[1][0] < points[2][0]
    box = reward.locator("path.line").first.bounding_box()
    assert box["width"] > 100


def test_metrics_can_be_chosen_and_read_off(page):
    page.click(".chip:text-is('seconds_update')")
    chart = page.locator(".chart[data-family=seconds_update]")
    chart.locator("svg").hover()
    assert "step" in page.locator("#tip").inner_text()
    page.click(".chip:text-is('seconds_update')")
    assert chart.count() == 0
    page.fill("[aria-label='Filter metrics']", "grad")
    assert page.locator(".chart").count() == 1
    page.fill("[aria-label='Filter metrics']", "")
    before = page.locator(".chart[data-family=loss] path.line").first.get_attribute("d")
    page.locator("input[type=range]").fill("0.9")
    smooth = page.locator(".chart[data-family=loss] path.line:not(.faint)").first.get_attribute("d")
    assert smooth != before
    page.select_option("select", "total_sampled_tokens")
    assert page.locator(".chart[data-family=loss] text").last.text_content() != "3"


def test_both_seats_stand_side_by_side_and_tokens_are_tinted(page):
    open_episode(page, "step 3")
    assert page.locator(".board thead th").all_inner_texts()[1:] == ["proposer", "reviser"]
    first = page.locator(".board tbody tr").first.locator("td")
    left, right = first.nth(0).bounding_box(), first.nth(1).bounding_box()
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"] + 1 and right["width"] > 200
    # Tokens can be tinted by log probability.
    open_episode(page, "step 3")
    colour = "nodes => nodes.map(node => node.style.background)"
    before = page.locator(".token").evaluate_all(colour)
    page.select_option("#tint", "log-probability")
    after = page.locator(".token").evaluate_all(colour)
    assert before != after and len(set(after)) > 2


def test_a_branch_shows_its_text_and_tokens(page):
    open_episode(page, "step 3")
    group = page.locator(".board td .group").first
    assert group.locator(".branch").count() == 4
    assert group.locator(".branch.selected").count() == 1
    other = group.locator(".branch:not(.selected)").first
    wanted = other.get_attribute("data-branch")
    run = page.evaluate("JSON.parse(document.getElementById('data').textContent)")
    shown = page.locator(".episode").get_attribute("data-id")
    episode = next(top for top in run["episodes"] if top["id"] == shown)
    node = episode["steps"][0]["node"]
    step = next(s for s in episode["steps"] if s["node"] == node and s["branch"] == int(wanted))
    other.click()
    assert group.locator(".branch-view").get_attribute("data-branch") == wanted
    tokens = group.locator(".token")
    assert tokens.count() == len(step["ids"]) > 1
    text = "".join(token or "\u200b" for token in step["tokens"])  # a token without text has a place to point at, too
    assert group.locator(".completion").evaluate("node => node.textContent") == text
    at = next(at for at, token in enumerate(step["tokens"]) if token.isprintable() and token.strip())
    tokens.nth(at).hover()
    tip = page.locator("#tip").inner_text()
    assert all(name in tip for name in ("advantage", "log-prob", "policy version"))
    assert f"{step['logprobs'][at]:.4g}" in tip and str(step["ids"][at]) in tip


def test_a_branch_says_whether_it_was_drawn(page):
    open_episode(page, "step 4")
    chosen = page.locator(".board td .group").first.locator(".branch.selected")
    assert chosen.inner_text().startswith("⚄ branch 0")
    assert chosen.get_attribute("title") == "selected by a draw among all branches: the episode went on from here"
    open_episode(page, "step 3")
    chosen = page.locator(".board td .group").first.locator(".branch.selected")
    assert chosen.inner_text().startswith("★ branch")
    assert chosen.get_attribute("title") == "selected: the episode went on from here"


def test_markup_failures_nested_episodes_and_private_text(page):
    open_episode(page, "r9")
    assert page.locator(".completion").first.evaluate("node => node.textContent") == HOSTILE
    assert page.locator("#injected").count() == 0
    assert page.locator(".error").first.inner_text() == "Boom: <i>line 3</i>"
    # Failures nested episodes and private text.
    open_episode(page, "r9")
    assert page.locator(".board thead").first.locator("th").all_inner_texts()[1:3] == ["alice", "bob"]
    assert page.locator(".branch[data-branch='2'] .badge").inner_text() == "failed"
    nested = page.locator(".children .episode")
    assert nested.get_attribute("data-id") == "r9.0" and "failed" in nested.locator("h3").inner_text()
    summary = nested.locator(".summary").inner_text()
    assert summary.endswith("sub-agent of r9, as bob, after call 1 of alice, with its reward")
    page.locator(".prompt summary").first.click()
    page.locator("mark.private:visible").first.wait_for()
    assert page.locator("mark.private:visible").all_inner_texts() == ["Your card: ace"]
    bob = page.locator(".prompt", has_text="prompt: 2 messages").first
    bob.locator("summary").click()
    bob.locator("mark.private").first.wait_for()  # a prompt is made when it is opened
    assert bob.locator("mark.private").all_inner_texts() == ["board"], "what the arena marked while the episode ran"
    page.fill("[aria-label='Filter episodes']", "no such episode")
    assert page.locator(".entry").count() == 0


def test_a_prompt_that_goes_on_from_another_shows_all_messages(browser, tmp_path):
    chat_run(tmp_path)
    with opened(browser, write_report(tmp_path)) as page:
        open_episode(page, "r1")
        prompt = page.locator(".prompt", has_text="prompt: 5 messages")
        assert prompt.locator(".said").count() == 0
        prompt.locator("summary").click()
        prompt.locator(".said").first.wait_for()
        assert prompt.locator(".said").all_inner_texts() == ["turn 0", "one", "turn 1", "two", "turn 2"]


def test_the_config_is_shown_and_the_page_fits_its_window(page, real_run):
    page.click("[data-tab=config]")
    assert page.locator(".config").inner_text().strip() == (real_run / "config.toml").read_text().strip()
    for width in (390, 1024, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        for tab in ("curves", "episodes", "config"):
            page.click(f"[data-tab={tab}]")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, tab)


def test_a_run_that_has_only_begun_opens(browser, tmp_path):
    (tmp_path / "config.toml").write_text("steps = 7\n")
    with opened(browser, write_report(tmp_path)) as page:
        assert "No step has been logged yet" in page.inner_text("main")
        tabs = page.locator("[data-tab]").evaluate_all("tabs => tabs.map(tab => tab.dataset.tab)")
        assert tabs == ["curves", "episodes", "config"], "a run without a cluster has no lanes"
        page.click("[data-tab=episodes]")
        assert "No episode has been recorded yet" in page.inner_text("main")


def test_what_each_actor_adds_is_a_table_of_text(page):
    """The real run hands drafts on; a run with ablations has two more columns, and names stay text."""
    assert page.locator(".adds thead th").all_inner_texts() == ["actor", "changed", "fixed", "broken"]
    assert page.locator(".adds tbody th").all_inner_texts()[-1] == "reviser"
    page.evaluate(
        """() => {
          const run = JSON.parse(document.getElementById("data").textContent);
          const reviser = { handed: 40, changed: 0.25, wrong: 1200, fixed: 0.1254, right: 0, without: 0.5, alone: 0 };
          run.contributions = { step: 7, actors: { "<b>reviser</b>": reviser, proposer: { without: 1 } } };
          document.getElementById("main").replaceChildren(contributionTable(run));
        }"""
    )
    table = page.locator(".adds")
    assert table.locator("figcaption").inner_text() == "What each actor adds at the validation of step 7"
    assert table.locator("thead th").all_inner_texts() == ["actor", "changed", "fixed", "without it", "alone"]
    rows = [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert rows == [
        ["<b>reviser</b>", "25.0% of 40", "12.5% of 1,200", "50.0%", "0.0%"],
        ["proposer", "–", "–", "100.0%", "–"],
    ]
    assert page.evaluate("contributionTable({ contributions: null })") is None


# ---- the processes of a cluster --------------------------------------------------------------------------------------
START = 1_700_000_000.0


@pytest.fixture(params=["light", "dark"])
def lanes_page(request, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The lanes of a run on a cluster, in both colour schemes."""
    cluster_run(tmp_path / "run", START)
    report = write_report(tmp_path / "run", tmp_path / "report.html")
    with opened(browser, report, color_scheme=request.param) as page:
        page.click("[data-tab=processes]")
        yield page


def bars(page: Page, role: str, kind: str) -> list[tuple[float, float]]:
    """Begin and end of the bars of a lane, in seconds of the run: 110 are as wide as all lanes."""
    found = page.locator(f".lane[data-role='{role}'] {kind}").evaluate_all(
        "nodes => nodes.map(node => [Number(node.getAttribute('x')), Number(node.getAttribute('width'))])"
    )
    second = (1100 - 150 - 16) / 110
    return [(round((x - 150) / second, 1), round((x - 150 + width) / second, 1)) for x, width in found]


def test_each_process_has_a_lane_over_time(lanes_page):
    page = lanes_page
    names = page.locator(".lane").evaluate_all("lanes => lanes.map(lane => lane.dataset.role)")
    assert names == ["loop", "rank-0", "engine-main-0", "engine-main-1", "worker-0"]
    assert bars(page, "loop", "[data-part=rollout]") == [(10.0, 16.0), (22.0, 52.0), (60.0, 68.0)]
    assert bars(page, "loop", "[data-part=update]") == [(16.0, 19.0), (52.0, 55.5), (68.0, 70.0)]
    assert bars(page, "loop", "[data-part=sync]") == [(19.0, 20.0), (55.5, 56.0)], "the last step sent nothing"
    assert bars(page, "rank-0", ".ran") == [(0.0, 110.0)]
    assert bars(page, "engine-main-0", ".ran") == [(2.0, 30.0), (45.0, 110.0)]
    marks = page.locator(".lane[data-role=engine-main-0] .mark")
    assert marks.evaluate_all("all => all.map(mark => mark.dataset.event)") == ["started", "died", "restarted"]
    # What ran, and each mark, can be told from the paper.
    colours = page.locator(".lane .mark, .lane rect").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper not in colours and len(set(colours)) >= 6
    for width in (390, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_death_tells_its_cause_as_text(lanes_page):
    page = lanes_page
    page.locator(".lane[data-role=engine-main-1] [data-event=died]").hover()
    tip = page.locator("#tip").inner_text()
    assert "engine-main-1 died" in tip and "2023-11-14 22:15:05 UTC" in tip and HOSTILE.strip() in tip
    assert page.locator("#injected").count() == 0
    page.locator(".lane[data-role=loop] [data-step='2'][data-part=update]").hover()
    tip = page.locator("#tip").inner_text()
    assert tip.split("\n")[0] == "step 2: update" and "3.5" in tip


def test_the_newest_steps_can_be_looked_at(lanes_page):
    page = lanes_page
    page.evaluate(
        """() => {
          const { lanes } = JSON.parse(document.getElementById("data").textContent);
          lanes.left_out = 7;
          document.getElementById("main").replaceChildren(lanesTab(lanes), lanesPicture(lanes, 1));
        }"""
    )
    assert "7 earlier ones are left out" in page.inner_text("main .note")
    newest = page.locator("main > svg")
    assert newest.locator(".lane[data-role=loop] rect").count() == 2
    assert newest.locator(".lane[data-role=engine-main-0] .ran").get_attribute("x") == "150.00", "cut at the left edge"
    assert newest.locator(".lane[data-role=engine-main-0] .mark").count() == 0
