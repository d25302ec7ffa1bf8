"""The command `gpt-lightning play`: a page on this machine on which a trained model writes.

The page is play.html, with play.css and play.js. Only this machine can reach the server, and each
request needs the token of the printed address.
"""

import hmac
import json
import os
import re
import secrets
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from jsonargparse.typing import NonNegativeInt

from gpt_lightning.commands.sample import Text, load
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.runs.folders import RunPaths

QUEUE = 8  # requests that wait while one is computed
MAX_BYTES, MAX_CHARACTERS, MAX_TOKENS = 2**17, 20_000, 2_000  # limits: request, prompt, text
TOP_K = 200  # that of `sample`, whose texts the page repeats
LIKELIEST = 10  # tokens that the page shows for each place
FILES = {"/": "html", "/play.css": "css", "/play.js": "javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
FULL = f"busy: one text is being written and {QUEUE} wait; try again in a moment"


def play(
    path: str,
    port: NonNegativeInt = 0,
    no_browser: bool = False,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    network: str | Fields | None = None,
) -> None:
    """Open a page on which a trained model continues text, until Ctrl-C.

    The page shows the probability of each token, and compares two checkpoints of a run.

    Args:
        path: Source of a model, as for `sample`: run folder, checkpoint, exported folder, or gpt2.
        port: Port of the page on this machine; 0: a free one.
        no_browser: Print the address, and open no browser.
        device: Device of the model. auto: cuda, else mps, else cpu.
        dtype: dtype of matrix products, as for `sample`.
        network: Network of one's own (also --model.network); null: that of the run's config.yaml.
    """
    read = partial(load, device=device, dtype=dtype, n_tokens=MAX_TOKENS, network=network)
    try:
        server = PlayServer(port, path, read)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}): give another one") from error
    with server:
        url = f"http://localhost:{server.server_port}/?token={server.token}"
        print(f"{url}\nCtrl-C ends it", flush=True)
        shows = sys.platform == "darwin" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}
        if shows and not no_browser:
            webbrowser.open(url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        server.ending = True
        with server.computing:  # the text of the moment ends before the interpreter does
            print()


class PlayServer(ThreadingHTTPServer):
    """HTTP server of the page, on this machine alone.

    Args:
        port: Port; 0: a free one.
        source: Source of the model.
        read: Function from a source to its Decoder and its tokenizer.

    Attributes:
        token: Secret of the address.
        checkpoints: Source of each model that the page offers, by name; the first is the best.
        model: Function from a source to what `read` returns, for the last two sources.
        places: Places for the request that is computed and those that wait.
        computing: Lock of the request that is computed.
        ending: True after Ctrl-C.
    """

    request_queue_size = 128  # connections that come at once

    def __init__(self, port: int, source: str, read: Callable[[str], Any]):
        from gpt_lightning.runs.sources import find_model  # it imports torch

        self.token, self.ending = secrets.token_urlsafe(24), False
        self.model = lru_cache(maxsize=2)(read)
        self.checkpoints = {"model": source}
        path = find_model(source) if Path(source).exists() else Path(source)
        if path.is_file() and (run := RunPaths.of_checkpoint(path)):
            names = path, *(saved.path for saved in reversed(run.saved()))
            self.checkpoints = {path.stem: str(path) for path in names}
        self.model(next(iter(self.checkpoints.values())))  # mistakes end the command
        self.places = threading.BoundedSemaphore(QUEUE + 1)
        self.computing = threading.Lock()
        super().__init__(("127.0.0.1", port), PlayHandler)


class PlayHandler(BaseHTTPRequestHandler):
    """Answers to the page's requests."""

    server: PlayServer
    timeout = 60  # seconds for a client that does not read or write

    def do_GET(self) -> None:
        path = self.allowed()
        if path == "/checkpoints":
            self.answer(200, json.dumps([*self.server.checkpoints]), "application/json")
        elif path in FILES:
            name = "play.html" if path == "/" else path[1:]
            content = Path(__file__).with_name(name).read_text(encoding="utf-8")
            self.answer(200, content.replace("TOKEN", self.server.token), f"text/{FILES[path]}")
        elif path:
            self.answer(404, "no such page")

    def do_POST(self) -> None:
        path = self.allowed()
        if path and path != "/generate":
            self.answer(404, "no such page")
        elif path and not self.server.places.acquire(blocking=False):
            self.answer(503, FULL)
        elif path:
            try:
                self.generate()
            except (ConnectionError, TimeoutError):
                pass  # the page was closed: its text ends here
            finally:
                self.server.places.release()

    def allowed(self) -> str:
        """Return the path of a request that is the page's own; answer others with 403."""
        url = urlsplit(self.path)
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        given = parse_qs(url.query).get("token", [""])[0].encode()
        local = re.fullmatch(r"(localhost|127\.0\.0\.1)(:\d+)?", host)
        if (
            local
            and origin in (None, f"http://{host}")
            and hmac.compare_digest(given, self.server.token.encode())
        ):
            return url.path or "/"
        self.answer(403, "forbidden: open the address that gpt-lightning play has printed")
        return ""

    def answer(self, code: int, text: str, kind: str = "text/plain") -> None:
        """Send a whole answer."""
        content = text.encode()
        self.start(code, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def start(self, code: int, kind: str, more: Fields) -> None:
        """Send the head of an answer."""
        self.send_response(code)
        for key, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **more}.items():
            self.send_header(key, value)
        self.end_headers()

    def event(self, **facts: Any) -> None:
        """Send a server-sent event."""
        self.wfile.write(f"data: {json.dumps(facts)}\n\n".encode())

    def generate(self) -> None:
        """Send the tokens of a text as they are computed."""
        try:
            size = int(self.headers.get("Content-Length", 0))
            if size > MAX_BYTES:
                raise ValueError(f"the request has {size:,} bytes; at most {MAX_BYTES:,}")
            asked = json.loads(self.rfile.read(size))
            prompt, source = str(asked["prompt"]), self.server.checkpoints[asked["checkpoint"]]
            seed, length = int(asked["seed"]), int(asked["max_new_tokens"])
            how = {key: float(asked[key]) for key in ("temperature", "top_p", "min_p")}
            if not (0 <= seed < 2**32 and 1 <= length <= MAX_TOKENS):
                raise ValueError(f"seed is 0 to 2^32 - 1, and length 1 to {MAX_TOKENS:,}")
            if len(prompt) > MAX_CHARACTERS:
                raise ValueError(f"the prompt is longer than {MAX_CHARACTERS:,} characters")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            self.answer(400, f"wrong request: {error}")
            return
        self.start(200, "text/event-stream", {})
        while not self.server.computing.acquire(timeout=0.5):
            self.event(waiting=True)  # fails if the page was closed
        try:
            decoder, tokenizer = self.server.model(source)
            text = Text(tokenizer, (), "the prompt", prompt, seed)
            self.stream(decoder, tokenizer, text, {**how, "max_new_tokens": length})
        except UserError as error:
            self.event(error=str(error))
        finally:
            self.server.computing.release()

    def stream(self, decoder: Any, tokenizer: Any, text: Text, how: Fields) -> None:
        """Generate a text, and send each token with its probability and the likeliest ones."""
        import torch  # not for --help

        from gpt_lightning.model.generate import generate

        probs = torch.empty(0)

        def on_logits(logits: torch.Tensor) -> None:
            nonlocal probs
            probs = logits[0].softmax(dim=-1)

        def on_tokens(tokens: list[int]) -> bool:
            shown = len(text.text)
            text.add(tokens[0])
            best = probs.topk(min(LIKELIEST, len(probs)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            likeliest = [(tokenizer.decode([token]), p) for token, p in pairs]
            self.event(text=text.text[shown:], p=float(probs[tokens[0]]), likeliest=likeliest)
            return self.server.ending

        self.event(beginning=text.beginning)
        generate(
            decoder,
            torch.tensor([text.start], device=decoder.device),
            generator=[torch.Generator(decoder.device).manual_seed(text.seed)],
            vocab_size=tokenizer.vocab_size,
            top_k=TOP_K,
            on_tokens=on_tokens,
            on_logits=on_logits,
            **how | {"min_p": how["min_p"] or None},
        )
        shown = len(text.text)
        text.close()
        self.event(end=text.text[shown:])

    def log_message(self, *args: Any) -> None:
        """Print nothing: a line would have the token."""
