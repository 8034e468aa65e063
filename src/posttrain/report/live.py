"""The report page of active runs, served to this machine only, to anyone who has its address.

It listens on loopback, at an address with a random part, so that neither other machines nor other users of this one can
read it. Other host names that resolve to this machine (DNS rebinding) are rejected. The page is rendered again when a browser
requests it and a file of the runs has changed; without requests no work is done.
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
NAMES = (HOST, "localhost")  # host names of a browser on this machine, or at the other end of a tunnel
FILES = ("metrics.jsonl", "timeline.jsonl", "run.json", "config.yaml")
FOLDERS = ("samples", "validation")


class PageResponse(NamedTuple):
    status: int
    body: str
    kind: str = "text/plain"


class LivePage:
    """Responses to the requests of browsers about these runs. Thread-safe."""

    def __init__(self, run_dirs: Sequence[Path]):
        read_runs(run_dirs)  # reports problems of the folders
        self.token = secrets.token_urlsafe(24)
        self._run_dirs = list(run_dirs)
        self._lock = threading.Lock()
        # The newest data, and the page's title.
        self._rendered: tuple[dict[str, Any], str] | None = None

    def answer(self, target: str, host: str) -> PageResponse:
        """Respond to a request for ``target``, with ``host`` as the name of this machine."""
        try:
            url = urlsplit(target)
        except ValueError:  # http://[/
            return PageResponse(400, "This is no address.\n")
        _, token, *rest = [*url.path.split("/"), ""]
        if not _is_here(host) or not hmac.compare_digest(token.encode(), self.token.encode()):
            return PageResponse(403, "Open the complete address that posttrain report --live printed.\n")
        if rest not in (["", ""], ["data.json", ""]):
            return PageResponse(404, "There is no such page.\n")
        try:
            data, title = self._newest()
        except (OSError, RequestError) as error:  # a folder was moved, or a file replaced during the read
            return PageResponse(503, f"The runs cannot be read now: {error}\n")
        if rest[0] == "":
            return PageResponse(200, render(data, title), "text/html")
        if parse_qs(url.query).get("seen") == [data["version"]]:
            return PageResponse(204, "")
        return PageResponse(200, embed(data), "application/json")

    def _newest(self) -> tuple[dict[str, Any], str]:
        with self._lock:
            version = signature(self._run_dirs)
            if self._rendered is None or self._rendered[0]["version"] != version:
                runs = read_runs(self._run_dirs)
                self._rendered = page_data(runs, live=True) | {"version": version}, title_of(runs)
            return self._rendered


def _is_here(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in NAMES
    except ValueError:  # [::1
        return False


def signature(run_dirs: Sequence[Path]) -> str:
    """Return a text that changes when a file of the page changes."""
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
    """Serve the page of these runs inside the ``with`` block. Yields: its address. Port 0 chooses a free port.

    Raises: RequestError as ``read_runs``, or when the port is taken.
    """
    page = LivePage(run_dirs)
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(page))
    except OSError as error:
        what = f"port {port} of {HOST} cannot be used: {error.strerror}"
        raise RequestError(Problem(what, fix="name another with --port, or omit it for a free one")) from error
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
        say(f"for this machine only; elsewhere, first: ssh -L {number}:{HOST}:{number} THIS_MACHINE. Ctrl-C ends it.")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say("ended")


def _handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds without data before a connection is closed
        server_version, sys_version = "posttrain", ""

        def do_GET(self) -> None:  # the name is fixed by http.server
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
            """No-op: the terminal shows no requests."""

    return Handler
