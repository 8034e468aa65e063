"""The report page while runs go on: served to this machine alone, to whoever has its address.

One port on loopback, and an address with a random part in it, so that neither other machines nor other users of this one can
read it. Names that merely point here (DNS rebinding) are refused. The page is made anew when a browser asks and a file of the
runs has changed; nothing is done while no page is open.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from posttrain.errors import Problem, RequestError
from posttrain.report.contents import page_data
from posttrain.report.harmless import embed
from posttrain.report.html import read_runs, render, title_of

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # that a browser on this machine, or at the other end of a tunnel, may call it
FILES = ("metrics.jsonl", "timeline.jsonl", "run.json", "config.yaml")
FOLDERS = ("samples", "validation")


class Answer(NamedTuple):
    status: int
    body: str
    kind: str = "text/plain"


class LivePage:
    """What a browser is answered about these runs. Several may ask at once."""

    def __init__(self, run_dirs: Sequence[Path]):
        read_runs(run_dirs)  # says what is wrong with the folders
        self.token = secrets.token_urlsafe(24)
        self._run_dirs = list(run_dirs)
        self._lock = threading.Lock()
        self._made: tuple[dict[str, Any], str] | None = None  # the newest data, and the page's title

    def answer(self, target: str, host: str) -> Answer:
        """``target`` is what a request asks for, ``host`` the name it uses for this machine."""
        url = urlsplit(target)
        _, token, *rest = [*url.path.split("/"), ""]
        if urlsplit(f"//{host}").hostname not in NAMES or not hmac.compare_digest(token.encode(), self.token.encode()):
            return Answer(403, "Open the address that posttrain report --live printed, with all that is in it.\n")
        if rest not in (["", ""], ["data.json", ""]):
            return Answer(404, "There is no such page.\n")
        try:
            data, title = self._newest()
        except (OSError, RequestError) as error:  # a folder was moved, or a file replaced while it was read
            return Answer(503, f"The runs cannot be read just now: {error}\n")
        if rest[0] == "":
            return Answer(200, render(data, title), "text/html")
        if parse_qs(url.query).get("seen") == [data["version"]]:
            return Answer(204, "")
        return Answer(200, embed(data), "application/json")

    def _newest(self) -> tuple[dict[str, Any], str]:
        with self._lock:
            version = signature(self._run_dirs)
            if self._made is None or self._made[0]["version"] != version:
                runs = read_runs(self._run_dirs)
                self._made = page_data(runs, live=True) | {"version": version}, title_of(runs)
            return self._made


def signature(run_dirs: Sequence[Path]) -> str:
    """A text that is another one when a file that the page is made of has changed."""
    digest = blake2b(digest_size=12)
    for folder in run_dirs:
        paths = [folder / name for name in FILES]
        paths += [path for name in FOLDERS for path in sorted((folder / name).glob("step_*.jsonl"))]
        for path in paths:
            found = os.stat(path) if path.exists() else None
            digest.update(f"{path}\0{(found.st_mtime_ns, found.st_size) if found else None}\0".encode(errors="replace"))
    return digest.hexdigest()


@contextmanager
def serving(run_dirs: Sequence[Path], port: int = 0) -> Iterator[str]:
    """Serve the page of these runs inside; gives its address. Port 0 takes a free one.

    Raises: RequestError as ``read_runs``, or when the port is taken.
    """
    page = LivePage(run_dirs)
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(page))
    except OSError as error:
        what = f"port {port} of {HOST} cannot be used: {error.strerror}"
        raise RequestError(Problem(what, fix="name another with --port, or none for a free one")) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/{page.token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serve(run_dirs: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Raises: RequestError as ``serving``."""
    with serving(run_dirs, port) as address:
        number = urlsplit(address).port
        say(f"live at {address}")
        say(f"for this machine alone; elsewhere, first: ssh -L {number}:{HOST}:{number} THIS_MACHINE. Ctrl-C ends it.")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say("ended")


def _handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # s that a connection may say nothing
        server_version, sys_version = "posttrain", ""

        def do_GET(self) -> None:  # the name that http.server looks for
            answer = page.answer(self.path, self.headers.get("Host", ""))
            body = answer.body.encode("utf-8")
            self.send_response(answer.status)
            if answer.status != 204:
                self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            for name, value in (
                ("Cache-Control", "no-store"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not told: the terminal is the user's."""

    return Handler
