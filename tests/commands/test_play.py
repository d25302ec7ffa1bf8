"""The command `play` over HTTP: who is let in, what is streamed, how many wait, what ends."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from gpt_lightning.cli import main
from gpt_lightning.commands import play
from gpt_lightning.commands.sample import load

ASKED = {"checkpoint": "model", "prompt": "Once é", "seed": 7, "max_new_tokens": 20}
ASKED |= {"temperature": 0.8, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture
def server(model):
    read = partial(load, device="cpu", dtype="fp32", n_tokens=1, network=None)
    with play.PlayServer(0, "a.ckpt", read) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.ending = True
        server.shutdown()
        thread.join()


def request(server, method="GET", path="/", body=None, token=None, **headers):
    """Return an answer that has not been read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    token = server.token if token is None else token
    connection.request(method, f"{path}?token={token}", body, headers)
    return connection.getresponse()


def ask(server, **asked):
    return request(server, "POST", "/generate", json.dumps({**ASKED, **asked}))


def events(answer) -> list[dict]:
    return [json.loads(part[6:]) for part in answer.read().decode().split("\n\n") if part]


def text_of(found: list[dict]) -> str:
    return "".join(event.get("text", event.get("end", "")) for event in found)


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "given",
    [
        {"token": ""},
        {"token": "wrong"},
        {"token": "\u00e9".encode().decode("latin-1")},
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Host": "example.org"},
        {"Host": "localhost.example.org"},
    ],
)
def test_other_origins_hosts_and_tokens_are_forbidden(server, given):
    given = {key: value.encode("ascii", "ignore").decode() for key, value in given.items()}
    paths = [("GET", path) for path in (*play.FILES, "/checkpoints", "/generate", "/../play.py")]
    for method, path in [*paths, ("POST", "/generate"), ("POST", "/")]:
        answer = request(server, method, path, json.dumps(ASKED), **given)
        assert answer.status == 403
        assert server.token not in answer.read().decode()


def test_only_the_pages_own_files_are_served(server):
    own = {"Origin": f"http://localhost:{server.server_port}"}
    own["Host"] = own["Origin"].removeprefix("http://")
    for path in (*play.FILES, "/checkpoints"):
        answer = request(server, path=path, **own)
        assert answer.status == 200
        assert answer.getheader("Content-Security-Policy").startswith("default-src 'none'; ")
    for path in ("/play.py", "/../../pyproject.toml", "/etc/passwd"):
        assert request(server, path=path).status == 404
    assert server.server_address[0] == "127.0.0.1"


def test_a_stream_is_the_text_of_sample_with_its_probabilities(server, capsys):
    first, again = (events(ask(server)) for _ in range(2))
    assert first == again
    assert first[0] == {"beginning": "Once é"}
    capsys.readouterr()
    command = ["--prompt", "Once é", "--seed", "7", "--max_new_tokens", "20", "--json"]
    assert main(["sample", "a.ckpt", "--device", "cpu", "--dtype", "fp32", *command]) == 0
    assert text_of(first) == json.loads(capsys.readouterr().out)["text"]
    tokens = [event for event in first if "p" in event]
    assert len(tokens) == 20
    for event in tokens:
        chances = [p for _, p in event["likeliest"]]
        assert len(chances) == 10
        assert chances == sorted(chances, reverse=True)
        assert 0 < event["p"] <= chances[0]
        assert sum(chances) < 1
    assert text_of(events(ask(server, seed=8))) != text_of(first)


def test_the_probability_is_that_of_the_model(server, model):
    gpt, tokenizer = model
    start = torch.tensor([tokenizer.encode("Once é").tolist()])
    probs = gpt(start)[0, -1, : tokenizer.vocab_size].softmax(-1)
    event = events(ask(server, temperature=0.0, max_new_tokens=1))[1]
    # two orders of the same sums in float32
    assert event["p"] == pytest.approx(probs.max().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": play.MAX_TOKENS + 1}, "length 1 to 2,000"),
        ({"seed": -1}, "seed is 0"),
        ({"prompt": "x" * (play.MAX_CHARACTERS + 1)}, "longer than 20,000"),
        ({"prompt": "x" * play.MAX_BYTES}, "at most 131,072"),
        ({"checkpoint": "/etc/passwd"}, "wrong request"),
        ({"temperature": None}, "wrong request"),
    ],
)
def test_a_wrong_request_names_its_mistake(server, wrong, message):
    answer = ask(server, **wrong)
    assert answer.status == 400
    assert message in answer.read().decode()
    assert events(ask(server))[-1].keys() == {"end"}


def test_a_number_out_of_bounds_is_an_event(server):
    assert "temperature" in events(ask(server, temperature=-1.0))[-1]["error"]
    assert events(ask(server))[-1].keys() == {"end"}


def test_of_fifty_requests_one_is_computed_eight_wait_and_the_others_are_told(server):
    with server.computing, ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(ask, server, max_new_tokens=2) for _ in range(50)]
        wait_for(lambda: sum(answer.done() for answer in answers) == 50)
        codes = [answer.result().status for answer in answers]
        assert (codes.count(200), codes.count(503)) == (1 + play.QUEUE, 50 - 1 - play.QUEUE)
        full = [answer.result() for answer in answers if answer.result().status == 503]
        assert {answer.read().decode() for answer in full} == {play.FULL}
    texts = {text_of(events(a.result())) for a in answers if a.result().status == 200}
    assert len(texts) == 1
    assert text_of(events(ask(server, max_new_tokens=2))) in texts


def test_a_closed_page_stops_its_text_and_gives_up_its_place(server, monkeypatch):
    sent = []
    event = play.PlayHandler.event

    def slow(self, **facts):
        sent.append(facts)
        time.sleep(0.005)
        event(self, **facts)

    monkeypatch.setattr(play.PlayHandler, "event", slow)
    answer = ask(server, max_new_tokens=2000)
    answer.read(200)
    answer.close()
    wait_for(lambda: not server.computing.locked())
    assert 1 < len(sent) < 1000
    assert events(ask(server))[-1].keys() == {"end"}


def test_the_checkpoints_of_a_run_can_be_chosen(model, monkeypatch):
    folder = Path("run/checkpoints")
    folder.mkdir(parents=True)
    names = ["step-0000002-loss-3.0000", "step-0000004-loss-2.0000", "step-0000006-loss-2.5000"]
    for name in names:
        (folder / f"{name}.ckpt").touch()
    read = []
    server = play.PlayServer(0, "run", lambda source: read.append(source))
    server.server_close()
    assert [*server.checkpoints] == [names[1], names[0], names[2]]
    assert read == [str(folder.absolute() / f"{names[1]}.ckpt")]


def test_a_port_in_use_is_an_error(server, capsys):
    assert main(["play", "a.ckpt", "--device", "cpu", "--port", str(server.server_port)]) == 2
    assert f"port {server.server_port} cannot be used" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_with_0(tmp_path):
    code = (
        "import sys, types; from gpt_lightning import cli; from gpt_lightning.commands import play;"
        "play.load = lambda *a, **k: (None, None); sys.exit(cli.main(['play', 'a.ckpt']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if "DISPLAY" not in key},
    )
    assert process.stdout.readline().startswith("http://localhost:")
    process.stdout.readline()
    time.sleep(0.2)  # serve_forever begins
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
