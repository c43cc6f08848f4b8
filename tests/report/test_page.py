"""The page: one file, drawn by a real browser without an error and without the network."""

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from browser import Page, browser, needs_browser
from paper_runs import write_run, write_table

from fedkd.report.cli import main


def data(page: str) -> list[dict]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture
def report(tmp_path: Path) -> Path:
    write_table(tmp_path / "table")
    assert main([str(tmp_path / "table")]) == 0
    return tmp_path / "table" / "report.html"


def test_a_page_is_whole_in_itself(report: Path) -> None:
    page = report.read_text()
    assert "<!-- " not in page  # every mark was filled
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\s\"')]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "Accuracy &amp; &lt;cost&gt;" in page
    for told in (
        "Author et al., 2026, Table 1",
        "fedkd -m +table=paper/table1",
        "The batch size is not told.",
        "Local",
    ):
        assert told in unescape(page)


def test_a_panel_is_a_column_and_its_curves_are_the_rows(report: Path) -> None:
    panels = data(report.read_text())
    assert [panel["title"] for panel in panels] == ["IID", "DS-1"]  # the costs are those of IID's runs
    assert [curve["label"] for curve in panels[0]["curves"]] == ["Local", "Ditto (GM)", "Ditto (PM)"]
    gm = panels[0]["curves"][1]
    assert (gm["round"], gm["mean"], gm["std"], gm["sent"]) == ([1, 2], [40, 80], [0, 0], [1000, 2000])
    assert panels[1]["curves"][1]["std"] is None  # one seed
    assert panels[0]["spreads"][1]["values"] == [[0, 78, 100], [1, 80, 101], [2, 82, 102]]  # of the shared model
    assert panels[0]["split"] == {"step": 1, "clients": 3, "counts": [[60, 40], [0, 101], [102, 0]]}


def test_where_a_column_is_one_run_the_columns_share_a_panel(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    table.row = {"ditto_gm": table.row["ditto_gm"]}
    table.paper = {}
    table.save(tmp_path)
    assert main([str(tmp_path)]) == 0
    (panel,) = data((tmp_path / "report.html").read_text())
    assert [curve["label"] for curve in panel["curves"]] == ["IID", "DS-1", "Cost"]


def test_ordinary_runs_get_a_page_too(tmp_path: Path) -> None:
    for number, (algorithm, accuracy) in enumerate({"fedavg": 0.6, "fedprox": 0.7}.items()):
        write_run(tmp_path / str(number), accuracy)
        (tmp_path / str(number) / "config.yaml").write_text(f"seed: 0\nalgorithm: {{name: {algorithm}}}\n")
    assert main([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    (panel,) = data((tmp_path / "page.html").read_text())
    assert [curve["label"] for curve in panel["curves"]] == ["fedprox", "fedavg"]  # the best first


# In a browser


@pytest.fixture
def page(report: Path, tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as tab:
        tab.open(report)
        yield tab
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith(("file://", "data:"))] == []
        assert [url for url in tab.requests if url.startswith("file://")] == [report.as_uri()]


@needs_browser
def test_the_page_draws_its_pictures_without_an_error_or_a_request(page: Page) -> None:
    assert page.value("document.title") == "paper/table1"
    assert page.text("h1") == "Accuracy & <cost>"
    assert page.value("document.querySelectorAll('#charts figure').length") == 4
    assert page.value("document.querySelectorAll('#charts polyline').length") == 3 + 2  # Local sends nothing
    dots = "document.querySelectorAll('#charts figure:nth-child({}) circle').length"
    assert page.value(dots.format(3)) == 3 * 3  # rows × clients
    assert page.value(dots.format(4)) == 4  # non-empty classes of clients
    assert "NaN" not in page.value("document.getElementById('charts').innerHTML")


@needs_browser
def test_pointing_at_a_curve_tells_its_numbers(page: Page) -> None:
    page.point_at("#charts figure:nth-child(1) svg", x=0.95)
    assert page.value("document.getElementById('tip').style.visibility") == "visible"
    told = page.text("#tip")
    assert told.startswith("round 2")
    assert told.index("85.00 ± 0.00 %  Ditto (PM)") < told.index("71.00 ± 1.41 %  Local")  # the best first
    page.point_at("#charts figure:nth-child(2) svg", x=0.95, y=0.05)
    assert page.text("#tip") == "Ditto (PM)85.00 ± 0.00 % after 2 k, round 2"
    page.point_at("#charts figure:nth-child(4) circle")
    assert re.fullmatch(r"client \d, class \d: \d+ samples", page.text("#tip"))
    page.point_at("h1")
    assert page.value("document.getElementById('tip').style.visibility") == "hidden"


@needs_browser
def test_tabs_choose_the_column_and_the_legend_hides_rows(page: Page) -> None:
    page.click("#tabs button:nth-child(2)")
    assert page.value("document.querySelector('#tabs [aria-selected=true]').textContent") == "DS-1"
    page.click("#legend button:nth-child(3)")
    assert page.value("document.querySelectorAll('#charts figure:nth-child(1) polyline').length") == 2
    for number in (1, 2):
        page.click(f"#legend button:nth-child({number})")
    assert "everything is hidden" in page.text("#charts")
    page.click("#legend button:nth-child(1)")  # the one that sends nothing
    assert "nothing is communicated" in page.text("#charts")


@needs_browser
def test_the_page_follows_the_reader_s_light_or_dark_scheme(page: Page) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        background, ink = (
            sum(map(int, re.findall(r"\d+", page.value(f"getComputedStyle(document.body).{key}"))))
            for key in ("backgroundColor", "color")
        )
        colours.append(background - ink)
    assert colours[0] > 300 > -300 > colours[1]  # of 765: dark on light, then light on dark
