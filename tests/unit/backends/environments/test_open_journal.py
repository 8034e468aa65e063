"""Conversations of a start that was killed: what the next start of the run knows of them, and answers."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.environments.open.host import OpenHost
from posttrain.backends.environments.open.journal import FILE, Journal
from posttrain.data.chat_api import Refused
from posttrain.data.openai_api.request import EndpointRequest
from posttrain.envs.agent.turn_requests import TurnRequest
from posttrain.interfaces.env import EnvSpec


def asked(*texts: str) -> TurnRequest:
    messages = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
    return TurnRequest(asked=EndpointRequest(messages=messages, max_tokens=4))


def started(folder: Path, saved_step: int = 0) -> OpenHost:
    host = OpenHost(
        conversation_timeout_s=60,
        group_timeout_s=60,
        wait_s=1,
        has_rows=False,
        group_size=4,
        journal=Journal(folder, saved_step),
    )
    for prompt in (1, 2):
        for number in range(4):
            host.start(f"train:{prompt}/{number}", EnvSpec(name="open"), seed=0)
    return host


def play(host: OpenHost, name: str, reward: float | None = None) -> None:
    [talk] = host.request(name, "", [asked("hello")])
    host.answer(talk.place.episode, "1", "hi", cut=False, prompt_tokens=1, response_tokens=1)
    if reward is not None:
        host.reward(name, reward, {})


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of a run whose first step was saved with the conversation "trained", and that was killed in its second."""
    host = started(tmp_path)
    for name, reward in (("trained", 0.5), ("rewarded", 1.0), ("open", None)):
        play(host, name, reward)
    sample = {"sample_id": "train:1/0", "reward": 2.0, "reward_terms": {"environment": 0.5}}
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_1.jsonl").write_text(json.dumps(sample) + "\n")
    later = {"sample_id": "train:1/1", "reward": 1.0}  # of the step that no checkpoint has
    (tmp_path / "samples/step_2.jsonl").write_text(json.dumps(later) + "\n")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"conversation": "cut", "sam')  # the kill came in the middle of a line
    return tmp_path


def refused(host: OpenHost, name: str, reward: float = 1.0) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        host.reward(name, reward, {})
    return caught.value.status, str(caught.value)


def test_rewards_for_conversations_of_the_start_that_was_killed(killed: Path) -> None:
    host = started(killed, saved_step=1)
    for name, why in (
        ("open", "it was unfinished when an earlier start of this run ended, and is not trained on"),
        ("rewarded", "no saved step has it: it is not trained on"),
        ("trained", "took it with the reward 0.5, and trained on it"),
    ):
        status, told = refused(host, name)
        assert (status, why in told) == (409, True), told
        with pytest.raises(Refused, match=why):
            host.found(name)
    assert refused(host, "cut") == (404, "there is no conversation 'cut'")


def test_they_begin_again_but_do_not_go_on(killed: Path) -> None:
    host = started(killed, saved_step=1)
    with pytest.raises(Refused, match=r"'open' cannot go on: it was unfinished .*; begin it again"):
        host.request("open", "", [asked("hello", "hi", "more")])
    play(host, "open", 0.25)
    host.begin("rewarded", "")
    with pytest.raises(Refused, match="there is a conversation 'trained' already"):
        host.begin("trained", "")
    assert host.found("open").reward == 0.25


def test_the_user_is_told_at_the_start_what_is_lost(killed: Path) -> None:
    found = Journal(killed, saved_step=1).summary()
    assert "1 without a reward, 1 with one that no saved step has (rewarded, open; conversations.jsonl" in found
    assert "2 without" not in found and Journal(killed / "new", 0).summary() == ""
    # A third start reads what the second one wrote behind the line that was cut.
    host = started(killed, saved_step=1)
    play(host, "open", 0.25)
    host.close()
    assert "0 without a reward, 2 with one" in Journal(killed, saved_step=1).summary()


def test_rewards_that_come_twice_late_or_to_nobody(tmp_path: Path) -> None:
    host = started(tmp_path)
    play(host, "a", 1.0)
    assert host.reward("a", 1.0, {}).reward == 1.0  # the answer to the first one was lost
    assert refused(host, "a", 0.5) == (409, "the conversation 'a' has ended")
    assert refused(host, "b") == (404, "there is no conversation 'b'")
    host.request("c", "", [asked("hello")])
    assert refused(host, "c")[0] == 409  # nothing was sampled in it


def test_the_samples_of_a_long_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "samples").mkdir()
    before = Journal(tmp_path, saved_step=0)
    for step in (1, 2):
        names = [f"{step}/{number}" for number in range(20)]
        rows = [json.dumps({"sample_id": name, "reward": 0.5}) for name in names]
        (tmp_path / f"samples/step_{step}.jsonl").write_text("\n".join(rows))
        for name in names:
            before.begun(f"c{name}", name)
            before.ended(f"c{name}", "ended", "", 0.5)
    before.close()
    opened: list[str] = []
    plain = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: opened.append(path.name) or plain(path, *how, **more))
    again = Journal(tmp_path, saved_step=2)
    assert again.summary() == "" and again.lost("c1/3") == ""
    assert sorted(name for name in opened if name.startswith("step_")) == ["step_1.jsonl", "step_2.jsonl"]


class Full:
    """A disk with room for so many bytes: it writes what fits, as a disk does."""

    def __init__(self, file: Any, room: int):
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        fits = data[: self.room]
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(fits)
        return int(self._file.write(fits))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 60, 80, 130])
def test_a_full_disk_ends_the_run_and_corrupts_nothing(tmp_path: Path, room: int) -> None:
    host = started(tmp_path)
    play(host, "before", 1.0)
    good = (tmp_path / FILE).read_bytes()
    journal: Any = host._names.journal
    journal._out = Full(journal._out, room)
    with pytest.raises(Refused, match=r"the run is ending.*conversations.jsonl: No space left") as caught:
        for number in range(3):
            play(host, f"c{number}", 0.5)
    assert caught.value.status == 503
    with pytest.raises(OSError, match="No space left") as ended:
        host.wait(0)  # although events are waiting: what the journal does not have is not trained
    assert ended.value.filename == str(tmp_path / FILE)
    host.close()  # without a second error
    lines = (tmp_path / FILE).read_bytes()
    assert lines.startswith(good) and lines.endswith(b"\n") and [json.loads(line) for line in lines.splitlines()]
    # With room again the next start reads it, and goes on.
    again = started(tmp_path)
    assert refused(again, "c0")[0] in (404, 409)
    play(again, "after", 1.0)
    assert (tmp_path / FILE).read_bytes().startswith(lines)
