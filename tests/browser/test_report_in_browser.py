"""A page of `report` as a person sees it, opened from the disk.

`pytest -m browser`, with the extra `browser` and a Chromium. REPORT_SCREENSHOTS keeps pictures in
that folder.
"""

import os
import shutil
from pathlib import Path

import pytest
from reported import HOSTILE, SAMPLE, write_run

from gpt_lightning.cli import main

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
LOSS = "svg[aria-label^=Loss]"


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    """Page of a long run with a spike and gaps, of one point, and of hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    losses: list[float | None] = [4 - step / 5_000 for step in range(10_000)]
    losses[6_666], losses[8_000:8_050] = 9.0, [None] * 50
    write_run(folder / "long/version_0", losses, {"model": {"lr": 0.1}})
    write_run(folder / "point/version_0", [3.0], {"model": {"lr": 0.2}})
    write_run(folder / HOSTILE / "version_0", [3.0, 2.5], {"model": {"lr": HOSTILE}}, HOSTILE)
    runs = [str(folder / name) for name in ("long", "point", HOSTILE)]
    out = folder / "page.html"
    assert main(["report", *runs, "--out", str(out), "--reference", "shakespeare-mps"]) == 0
    return f"file://{out}"


@pytest.fixture
def open_page(address):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def opened(width: int = 1200, scheme: str = "light"):
            page = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=True
            )
            page.said, page.asked = [], []
            page.on("console", lambda message: page.said.append(message.text))
            page.on("pageerror", lambda error: page.said.append(str(error)))
            page.on("dialog", lambda dialog: page.said.append(dialog.message))
            page.on("request", lambda request: page.asked.append(request.url))
            page.goto(address)
            page.locator(f"{LOSS} .curve").first.wait_for(state="attached")
            return page

        yield opened
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_is_whole_asks_for_nothing_and_runs_no_text(open_page, address, width, scheme):
    page = open_page(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("h1").text_content() == f"long, point, {HOSTILE}"
    texts = page.locator("pre").all_text_contents()
    assert texts == [SAMPLE, SAMPLE, SAMPLE, HOSTILE, HOSTILE]
    assert page.locator("td", has_text=HOSTILE).count() == 3  # folder, what differs, settings
    assert page.locator("script, img, b:not(summary b)").count() == 2
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"report-{width}-{scheme}.png", full_page=True)
    assert (page.said, page.asked) == ([], [address])


def marks(page) -> list[str]:
    """Texts of the axes of the losses, the horizontal one first."""
    return page.locator(f"{LOSS} text").all_text_contents()


def test_curves_are_drawn_zoomed_and_read(open_page):
    page = open_page()
    assert page.locator(f"{LOSS} .curve").count() == 3 * 2 + 2
    paths = [path or "" for path in page.locator(f"{LOSS} .curve").evaluate_all(
        "paths => paths.map((path) => path.getAttribute('d'))"
    )]  # fmt: skip
    assert not any("NaN" in path or "undefined" in path for path in paths)
    assert paths[0].count("M") == 2  # broken where there is no number
    assert page.locator(f"{LOSS} circle").count() >= 2  # one point is a dot
    whole = marks(page)
    assert "10,000" in whole
    assert "8" in whole  # the spike
    page.locator(LOSS).scroll_into_view_if_needed()
    box = page.locator(LOSS).bounding_box()
    left, middle = box["x"] + 90, box["y"] + 100
    page.mouse.move(left, middle)
    page.mouse.down()
    page.mouse.move(left + 200, middle, steps=4)
    page.mouse.up()
    assert "10,000" not in marks(page)
    assert "8" not in marks(page)  # the other axis follows
    tip = page.locator("section", has=page.locator(LOSS)).locator(".tip")
    assert "long val: 3." in tip.text_content() or "long train: 3." in tip.text_content()
    page.get_by_role("button", name="whole range").click()
    assert marks(page) == whole
    colors = page.locator(".controls span").evaluate_all("s => s.map((each) => each.style.color)")
    assert len({*colors}) == 3 + 1
    page.get_by_label("over").select_option("tokens")
    assert marks(page)[-1] == "tokens"
    page.get_by_label("over").select_option("wall time (s)")
    assert marks(page)[-1] == "wall time (s)"
    assert page.said == []


def test_a_printed_page_has_its_folded_parts(open_page, tmp_path):
    page = open_page(scheme="dark")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert not page.get_by_role("button").is_visible()
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000
