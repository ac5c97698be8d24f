"""The course as a learner meets it: JupyterLab in a browser, every notebook from top to bottom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

from tests.browser.conftest import CHROMIUM, NOTEBOOKS, QUIET, Lab

BOOKS = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
RUN_ALL_S = 240
# Chromium asks for icons and maps that no server has; that is no fault of a page.
HARMLESS = ("Failed to load resource", "favicon")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser.new_page(viewport={"width": 1300, "height": 1000})
        browser.close()


def open_notebook(page: Page, lab: Lab, name: str) -> list[str]:
    """Open it and wait for its kernel; the list fills with what the console complains of."""
    complaints: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(words in message.text for words in HARMLESS):
            complaints.append(message.text)

    page.on("console", listen)
    page.goto(lab.address(name))
    page.locator(".jp-Notebook").first.wait_for(timeout=60_000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").first.wait_for(
        timeout=60_000
    )
    return complaints


def choose(page: Page, menu: str, entry: str) -> None:
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=entry).first.click()


def saved(page: Page, lab: Lab, name: str) -> dict[str, Any]:
    """The notebook as the browser saves it."""
    path = lab.folder / name
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    deadline = time.monotonic() + 30
    while path.stat().st_mtime_ns == before and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    page.wait_for_timeout(300)
    return json.loads(path.read_text())


def run_all(page: Page, lab: Lab, name: str) -> dict[str, Any]:
    choose(page, "Edit", "Clear Outputs of All Cells")
    choose(page, "Run", "Run All Cells")
    deadline = time.monotonic() + RUN_ALL_S
    while time.monotonic() < deadline:
        page.wait_for_timeout(1000)
        indicator = page.locator(".jp-Notebook-ExecutionIndicator").first
        if indicator.get_attribute("data-status") == "idle":
            book = saved(page, lab, name)
            if all(c["execution_count"] for c in book["cells"] if c["cell_type"] == "code"):
                return book
    pytest.fail(f"{name} did not end within {RUN_ALL_S} s")


def errors_of(cell: dict[str, Any]) -> list[str]:
    return [o["ename"] for o in cell["outputs"] if o["output_type"] == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_from_top_to_bottom(page: Page, lab: Lab, name: str) -> None:
    complaints = open_notebook(page, lab, name)
    book = run_all(page, lab, name)
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] != "code":
            continue
        expected = "raises-exception" in cell["metadata"].get("tags", [])
        assert bool(errors_of(cell)) == expected, f"cell {number}: {cell['outputs']}"
        stderr = [o["text"] for o in cell["outputs"] if o.get("name") == "stderr"]
        assert "Warning" not in "".join(map("".join, stderr)), f"cell {number}: {stderr}"
    assert complaints == []


def test_a_widget_redraws_its_picture(page: Page, lab: Lab) -> None:
    name = "01_ranks_and_collectives.ipynb"
    open_notebook(page, lab, name)
    run_all(page, lab, name)
    slider = page.locator(".jupyter-widgets .noUi-handle").last
    slider.scroll_into_view_if_needed()
    output = page.locator(".jp-OutputArea", has=page.locator(".jupyter-widgets")).last
    picture = output.locator("img").last
    before = picture.get_attribute("src")
    slider.focus()
    page.keyboard.press("ArrowRight")
    deadline = time.monotonic() + 20
    while picture.get_attribute("src") == before and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert picture.get_attribute("src") != before
