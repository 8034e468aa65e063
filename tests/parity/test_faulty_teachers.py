"""Whole runs with a teacher in a server that fails: passing faults change nothing, others stop the run before anything is
learned from a false number, and the run that is started again ends with the weights of one that met no fault."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.errors import RunStopped
from posttrain.models.tiny import write_tiny_model
from warm.processes import WarmProcess

pytestmark = pytest.mark.slow

SAMPLED = {"divergence": {"name": "sampled_kl"}}
TOP = {"divergence": {"name": "forward_kl"}, "top_k": 4, "enters": "loss"}
WEIGHTS = "checkpoints/global_step_4/policy/model.safetensors"
STOPPING = {
    "one too few": r"gave \d+ prompt_logprobs for \d+ tokens",
    "one too many": r"gave \d+ prompt_logprobs for \d+ tokens",
    "shifted": "gave no log-prob of token",
    "not a number": "NaN is not a JSON number",
    "certain": "probabilities that sum to",
    "another vocabulary": "gave no log-prob of token",
    "a page": "is not JSON",
    "nothing": "gave no prompt_logprobs",
    "null": "gave no prompt_logprobs",
    "the end": "no server of the teacher big is left",
}


class Server:
    """A server in a process of its own, which starts again at the same port."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.start()

    def start(self) -> None:
        (self.folder / "started").unlink(missing_ok=True)
        self.fails("")
        script = Path(__file__).with_name("faulty_teacher.py")
        self.process = WarmProcess([sys.executable, script, self.folder, self.model])
        while not (self.folder / "started").exists():  # written after the port
            assert self.process.poll() is None, "the server did not start"
            time.sleep(0.05)

    def fails(self, fault: str) -> None:
        (self.folder / "fault").write_text(fault)

    @property
    def port(self) -> int:
        return int((self.folder / "port").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    started = Server(folder, write_tiny_model(folder / "teacher", "llama", seed=7))
    yield started
    started.process.kill()
    started.process.wait()


def run(folder: Path, name: str, model: Path, server: Server, distillation: dict[str, Any]) -> Path:
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "answer": "x"} for n in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teachers = {"big": {"endpoints": [f"http://127.0.0.1:{server.port}"]}}
    sections = {
        "run": {"total_steps": 4, "folder": str(folder / name)},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 5},
        "reward": {"terms": []},
        "distillation": {"teachers": teachers, **distillation},
        "policy": {"sequences_per_micro_batch_per_device": 2, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every_steps": 1},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    return train_run(RunConfig.model_validate(sections))


@pytest.mark.parametrize("how", [SAMPLED, TOP], ids=["sampled", "top"])
def test_faults_of_a_teachers_server(tmp_path: Path, tiny_llama: Path, server: Server, how: dict[str, Any]) -> None:
    expected = (run(tmp_path, "straight", tiny_llama, server, how) / WEIGHTS).read_bytes()
    for fault in ("status 500", "half an answer"):
        server.fails(fault)
        assert (run(tmp_path, fault, tiny_llama, server, how) / WEIGHTS).read_bytes() == expected
    for fault, said in STOPPING.items():
        server.fails(fault)
        with pytest.raises(RunStopped, match=said):
            run(tmp_path, fault, tiny_llama, server, how)
        if server.process.poll() is not None:
            server.start()
        server.fails("")
        assert (run(tmp_path, fault, tiny_llama, server, how) / WEIGHTS).read_bytes() == expected, fault
