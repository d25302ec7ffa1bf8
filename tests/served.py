"""HTTP server on loopback that is slow, cuts connections and lies, as a test asks for."""

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; a test says what goes wrong."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.cut: dict[str, int] = {}  # name -> how many more times it is cut in the middle
        self.wrong: dict[str, int] = {}  # name -> how many more times a bit is flipped
        self.busy: dict[str, int] = {}  # name -> how many more times it answers 503
        self.headers: dict[str, str] = {}  # headers of every answer
        self.sent = lambda n_bytes: None  # called before each file's bytes are sent
        self.delay_s: dict[str, float] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        server, name = self.server, self.path.lstrip("/")
        path = server.folder / name
        if not path.exists():
            self.send_error(404)
            return
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir())
            content = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
        else:
            content = path.read_bytes()
        if body and server.busy.get(name, 0) > 0:
            server.busy[name] -= 1
            self.send_error(503)
            return
        if body:
            server.requests.append(name)
            time.sleep(server.delay_s.get(name, 0.0))
            if server.wrong.get(name, 0) > 0:
                server.wrong[name] -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
        first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
        ranges = "Accept-Ranges" in server.headers
        content = content[int(first) : int(last or len(content)) + 1] if ranges else content
        self.send_response(206 if ranges and "Range" in self.headers else 200)
        for key, value in server.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        if not path.is_file():
            self.send_header("Content-Type", "text/html")
        self.end_headers()
        if not body:
            return
        if server.cut.get(name, 0) > 0:
            server.cut[name] -= 1
            content = content[: len(content) // 2]
            self.close_connection = True
        server.sent(len(content))
        self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
