"""The course as a learner meets it: JupyterLab in a browser, every notebook from top to bottom."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import nbformat
import pytest
from playwright.sync_api import ConsoleMessage, Page, expect, sync_playwright

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
    """Open it and wait for its kernel; the list fills with what the console complains of.

    The kernels of notebooks opened before are ended: only one is left, to be looked at.
    """
    page.goto("about:blank")
    end_kernels(lab)
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


def end_kernels(lab: Lab) -> None:
    token = {"token": lab.token}
    for kernel in httpx.get(f"{lab.url}api/kernels", params=token, timeout=30).json():
        httpx.delete(f"{lab.url}api/kernels/{kernel['id']}", params=token, timeout=30)


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


def kernel_states(lab: Lab) -> list[str]:
    answer = httpx.get(f"{lab.url}api/kernels", params={"token": lab.token}, timeout=30)
    return [kernel["execution_state"] for kernel in answer.json()]


def run_all(page: Page, lab: Lab, name: str) -> dict[str, Any]:
    """Run every cell; done when nothing waits and the kernel is idle, three looks in a row."""
    choose(page, "Edit", "Clear Outputs of All Cells")
    first_prompt = page.locator(".jp-CodeCell .jp-InputPrompt").first
    expect(first_prompt).to_have_text(re.compile(r"\[ \]:"), timeout=60_000)
    for attempt in reversed(range(4)):  # a page that is still drawing may swallow a click
        choose(page, "Run", "Run All Cells")
        try:
            expect(first_prompt).to_have_text(re.compile(r"\[(\*|\d+)\]:"), timeout=15_000)
            break
        except AssertionError:
            if not attempt:
                raise
    idle = 0
    deadline = time.monotonic() + RUN_ALL_S
    while idle < 3:
        if time.monotonic() > deadline:
            shown = page.locator(".jp-Dialog").all_inner_texts()
            pytest.fail(f"{name} did not end within {RUN_ALL_S} s; dialogs: {shown}")
        page.wait_for_timeout(1000)
        waiting = page.locator(".jp-InputPrompt", has_text="[*]").count()
        idle = idle + 1 if set(kernel_states(lab)) == {"idle"} and not waiting else 0
    book = saved(page, lab, name)
    not_run = [
        number
        for number, cell in enumerate(book["cells"])
        if cell["cell_type"] == "code" and not cell["execution_count"]
    ]
    assert not not_run, (
        f"cells {not_run} did not run; {page.locator('.jp-Dialog').all_inner_texts()}"
    )
    return book


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
    name = "widget.ipynb"
    cell = nbformat.v4.new_code_cell(
        "from labsupport.widgets import ring_stepper\nring_stepper(world_size=4, step=3)"
    )
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    book = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(book, lab.folder / name)
    complaints = open_notebook(page, lab, name)
    run_all(page, lab, name)
    output = page.locator(".jp-OutputArea", has=page.locator(".jupyter-widgets")).last
    picture = output.locator("img").last
    before = picture.get_attribute("src")
    output.locator(".noUi-handle").last.focus()
    page.keyboard.press("ArrowRight")
    deadline = time.monotonic() + 20
    while picture.get_attribute("src") == before and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert picture.get_attribute("src") != before
    assert output.locator("img").count() == 1
    assert complaints == []
