"""TensorBoard as a person sees it: two runs, a server on loopback, a browser.

`pytest -m browser`, with the extra `browser` and a Chromium. TENSORBOARD_LOGDIR looks at runs that
are there already, TENSORBOARD_SCREENSHOTS=DIR keeps a picture of each tab. docs/tensorboard.png is
DIR/custom_scalars.png after

    FIT="gpt-lightning fit --config quickstart --trainer.max_steps 600"
    FIT="$FIT --trainer.val_check_interval 100 --trainer.limit_val_batches 6"
    $FIT --run_name muon && $FIT --run_name adamw --model.optimizer adamw
    TENSORBOARD_LOGDIR=lightning_logs TENSORBOARD_SCREENSHOTS=DIR pytest -m browser -k true
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from gpt_lightning.runs.logger import CHARTS, PAGE

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
CONFIG = """
trainer:
  {accelerator: cpu, precision: 32-true, max_steps: 60, val_check_interval: 20,
   check_val_every_n_epoch: null}
model:
  config: {n_layer: 2, n_head: 2, n_embd: 32, block_size: 16, vocab_size: null}
  compile: false
data: {text_file: text.txt, tokenizer: char}
speed: {peak_flops: 1.0e+12}
"""
ADDRESS = PAGE.removeprefix("http://localhost:6006/")  # address of the charts


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> str:
    """Runs with two optimizers, one of them in two sessions."""
    if "TENSORBOARD_LOGDIR" in os.environ:
        return os.environ["TENSORBOARD_LOGDIR"]
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    (folder / "tiny.yaml").write_text(CONFIG)
    fit = [sys.executable, "-m", "gpt_lightning", "fit", "--config", "tiny.yaml"]
    muon = ["--model.optimizer", "muon", "--run_name", "muon"]
    for args in ([*muon, "--trainer.max_steps", "40"], [*muon, "--resume", "auto"], []):
        subprocess.run([*fit, *args], cwd=folder, check=True, timeout=100)
    return str(folder / "lightning_logs")


@pytest.fixture(params=["true", "false"], scope="module")
def server(request, logdir):
    """Address of a server, with TensorBoard's fast reader of files and with the other one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", str(port)]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", f"--load_fast={request.param}"])
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(url, timeout=1)
                break
            except OSError:
                time.sleep(0.3)
        time.sleep(5)  # the files are read after the server has started
        yield url
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture
def page():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    with playwright.sync_playwright() as p:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = p.chromium.launch(executable_path=chromium, args=arguments)
        yield browser.new_page(viewport={"width": 1100, "height": 700})
        browser.close()


def keep(page, name: str, height: int = 700) -> None:
    """Keep a picture of the top of a page, once its curves are drawn."""
    page.wait_for_timeout(5_000)  # after their titles
    if "TENSORBOARD_SCREENSHOTS" in os.environ:
        path = Path(os.environ["TENSORBOARD_SCREENSHOTS"]) / f"{name}.png"
        page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1100, "height": height})


def texts(page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def test_the_page_that_opens_begins_with_the_losses(server, page):
    page.goto(server)
    page.get_by_text("loss_by_tokens/val", exact=True).first.wait_for(timeout=60_000)
    keep(page, "time_series")
    groups = texts(page, "metrics-card-group-toolbar .group-title, .group-title-wrapper")
    assert groups[0].startswith("loss_by_tokens")
    cards = texts(page, "scalar-card .tag")
    assert [card.replace("\n", "") for card in cards[:2]] == [
        "loss_by_tokens/train",
        "loss_by_tokens/val",
    ]


def test_the_charts_are_open_in_their_order_and_without_smoothing(server, page):
    page.goto(server + ADDRESS)
    for title in (title for charts in CHARTS.values() for title in charts):
        page.get_by_text(title, exact=True).first.wait_for(timeout=60_000)
    keep(page, "custom_scalars", height=440)
    headings = [page.get_by_text(category, exact=True).first for category in CHARTS]
    heights = [heading.bounding_box()["y"] for heading in headings]
    assert heights == sorted(heights)
    smoothing = page.locator("tf-smoothing-input paper-input input").first
    assert float(smoothing.input_value()) == 0
    chart = page.locator("tf-custom-scalar-multi-line-chart-card").first
    curves = chart.locator(".match-list-entry").all_text_contents()
    for curve in ("train/loss", "val/loss"):
        assert any(curve in text for text in curves)
    assert page.get_by_text("Matches (0)").count() == 0


def test_samples_are_in_blocks_of_fixed_width(server, page):
    page.goto(f"{server}#text")
    page.get_by_text("samples/text/text_summary").first.wait_for(timeout=60_000)
    keep(page, "text")
    blocks = texts(page, "tf-text-loader pre code, tf-markdown-view pre code")
    assert len(blocks) > 1


def test_runs_are_compared_by_what_matters(server, page):
    page.goto(f"{server}#hparams")
    page.get_by_text("val/loss").first.wait_for(timeout=60_000)
    keep(page, "hparams")
    of_tiny = () if "TENSORBOARD_LOGDIR" in os.environ else ("32-true", "1337.0")
    for cell in ("muon", "adamw", *of_tiny):
        page.get_by_text(cell, exact=True).first.wait_for(timeout=10_000)
    assert page.get_by_text("hp_metric").count() == 0
