"""The documentation site as a person sees it, in a browser that reaches only this machine.

`pytest -m browser`, with the extras `browser` and `docs` and a Chromium. SITE_SCREENSHOTS keeps
pictures in that folder.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_site import SEARCHED

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PAGES = ("index.html", "docs/tutorials/own_text.html", "docs/python.html", "docs/commands.html")


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("zensical")
    subprocess.run([sys.executable, "docs/build_site.py"], cwd=ROOT, check=True, timeout=200)
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(ROOT / "build" / "site")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture
def page(address):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.wanted = []  # addresses beyond this machine

        def decide(route):
            if route.request.url.startswith((address, "data:")):
                route.continue_()
            else:
                page.wanted.append(route.request.url)
                route.abort()

        page.route("**/*", decide)
        yield page
        browser.close()


def test_pages_are_whole_without_a_network(page, address):
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    for name in PAGES:
        page.goto(address + name)
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").first.is_visible()
        if folder := os.environ.get("SITE_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/{name.replace('/', '-')}.png")
    assert page.wanted == []
    assert errors == []


@pytest.mark.parametrize(("words", "name"), [("loss_chunk", "memory"), *SEARCHED.items()])
def test_the_search_finds_the_page_of_a_subject(page, address, words, name):
    page.goto(address + "index.html")
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    page.keyboard.type(words, delay=10)
    page.wait_for_timeout(1500)
    if folder := os.environ.get("SITE_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/search-{words}.png")
    links = [link.get_attribute("href") for link in page.locator("a[href*='?h=']").all()]
    assert any(f"docs/{name}.html" in link for link in links[:3]), links
    assert page.wanted == []


def test_a_table_scrolls_within_itself_on_a_phone_and_a_button_makes_it_dark(page, address):
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(address + "docs/lightning.html")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cell = page.locator("td", has_text="reload_dataloaders_every_n_epochs").first
    assert cell.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert cell.bounding_box()["width"] < 390 / 2
    for name, scheme in (("light mode", "default"), ("dark mode", "slate")):
        page.get_by_title(f"Switch to {name}").locator("visible=true").click()
        assert page.locator("body").get_attribute("data-md-color-scheme") == scheme
