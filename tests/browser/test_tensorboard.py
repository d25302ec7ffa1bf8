"""TensorBoard as a person sees it: a run, a server on loopback, a browser.

`pytest -m browser`, with the extra `browser` and a Chromium. TENSORBOARD_LOGDIR looks at runs
that are there already, TENSORBOARD_SCREENSHOT keeps the picture.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
CONFIG = """
trainer: {accelerator: cpu, max_steps: 60, val_check_interval: 20, check_val_every_n_epoch: null}
model:
  config: {n_layer: 2, n_head: 2, n_embd: 32, block_size: 16, vocab_size: null}
data: {text_file: text.txt, tokenizer: char}
speed: {peak_flops: measure}
"""
TAGS = ["train/loss", "val/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_sec", "perf/mfu"]


@pytest.fixture
def server(text_file):
    logdir = os.environ.get("TENSORBOARD_LOGDIR")
    if logdir is None:
        logdir = str(text_file.parent / "lightning_logs")
        (text_file.parent / "tiny.yaml").write_text(CONFIG)
        command = [sys.executable, "-m", "gpt_lightning", "fit", "--config", "tiny.yaml"]
        subprocess.run(command, cwd=text_file.parent, check=True, timeout=100)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", str(port)]
    process = subprocess.Popen([*command, "--host", "127.0.0.1"])
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(url, timeout=1)
                break
            except OSError:
                time.sleep(0.3)
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
        yield browser.new_page(viewport={"width": 1900, "height": 1080})
        browser.close()


def test_curves_samples_and_hyperparameters_are_there(server, page):
    page.goto(f"{server}?tagFilter={'|'.join(TAGS)}#timeseries")
    for tag in TAGS:
        page.get_by_text(tag, exact=True).first.wait_for(timeout=60_000)
    page.wait_for_timeout(5_000)  # the curves are drawn after their titles
    if "TENSORBOARD_SCREENSHOT" in os.environ:
        page.screenshot(path=os.environ["TENSORBOARD_SCREENSHOT"])
    page.goto(f"{server}#text")
    page.get_by_text("samples/text/text_summary").first.wait_for(timeout=60_000)
    page.goto(f"{server}#hparams")
    page.get_by_text("model/n_embd").first.wait_for(timeout=60_000)
    page.get_by_text("val/loss").first.wait_for(timeout=60_000)
    assert page.get_by_text("hp_metric").count() == 0
