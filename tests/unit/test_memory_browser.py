"""`pgra memory web`, and what is shown of runs: the pages in a real browser."""

import contextlib
import shutil
import socket
import threading
import time
from dataclasses import replace

import pytest
import uvicorn
from following_lm import AKIN, MEANT, FollowingLM, entries, open_page

from pgra.core import Example, Prediction
from pgra.lm.base import Completion
from pgra.report.compare import compare_runs
from pgra.report.page import render_page
from pgra.report.results import EvidenceLine, Group, load_run, write_results

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
QUIET = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
QUIET += ("disable-background-networking", "disable-component-update")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser is installed (chromium)"),
]


class Slow(FollowingLM):
    def _go_on(self, prompt):
        time.sleep(0.5)
        return super()._go_on(prompt)


@contextlib.contextmanager
def serve(path, lm):
    """Serve the page of an LM; yield it and its address."""
    with (
        open_page(path, completer=lm) as app,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield app, f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


@pytest.fixture
def served(tmp_path):
    """A page of an LM that takes its time, and its address."""
    with serve(tmp_path / "memory.sqlite", Slow()) as served:
        yield served


@pytest.fixture
def browser():
    """One that looks for nothing outside."""
    from playwright.sync_api import sync_playwright

    words = [f"--{word}" for word in QUIET]
    with (
        sync_playwright() as tools,
        tools.chromium.launch(executable_path=BROWSER, args=words) as opened,
    ):
        yield opened


def has_focus(tab, name):
    """Wait until what has this id or text has the focus; a browser moves it after it shows."""
    at = "document.activeElement"
    return tab.wait_for_function(f"name => [{at}.id, {at}.innerText].includes(name)", arg=name)


def test_in_a_browser_a_person_asks_corrects_and_asks_again_by_keyboard(
    browser, served, screenshots
):
    page, address = served
    asked, said = [], []
    context = browser.new_context(viewport={"width": 390, "height": 800})
    context.on("request", lambda request: asked.append(request.url))
    tab = context.new_page()
    tab.on("dialog", lambda dialog: said.append(dialog.message))
    tab.goto(address)
    assert has_focus(tab, "question")
    tab.keyboard.type(AKIN)
    tab.keyboard.press("Enter")
    tab.get_by_text("the homonym for pretty is").wait_for()
    assert has_focus(tab, "answer")
    tab.keyboard.press("Tab")  # what the LM read
    tab.keyboard.press("Tab")
    assert has_focus(tab, "feedback")
    tab.keyboard.type(f"{MEANT} <script>alert(1)</script>")
    tab.keyboard.press("Tab")
    assert has_focus(tab, "Note and ask again")
    tab.keyboard.press("Enter")
    tab.get_by_text("Noted as entry 1, and asked again.").wait_for()
    assert has_focus(tab, "answer")
    assert tab.get_by_text("the synonym for pretty is").count() == 1
    assert tab.locator("blockquote").first.inner_text().endswith("<script>alert(1)</script>")
    for width, theme in ((w, t) for w in (1280, 390) for t in ("dark", "light")):
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(color_scheme=theme)
        tab.screenshot(path=screenshots / f"memory-{width}-{theme}.png", full_page=True)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.get_by_label("What you meant").fill("x" * 2001)
    tab.get_by_label("What you meant").press("Control+Enter")
    assert "2,001 characters" in tab.get_by_role("alert").inner_text()
    assert has_focus(tab, "feedback")
    tab.get_by_role("button", name="Forget entry 1").press("Enter")
    tab.get_by_text("In the memory: 0 entries").wait_for()
    widths = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1]  # nothing stands out of a narrow window
    assert (said, entries(page)) == ([], [])
    assert all(place.startswith(address) for place in asked)


TWICE = """
const told = document.getElementById("busy"), button = document.querySelector("form button");
new MutationObserver(() => sessionStorage.told = told.textContent).observe(told, {childList: true});
button.click();
setTimeout(() => button.click(), 50);
"""


def test_in_a_browser_a_form_is_not_sent_twice_while_the_lm_is_asked(browser, served):
    tab, sent = browser.new_page(), []
    tab.on("request", lambda request: sent.append(request.method))
    tab.goto(served[1])
    tab.get_by_label("Question", exact=True).fill(AKIN)
    tab.evaluate(TWICE)
    tab.get_by_text("the homonym for pretty is").wait_for()
    assert tab.evaluate("sessionStorage.told") == "Asking the language model…"
    assert sent.count("POST") == 1
    tab.go_back()
    assert tab.get_by_role("button", name="Ask", exact=True).is_enabled()


RUN = "window.ran = (window.ran || 0) + 1"
MARKUP = (
    f"""'"></script></style></title></textarea><script>{RUN}</script><img src=x onerror="{RUN}">"""
)


def report_page(folder):
    """Write a page of runs, as `pgra report --html` and the demo do, of such texts alone."""
    labels, example = (MARKUP, "b"), Example(MARKUP, {MARKUP: MARKUP, "text": MARKUP}, MARKUP)
    about = {"method": "fid", "task": "sst2", "split": "test", "metric": "accuracy", "seed": 0}
    about |= {"seconds": {MARKUP: 1.0}, "fingerprints": {}, "notes": [MARKUP]}
    said = Prediction(MARKUP, MARKUP, dict.fromkeys(labels, 0.5))
    read = [EvidenceLine(7, MARKUP, 3, 0.25, 18.5), EvidenceLine(8, "b", 1, 0.5, 8.5)]
    write_results(folder, about, labels, [example], [said], [read])
    run = replace(load_run(folder), method=MARKUP, name=MARKUP, task=MARKUP)
    studies = [compare_runs(Group(MARKUP, [run], points=p)) for p in ({}, {MARKUP: {"k": 1}})]
    path = folder / "page.html"
    path.write_text(render_page(MARKUP, studies, lead=MARKUP))
    return path.as_uri()


def test_no_markup_of_a_text_runs_on_a_page(browser, tmp_path):
    # The pages allow no script but their own: here that is off, and the escapes stand alone.
    tab = browser.new_context(bypass_csp=True).new_page()
    tab.goto(report_page(tmp_path / "run"))
    tab.evaluate("document.querySelectorAll('details').forEach((box) => box.open = true)")
    assert tab.locator("main").inner_text().count("window.ran") >= 10
    assert tab.evaluate("[window.ran, document.images.length]") == [None, 0]
    lm = FollowingLM()
    lm._go_on = lambda prompt: Completion(f"the synonym for {MARKUP} is {MARKUP} END", 1, 1)
    with serve(tmp_path / "memory.sqlite", lm) as (page, address):
        tab.goto(address)
        tab.get_by_label("Question", exact=True).fill(MARKUP)
        tab.get_by_role("button", name="Ask", exact=True).click()
        tab.get_by_label("What you meant").fill(MARKUP)
        tab.get_by_role("button", name="Note and ask again").click()
        tab.get_by_text("Noted as entry 1, and asked again.").wait_for()
        tab.evaluate("document.querySelectorAll('details').forEach((box) => box.open = true)")
        assert tab.locator("main").inner_text().count("window.ran") >= 6
        assert tab.evaluate("[window.ran, document.images.length]") == [None, 0]
        assert entries(page) == [(MARKUP, MARKUP)]
    tab.set_content(f"<textarea>{MARKUP}")  # the control
    tab.wait_for_function("window.ran === 2")
