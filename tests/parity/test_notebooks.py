"""The notebooks run, store what they show, and stop and resume in a kernel as in a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LIMIT_S = 240  # for a cell, on a machine with much else to do


def test_there_are_two() -> None:
    assert [path.name for path in NOTEBOOKS] == ["first_run.ipynb", "own_loop.ipynb"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_as_it_ran(file: Path) -> None:
    """Every cell has run, in order and without an error, and nothing of the machine it ran on is in the file."""
    import nbformat

    text = file.read_text(encoding="utf-8")
    stored = nbformat.reads(text, as_version=4)
    nbformat.validate(stored)
    assert nbformat.writes(stored) == text.rstrip("\n")  # as nbformat writes it
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [each for cell in code for each in cell.outputs if each.output_type == "error"]
    assert sum(bool(cell.outputs) for cell in code) >= len(code) - 2
    assert not re.search(r"/(?:home|root|tmp|work|usr|opt)/", text)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    """It shows the stored outputs: to the letter before it trains, and from then on others of the same kinds, because times and
    roundings differ between machines. The notebooks themselves assert that the model learned."""
    import nbformat
    from notebooks import executed

    done, stored = executed(file, tmp_path), nbformat.read(file, as_version=4)
    assert [cell.source for cell in done.cells] == [cell.source for cell in stored.cells]
    trains = False
    for now, before in zip(done.cells, stored.cells, strict=True):
        trains = trains or "posttrain.train(" in now.source or "posttrain.start(" in now.source
        for ours, theirs in zip(now.get("outputs", []), before.get("outputs", []), strict=True):
            assert (ours.output_type, ours.get("name")) == (theirs.output_type, theirs.get("name"))
            assert trains or ours == theirs
    assert trains


class Kernel:
    """A kernel of Jupyter in a folder."""

    def __init__(self, folder: Path):
        from jupyter_client.manager import start_new_kernel
        from notebooks import QUIET, environment_with

        self.manager, self.client = start_new_kernel(
            kernel_name="python3", cwd=str(folder), env=environment_with(QUIET), startup_timeout=LIMIT_S
        )

    def run(self, code: str, *, interrupted_at: str = "") -> tuple[dict[str, Any], str]:
        """Run a cell, and interrupt it once it has printed ``interrupted_at``. Returns: the kernel's reply, and the output."""
        asked, said, waiting = self.client.execute(code), "", bool(interrupted_at)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=LIMIT_S)
            content = message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            said += content.get("text", "") + "\n".join(content.get("traceback", []))
            if waiting and interrupted_at in said:
                self.manager.interrupt_kernel()
                waiting = False
            if content.get("execution_state") == "idle":
                return self._reply_to(asked), said
        raise TimeoutError(said)

    def _reply_to(self, asked: str) -> dict[str, Any]:
        """A kernel that started slowly was asked more than once whether it is ready, and those answers come first."""
        while (message := self.client.get_shell_msg(timeout=LIMIT_S))["parent_header"].get("msg_id") != asked:
            pass
        content: dict[str, Any] = message["content"]
        return content

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    started = Kernel(tmp_path)
    yield started
    started.close()


LOOP = """
import posttrain
mine = []
with posttrain.start("run.yaml", {"run.folder": "own"}) as session:
    for step in session.steps():
        groups = session.score(session.sampler.sample(session.prompts()))
        batch = session.batch(groups)
        for mini_batch in session.trainer.mini_batches(batch, batch.rewards - batch.rewards.mean()):
            session.trainer.forward_backward(mini_batch)
            session.trainer.optim_step()
        mine.append(step)
        if %s:
            break
"""
TRAIN = "import posttrain\nrun = posttrain.train('run.yaml', {'run.total_steps': %d})\nrun.checkpoints"


@pytest.mark.slow
def test_an_interrupted_cell_saves_and_the_same_cell_resumes(kernel: Kernel, tmp_path: Path, tiny_llama: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "answer": "0"} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "run": {"seed": 1, "total_steps": 1000, "folder": "run"},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": ["train.jsonl"], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
        "reward": {"workers": 1, "terms": [{"name": "exact_match"}]},
        "checkpoint": {"at_end": True},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    reply, said = kernel.run(TRAIN % 1000, interrupted_at="step 2/")
    assert reply.get("ename") == "RunInterrupted", said
    assert "line 2: run = posttrain.train(" in said and "site-packages" not in said  # the caller's line, and no more
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["status"] == "interrupted"
    saved = [int(path.name.rpartition("_")[2]) for path in (tmp_path / "run/checkpoints").glob("global_step_*")]
    reply, said = kernel.run(TRAIN % (max(saved) + 2))  # the same folder, in the same kernel
    assert reply["status"] == "ok" and f"resuming after step {max(saved)}" in said, said
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "done"

    reply, said = kernel.run(LOOP % "False", interrupted_at="step 2/")
    assert reply.get("ename") == "RunInterrupted", said
    reply, said = kernel.run("before = mine\n" + LOOP % "len(mine) == 2")
    assert reply["status"] == "ok" and "resuming after step" in said, said
    reply, said = kernel.run("assert before[0] == 1 and mine[0] - before[-1] in (0, 1), (before, mine)")
    assert reply["status"] == "ok", said
