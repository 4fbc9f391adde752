"""The page in a real browser: nothing is fetched, everything is drawn, anybody can use it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.records.record import Record
from harness.report.content.contents import document
from harness.report.facts.sweep_records import sweep_of
from harness.report.formats.html import to_html
from tests.harness.report.synthetic import sweep

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the test extra")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is in the test extra")

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("no chromium on the path; Debian's package is chromium", allow_module_level=True)

FIGURES = {"front", "memory", "timeline", "work", "prediction", "chunk-budget-mib"}
"""What the first chapter has."""

VISIBLE = "#table-results tbody tr:not(.more)"
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE_MS = 150_000
"""Longest wait for what takes a second on a machine with nothing else to do."""


@dataclass(kw_only=True)
class Opened:
    """A page that has been drawn, and what happened on the way."""

    page: Page
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return sweep(100)


@pytest.fixture(scope="module")
def file(records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(document(sweep_of(records, name="two words")), records=len(records)), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


def drawn(browser: Browser, file: Path, *, size: Any, scheme: Any) -> Opened:
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.set_default_timeout(PATIENCE_MS)
    opened = Opened(page=page)
    page.on("console", lambda message: opened.said.append(message.text))
    page.on("pageerror", lambda error: opened.said.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-drawn]")
    return opened


@pytest.fixture(scope="module")
def wide(browser: Browser, file: Path) -> Iterator[Opened]:
    opened = drawn(browser, file, size=WIDE, scheme="light")
    yield opened
    opened.page.close()


@pytest.fixture(scope="module")
def phone(browser: Browser, file: Path) -> Iterator[Opened]:
    opened = drawn(browser, file, size=PHONE, scheme="dark")
    yield opened
    opened.page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("wide", id="wide and light"), pytest.param("phone", id="phone and dark")]
)
def test_the_page_draws_everything_and_fetches_nothing(
    request: pytest.FixtureRequest, file: Path, name: str
) -> None:
    opened: Opened = request.getfixturevalue(name)
    page = opened.page
    assert page.get_attribute("body", "data-drawn") == "all"
    assert opened.said == []
    assert opened.requests == [file.as_uri()]
    plots = page.eval_on_selector_all(
        "div[data-chapter]:not([hidden]) div.plot",
        "all => all.map(each => [each.dataset.figure, each.querySelectorAll('svg path, canvas').length])",
    )
    assert {key for key, _ in plots} == FIGURES
    assert all(count for _, count in plots)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    violations = axe.Axe().run(page).response["violations"]
    assert [
        (each["id"], each["impact"], each["nodes"][0]["html"])
        for each in violations
        if each["impact"] in {"serious", "critical"}
    ] == []


def test_hovering_a_point_shows_its_trial_and_exact_bytes(wide: Opened, records: list[Record]) -> None:
    point = wide.page.locator("#figure-front svg [aria-roledescription=point]").first
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    tip = wide.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    text = tip.inner_text()
    shown = int(re.findall(r"peak bytes\s+([\d,]+)", text)[0].replace(",", ""))
    assert shown in {record.memory.peak_bytes for record in records if record.memory is not None}
    assert "on" in text


def test_hovering_a_verdict_names_the_first_difference(wide: Opened) -> None:
    about = wide.page.locator("#table-verdicts .mark.differs").first.get_attribute("title")
    assert about is not None
    assert about.startswith("parity: gradient of 'layers.0.")


def test_hovering_a_number_shows_its_exact_value_and_place(wide: Opened) -> None:
    number = wide.page.locator(f"{VISIBLE} data").first
    number.hover()
    assert (
        number.get_attribute("title") == f"{number.get_attribute('value')} ({number.get_attribute('data-p')})"
    )


def test_rows_are_filtered_and_sorted_with_the_keyboard(wide: Opened) -> None:
    page = wide.page
    page.locator(".tools input").first.fill("offload gpt_nano")
    rows = page.locator(f"{VISIBLE} th")
    names = rows.all_inner_texts()
    assert names
    assert all("offload" in name and "gpt_nano" in name for name in names)
    heading = page.locator("#table-results thead th", has_text="peak").first
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    cells = page.eval_on_selector_all(
        VISIBLE,
        "rows => rows.map(row => row.cells[4].querySelector('data')?.value)",
    )
    known = [int(cell) for cell in cells if cell is not None]
    assert known == sorted(known)
    page.locator(".tools input").first.fill("")


def test_choosing_a_model_shows_its_answer_figures_and_rows(wide: Opened) -> None:
    page = wide.page
    titles = page.locator("#chapter option").all_inner_texts()
    assert sorted(titles)[:2] == ["gpt_nano, seed=0", "gpt_nano, seed=1"]
    wanted = titles.index("llama_1b, seed=0")
    page.select_option("#chapter", index=wanted)
    page.wait_for_selector(f"[data-figure=front-{wanted + 1}] svg")
    assert page.locator("#answer .claim.what:visible").all_inner_texts()[0].startswith("llama_1b with ")
    names = page.locator(f"{VISIBLE} th").all_inner_texts()
    assert names
    assert all("seed=0" in name and "llama_1b" in name for name in names)
    page.select_option("#chapter", index=0)
    page.wait_for_selector("[data-figure=front] svg")


def test_a_trial_leads_to_its_details(wide: Opened) -> None:
    wide.page.locator(f"{VISIBLE} a").first.click()
    opened = wide.page.locator("details[open] summary")
    opened.wait_for()
    assert opened.count() == 1


def test_the_theme_button_draws_in_the_other_theme(wide: Opened) -> None:
    before = wide.page.evaluate("getComputedStyle(document.body).backgroundColor")
    wide.page.click("#theme")
    assert wide.page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    wide.page.wait_for_function("document.querySelectorAll('div.plot svg').length > 0")
    wide.page.click("#theme")


def test_without_scripts_every_row_is_there(browser: Browser, file: Path, records: list[Record]) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(file.as_uri())
    assert page.locator("#table-results tbody tr").count() == len(records)
    assert page.locator("#table-results tbody tr").last.is_visible()
    page.close()


def test_an_open_page_follows_a_sweep_and_waits_for_who_reads(
    browser: Browser, records: list[Record], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(to_html(document(sweep_of(records[:1], name="demo")), records=1, refresh_s=2), "utf-8")
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.clock.install(time=0)
    page.clock.pause_at(1)  # from here on only this test moves the clock, however busy the machine is
    page.goto(path.as_uri())
    page.evaluate("window.isOld = true")
    page.mouse.move(9, 9)
    page.clock.run_for(15_000)
    assert page.evaluate("window.isOld")
    with page.expect_navigation():
        page.clock.fast_forward(30_000)
    assert page.evaluate("window.isOld") is None
    page.close()
