"""The page while a run goes on: who may read it, and when it is made anew."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from posttrain.errors import RequestError
from posttrain.report import live
from posttrain.report.live import LivePage, serve, serving, signature


class Browser:
    """Asks the page at an address."""

    def __init__(self, address: str):
        url = urlsplit(address)
        self.port, self.base = url.port or 0, url.path

    def get(self, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, dict[str, str], str]:
        """Status, headers and body of what the server answers. A path that begins with / is asked for as it is."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path if path.startswith("/") else self.base + path, headers={"Host": host})
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), body


@pytest.fixture
def browser(run_dir: Path) -> Iterator[Browser]:
    with serving([run_dir]) as address:
        yield Browser(address)


def test_page_and_data_are_served_with_the_token(browser: Browser) -> None:
    status, headers, body = browser.get("")
    assert status == 200 and body.startswith("<!doctype html>")
    assert headers["Content-Type"] == "text/html; charset=utf-8" and headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "form-action 'none'; connect-src 'self'\">" in body
    status, headers, body = browser.get("data.json")
    assert status == 200 and headers["Content-Type"] == "application/json; charset=utf-8"
    assert json.loads(body)["live"] is True and json.loads(body)["runs"][0]["name"] == "demo"


@pytest.mark.parametrize("path", ["/", "/data.json", "/wrong/", "/wrong/data.json", "//"])
def test_nothing_is_served_without_the_token(browser: Browser, path: str) -> None:
    status, _, body = browser.get(path)
    assert (status, body) == (403, "Open the complete address that posttrain report --live printed.\n")


def test_another_name_for_this_machine_is_refused(browser: Browser) -> None:
    """A page elsewhere can have its own name point to 127.0.0.1; the browser then names it in Host."""
    for host in ("evil.example", f"evil.example:{browser.port}", "127.0.0.1.evil.example", ""):
        assert browser.get("", host=host)[0] == 403, host
    for host in ("localhost", "localhost:4321", f"127.0.0.1:{browser.port}"):  # 4321: the other end of a tunnel
        assert browser.get("", host=host)[0] == 200, host


@pytest.mark.parametrize("target", ["http://[/", "//[", "http://[::1/x", "*", "?"])
def test_a_request_for_no_address_is_answered(run_dir: Path, target: str) -> None:
    page = LivePage([run_dir])
    assert page.answer(target, "localhost").status in (400, 403)


@pytest.mark.parametrize("host", ["[::1", "[", "[]", "a]", "localhost:x", "", "[v1.x]"])
def test_a_host_that_is_no_name_is_refused(run_dir: Path, host: str) -> None:
    page = LivePage([run_dir])
    assert page.answer(f"/{page.token}/", host).status in ((403,) if host != "localhost:x" else (200, 403))


def test_only_the_page_and_its_data_are_there(browser: Browser) -> None:
    for path in ("config.yaml", "../", "data.json/x", "samples/step_1.jsonl"):
        assert browser.get(path)[0] == 404, path
    assert browser.get("", method="POST")[0] == 501


def test_data_is_sent_again_only_when_a_file_changed(browser: Browser, run_dir: Path) -> None:
    version = json.loads(browser.get("data.json")[2])["version"]
    assert browser.get(f"data.json?seen={version}")[::2] == (204, "")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 0.75}\n')
    status, _, body = browser.get(f"data.json?seen={version}")
    data = json.loads(body)
    assert status == 200 and data["version"] != version
    assert data["runs"][0]["steps"][-1] == 5 and data["runs"][0]["series"]["reward/mean"][-1] == 0.75


def test_page_is_made_once_for_all_who_ask(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = live.page_data
    monkeypatch.setattr(live, "page_data", lambda runs, live: made.append(1) or original(runs, live=live))
    page = LivePage([run_dir])
    threads = [threading.Thread(target=page.answer, args=(f"/{page.token}/data.json", "localhost")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_every_new_file_changes_the_signature(run_dir: Path) -> None:
    seen = {signature([run_dir])}
    for name in ("samples/step_9.jsonl", "validation/step_9.jsonl", "timeline.jsonl", "run.json", "config.yaml"):
        (run_dir / name).write_text("{}\n")
        seen.add(signature([run_dir]))
    assert len(seen) == 6


def test_a_folder_that_goes_away_is_told_and_comes_back(browser: Browser, run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))
    status, _, body = browser.get("data.json")
    assert status == 503 and body.startswith("The runs cannot be read now: ") and "does not exist" in body
    run_dir.with_name("moved").rename(run_dir)
    assert browser.get("data.json")[0] == 200


def test_wrong_folders_and_taken_ports_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"), serving([tmp_path / "none"]):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(RequestError, match=f"port {port} of 127.0.0.1 cannot be used: .*--port"),
            serving([run_dir], port),
        ):
            pass


def test_serve_says_where_and_ends_at_ctrl_c(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                assert Browser(told[0].removeprefix("live at ")).get("")[0] == 200
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(
        live,
        "threading",
        type("Threading", (), {"Event": Interrupted, "Thread": threading.Thread, "Lock": threading.Lock}),
    )
    serve([run_dir], 0, told.append)
    assert told[0].startswith("live at http://127.0.0.1:") and told[-1] == "ended"
    assert f"ssh -L {urlsplit(told[0][8:]).port}:127.0.0.1:" in told[1]
