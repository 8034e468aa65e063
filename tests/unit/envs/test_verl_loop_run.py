"""A launch script of a fork whose own class plays the episodes trains, with a server of passages on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_fork import PLAYER, passages, write_fork
from warm.processes import run

# The model is random and writes no marks: every response is taken for a search of its first character
SEARCHES = PLAYER.replace('return "?", False', 'return f"[{self.look_up(text[:1]) if search else str()}]", False')


def trained(folder: Path, model: Path, url: str, **files: str) -> subprocess.CompletedProcess[str]:
    write_fork(folder, **files)
    rows = [
        {
            "data_source": "t",
            "prompt": [{"role": "user", "content": f"who {number}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["a", "e", "o", "t"]}},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    words = [f"seeker.url={url}", f"actor_rollout_ref.model.path={model}", "+trainer.default_local_dir=out"]
    words += ["trainer.total_training_steps=1", "data.val_files=train.parquet", "+trainer.val_before_train=false"]
    words += ["+trainer.test_freq=-1", "+trainer.save_freq=-1", "seeker.passage_tokens=4", "seeker.turns=1"]
    command = [sys.executable, "-m", "posttrain", "train", "run.sh", "--here", "--drop-unknown", *words]
    return run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, children=True)


@pytest.mark.slow
def test_a_launch_of_the_fork_trains(tmp_path: Path, tiny_llama: Path) -> None:
    """4 prompts x 2 responses; each has two turns of 16 tokens, and 4 tokens of a passage between them."""
    with passages() as url:
        done = trained(tmp_path, tiny_llama, url, player=SEARCHES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Player.play (line 18 of" in done.stderr + done.stdout
    samples: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "out/samples/step_1.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 8 and {len(each["turns"]) for each in samples} == {2}
    for each in samples:
        assert each["turns"][0]["observation"] == "[abo"
        # worth 0.5, for one of the letters in the response: "a" and "o" are in the passage
        assert each["reward"] == 0.5
        first, second = each["turns"]
        assert second["start"] == first["end"] + 4
    metrics = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/mean"] == 0.5


@pytest.mark.slow
def test_a_server_that_is_not_there_ends_the_run_with_its_key(tmp_path: Path, tiny_llama: Path) -> None:
    done = trained(tmp_path, tiny_llama, "http://127.0.0.1:9/look", player=SEARCHES)
    assert done.returncode != 0 and "no answer from seeker.url=http://127.0.0.1:9/look" in " ".join(done.stderr.split())
