"""The chat page: its address, its policy, a second model beside the first, and a hostile answer in a real browser."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from posttrain.backends.endpoint.page import with_page
from posttrain.backends.endpoint.turns import Turns

from .test_endpoint import TOKEN, Place, placed, user

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def test_the_page_needs_no_token_and_its_settings_do(tiny_llama: Path) -> None:
    with placed(tiny_llama, ["first", "second"]) as place, placed(tiny_llama, ["other"]) as beside:
        place.app = with_page(place.endpoint, beside.endpoint)
        page = place.ask("/", Authorization="")
        assert page.status_code == 200 and "<script>" in page.text
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
        assert "http://" not in page.text and "https://" not in page.text  # nothing is loaded from elsewhere
        assert place.ask("/", Host="evil.example").status_code == 421
        assert place.ask("/chat/settings", Authorization="").status_code == 401
        assert place.ask("/chat/settings").json() == {
            "models": [{"name": "tiny", "base": "/v1"}, {"name": "tiny", "base": "/beside/v1"}],
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 8,
            "session_header": "X-Session-Id",
        }
        assert place.chat(user("a"))["choices"][0]["message"]["content"] == "first"
        body = {"messages": [user("a")], "max_tokens": 5}
        assert place.ask("/beside/v1/chat/completions", body, Authorization="").status_code == 401
        answered = place.ask("/beside/v1/chat/completions", body).json()
        assert answered["choices"][0]["message"]["content"] == "other"


def test_a_sampler_that_asks_again_at_once_lets_the_other_have_its_turn() -> None:
    turns, order, together = Turns(), [], threading.Barrier(2)

    def work(name: str) -> None:
        together.wait()
        for _ in range(20):
            with turns:
                order.append(name)
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 40
    # Once both wait, neither computes twice in a row.
    assert all(first != second for first, second in pairwise(order[4:36]))


@pytest.fixture
def address(tiny_llama: Path) -> Iterator[str]:
    """Two models behind a server on loopback, whose answers are played."""
    with placed(tiny_llama, [HOSTILE, "again"]) as place, placed(tiny_llama, ["plain", "too"]) as beside:
        listener = socket.create_server(("127.0.0.1", 0))
        app = with_page(place.endpoint, beside.endpoint)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()
        if place.engine.asked:  # not in a test that was skipped
            assert _first_messages(place) == _first_messages(beside) == 1


def _first_messages(place: Place) -> int:
    """Requests whose tokens begin a conversation that the second one extends."""
    first, second = place.engine.asked
    return int(first.token_ids == second.token_ids[: len(first.token_ids)])


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_two_models_are_talked_to_in_a_browser(address: str, width: int) -> None:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'posttrain[browser]'"
    )
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("there is no Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.set_default_timeout(20_000)
        wrong: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        page.goto(address)
        _talk(page, width)
        assert wrong == [] and all(url.startswith((address, "data:,")) for url in asked)
        browser.close()


def _talk(page: Any, width: int) -> None:
    page.fill("#token", "wrong")
    page.click("#key button")
    page.get_by_text("This is not the endpoint's key.").wait_for()
    page.fill("#token", TOKEN)
    page.click("#key button")
    page.locator("#message").wait_for()
    if width < 640:
        page.click("summary")
    page.fill("#max_tokens", "9")  # above what the endpoint allows
    page.fill("#message", "Hi")
    page.press("#message", "Enter")
    assert page.locator(".turn").count() == 0 and page.input_value("#message") == "Hi"
    page.fill("#max_tokens", "6")
    page.fill("#system", "Be brief.")
    for number in (1, 2):
        page.fill("#message", f"Hi {number}")
        page.press("#message", "Enter")
        page.locator("#send").wait_for()
    assert page.locator(".answer .text").all_inner_texts() == [HOSTILE, "plain", "again", "too"]
    assert page.title() == "Chat · posttrain" and page.locator("#turns script, #turns img").count() == 0
    boxes = [cell.bounding_box() for cell in page.locator(".turn").first.locator(".answer").all()]
    assert (boxes[0]["y"] == boxes[1]["y"]) == (width > 640)  # side by side; on a phone one below the other
    wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider == 0
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.kept = text; }")
    page.click("#copy")
    kept = json.loads(page.evaluate("window.kept"))
    assert kept["models"] == ["tiny", "tiny"] and [turn["user"] for turn in kept["turns"]] == ["Hi 1", "Hi 2"]
    assert kept["turns"][0]["sampling"] == {"temperature": 1, "top_p": 1, "max_tokens": 6}
    assert (kept["turns"][0]["system"], kept["turns"][0]["answers"][0]["text"]) == ("Be brief.", HOSTILE)
    page.reload()
    page.locator("#message").wait_for()  # the key is asked once
