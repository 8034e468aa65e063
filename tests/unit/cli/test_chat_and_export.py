"""A model taken away: exported as GGUF, pushed to a hub on loopback with its card, and talked to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.cli.chat import HELP, Talk
from posttrain.errors import ModelError
from posttrain.libraries.hub_push import push
from posttrain.models.tiny import write_tiny_model
from posttrain.run.card import card_text, run_of, write_card


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of a run and its exported model."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    (folder / "checkpoints/global_step_2").mkdir(parents=True)
    write_tiny_model(folder / "checkpoints/global_step_2/policy")
    config = {
        "model": {"path": "org/base"},
        "data": {"train_files": ["/home/me/secret/sums/train.parquet"], "prompts_per_step": 8},
        "reward": {"terms": [{"name": "exact_match"}]},
        "advantage": {"name": "grpo"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(
        json.dumps({"name": "sums", "command": "posttrain train run.yaml", "status": "done"})
    )
    rows = [{"step": step, "reward/mean": 0.25 * step, "validation/accuracy": 0.5 + step / 8} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_card_says_what_the_run_was(run_folder: Path, tmp_path: Path) -> None:
    assert run_of(run_folder / "checkpoints/global_step_2/policy") == run_folder.resolve()
    text = write_card(tmp_path, run_folder, name="me/sums").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["posttrain", "reinforcement-learning"],
        "base_model": "org/base",
    }
    assert "| rewards | `exact_match` |" in text and "| data | `sums/train.parquet` |" in text
    assert "/home/me" not in text  # no path of the trainer's machine
    assert "| `reward/mean` | 0.250 (step 1) | 0.500 (step 2) |" in text and "posttrain train run.yaml" in text
    assert (tmp_path / "training.svg").read_text().startswith("<svg") and "![Curves of the run](training.svg)" in text
    assert "Exported with posttrain." in card_text("me/x", None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A hub on loopback that takes a repository and one commit, as far as its client asks."""
    seen: dict[str, object] = {"status": 200}

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = int(str(seen["status"]))
            answer: dict[str, object] = {}
            if self.path == "/api/repos/create":
                seen["created"] = json.loads(body)
                answer = {"url": f"{constants.ENDPOINT}/me/sums"}
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                answer = {
                    "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
                }
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                seen["files"] = sorted(line["value"]["path"] for line in lines if line["key"] == "file")
                answer = {
                    "commitUrl": f"{constants.ENDPOINT}/me/sums/commit/0a1b",
                    "commitOid": "0a1b",
                    "success": True,
                }
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.send_response(int(str(seen["status"])))
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *about: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    api = huggingface_hub.HfApi(endpoint=address, token="secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    yield seen
    server.shutdown()
    server.server_close()


def test_a_folder_is_pushed_whole(hub: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\n---\n")
    assert push(tmp_path, "me/sums", private=True).endswith("/me/sums")
    assert hub["files"] == ["README.md", "config.json"]
    created = hub["created"]
    assert isinstance(created, dict) and (created["name"], created["organization"]) == ("sums", "me")
    hub["status"] = 403
    with pytest.raises(ModelError, match=r"me/sums could not be pushed: .*403.*hf upload me/sums"):
        push(tmp_path, "me/sums", private=True)


def test_what_cannot_be_pushed_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, message in (("sums", "is not a repository of the hub"), ("me/sums", "HF_HUB_OFFLINE is set")):
        done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", name])
        assert isinstance(done.exception, ModelError) and message in str(done.exception)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--gguf", "q4_k_s"])
    assert isinstance(done.exception, ModelError) and "llama.cpp alone" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_models_answer_side_by_side_and_from_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file in float32 answers as the folder that it was made from, greedily and by the same seed."""
    from posttrain.models.gguf_file import write_gguf

    folder = write_tiny_model(tmp_path / "tiny")
    state = json.loads(
        (folder / "tokenizer.json").read_text()
    )  # with a merge in the place of the byte 0, as real ones have
    state["model"]["vocab"] = {token: number for token, number in state["model"]["vocab"].items() if number} | {"he": 0}
    state["model"]["merges"], state["pre_tokenizer"]["use_regex"] = [["h", "e"]], True
    (folder / "tokenizer.json").write_text(json.dumps(state))
    write_gguf(folder, tmp_path / "tiny.gguf", "f32")
    words = ["chat", str(folder), "--beside", str(tmp_path / "tiny.gguf"), "--max-tokens", "6"]
    for temperature in ("0", "1"):
        done = CliRunner().invoke(app, [*words, "--temperature", temperature, "--message", "Hi", "--message", "And?"])
        assert done.exit_code == 0, done.output
        lines = [line for line in done.stdout.split("\n") if line.startswith("tiny")]
        answers = [line.partition(": ")[2] for line in lines]
        assert len(answers) >= 4 and answers[0] == answers[1] and answers[2] == answers[3]
    done = CliRunner().invoke(
        app, [*words, "--temperature", "0"], input="/system Be brief.\nHi\n/temperature x\n/quit\nHi\n"
    )
    assert done.exit_code == 0 and "'x' is no temperature, such as 0.7; it stays 0" in done.output
    assert len([line for line in done.stdout.split("\n") if line.startswith("tiny.gguf: ")]) == 1


def test_a_conversation_that_fills_the_models_positions(tmp_path: Path) -> None:
    """An answer ends with the positions; the message that leaves no room is an error, after which another one may be sent."""
    folder = write_tiny_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    words = ["chat", str(folder), "--max-tokens", "1000000", "--temperature", "0"]
    done = CliRunner().invoke(app, words, input=f"Hi\n{'long ' * 60}\nHi\n")
    assert done.exit_code == 0 and done.output.count("tokens, and tiny reads 60; begin a new one") == 1
    with pytest.raises(ModelError, match="begin a new one"):
        CliRunner().invoke(app, [*words, "--message", "long " * 60], catch_exceptions=False)


@pytest.mark.parametrize(
    "words", [["--seed", "-1"], ["--seed", str(2**40)], ["--temperature", "inf"], ["--max-tokens", "0"]]
)
def test_options_out_of_range(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["chat", "nowhere", *words]).exit_code == 2


def test_an_answer_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Sly:
        name = "sly"

        def answer(self, messages: object, *, say: Callable[[str], None], **options: object) -> str:
            say("a\x1b[2J\nb")
            return "a"

    speaker: Any = Sly()
    Talk([speaker], system=None, temperature=0.0, max_tokens=4, seed=1).say("Hi")
    assert capsys.readouterr().out == "a\u241b[2J\nb\n"


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[list[dict[str, str]]] = []

    class Slow:
        name = "slow"

        def answer(self, messages: list[dict[str, str]], *, say: Callable[[str], None], **options: object) -> str:
            heard.append([dict(each) for each in messages])
            say("Once upon ")
            if len(heard) == 1:
                raise KeyboardInterrupt
            return "Once upon "

    speaker: Any = Slow()
    talk = Talk([speaker], system=None, temperature=0.0, max_tokens=4, seed=1, stops_answers=True)
    talk.say("A tale")
    talk.say("On")
    assert capsys.readouterr().out == "Once upon  (stopped)\nOnce upon \n"
    assert [each["content"] for each in heard[1]] == ["A tale", "Once upon ", "On"]
    heard.clear()
    with pytest.raises(KeyboardInterrupt):  # with --message, or a pipe as input, it ends the command
        Talk([speaker], system=None, temperature=0.0, max_tokens=4, seed=1).say("A tale")


def test_help_is_for_terminals_and_fits_them(tmp_path: Path) -> None:
    assert max(map(len, HELP.splitlines())) < 80
    write_tiny_model(tmp_path / "tiny")
    words = ["chat", str(tmp_path / "tiny"), "--max-tokens", "2"]
    done = CliRunner().invoke(app, words, input="Hi\n")
    assert done.exit_code == 0 and "/new" not in done.output
    done = CliRunner().invoke(app, words, input="/temperature -1\n/temperature nan\n/sytem Hi\n")
    assert "'-1' is no temperature" in done.output and "'nan' is no temperature" in done.output
    assert "there is no /sytem" in done.output and "/quit " in done.output


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for name, message in (("no/such/folder", "there is no folder"), ("no.gguf", "there is no file no.gguf")):
        done = CliRunner().invoke(app, ["chat", str(tmp_path / name) if "/" in name else name, "--message", "Hi"])
        assert message in str(done.exception)
