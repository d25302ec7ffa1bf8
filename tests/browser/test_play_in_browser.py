"""The page of `play` as a person uses it, in a browser that reaches only this machine.

`pytest -m browser`, with the extra `browser` and a Chromium. PLAY_SCREENSHOTS keeps pictures in
that folder.
"""

import os
import shutil
import threading
import time

import pytest
import torch

from gpt_lightning.commands import play
from gpt_lightning.data.tokenizers import ByteTokenizer
from gpt_lightning.model.generate import make_decoder
from gpt_lightning.model.gpt import GPT, GPTConfig

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
PHONE, SCREEN = {"width": 390, "height": 844}, {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    folder.mkdir()
    for name in ("step-0000800-loss-3.0000", "step-0002400-loss-2.0000"):
        (folder / f"{name}.ckpt").touch()

    def read(source):
        torch.manual_seed("0002400" in source)
        gpt = GPT(GPTConfig(1, 2, 32, block_size=64, vocab_size=256)).eval()
        return make_decoder(gpt), ByteTokenizer()

    with play.PlayServer(0, str(folder.parent), read) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.ending = True
        server.shutdown()


@pytest.fixture(params=["light", "dark"])
def page(server, request):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    address, complaints = f"http://localhost:{server.server_port}/", []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=PHONE, color_scheme=request.param)
        page.scheme = request.param
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: asked.url.startswith((address, "data:")) or complaints.append(asked.url),
        )
        page.goto(f"{address}?token={server.token}")
        page.wait_for_load_state("networkidle")
        yield page
        browser.close()
    assert complaints == []


def written(page, number=0) -> str:
    # wait_for_function would need eval, which the page's policy forbids
    page.locator("#status", has_text="done").wait_for(timeout=20_000)
    return page.locator(".text").nth(number).text_content()


def picture(page, name: str) -> None:
    for size in (PHONE, SCREEN):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if folder := os.environ.get("PLAY_SCREENSHOTS"):
            file = f"{folder}/play-{name}-{size['width']}-{page.scheme}.png"
            page.screenshot(path=file, full_page=True)
    page.set_viewport_size(PHONE)


def test_a_text_is_written_repeated_stopped_and_explained_by_keyboard(page, server):
    page.keyboard.type("Once upon")  # the prompt has the focus
    page.locator("#max_new_tokens").fill("30")
    page.locator("#prompt").press("Control+Enter")
    first = written(page)
    assert first.startswith("Once upon")
    assert page.locator(".token").count() == 30
    page.get_by_role("button", name="Write").press("Enter")
    assert written(page) == first
    page.get_by_role("button", name="Again").press("Enter")
    assert written(page) != first
    page.locator(".text").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("tbody tr").count() in (10, 11)
    assert page.locator(".token").nth(1).get_attribute("class") == "token chosen"
    colors = page.locator(".token").evaluate_all("s => s.map(e => e.style.backgroundColor)")
    assert len(colors) == 30
    assert all(colors)
    picture(page, "one")

    page.locator("#max_new_tokens").fill("2000")
    page.get_by_role("button", name="Write").click()
    page.locator(".token").nth(5).wait_for(state="attached")
    page.get_by_role("button", name="Stop").press("Enter")
    end = time.monotonic() + 20
    while server.computing.locked():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert page.locator(".token").count() < 2000
    assert page.locator("#status").text_content() == "stopped"


def test_two_checkpoints_write_side_by_side(page):
    page.locator("#prompt").fill("Once upon")
    page.locator("#max_new_tokens").fill("30")
    page.get_by_role("button", name="Compare two").click()
    chosen = page.locator("select").evaluate_all("s => s.map(e => e.value)")
    assert chosen == ["step-0002400-loss-2.0000", "step-0000800-loss-3.0000"]
    page.get_by_role("button", name="Write").click()
    assert written(page, 0) != written(page, 1)
    assert page.locator(".token").count() == 60
    picture(page, "two")
    page.set_viewport_size(SCREEN)
    left, right = (box.bounding_box() for box in page.locator("section").all())
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]
