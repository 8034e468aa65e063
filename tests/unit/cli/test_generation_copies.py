"""posttrain generate on several devices: the file of one device, whatever ends the copies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.build.generation_copies import copies_of
from posttrain.config.checks.generate import check, unsupported
from posttrain.config.generate import GenerateConfig
from warm.processes import WarmProcess


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> list[str]:
    """Arguments of a generation of 30 rows in 15 parts, on CPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(30)))
    return [
        f"model.path={tiny_llama}",
        "model.compute_dtype=float32",
        "data.files=p.jsonl",
        "output.file=out.parquet",
        "output.rows_per_part=2",
        "rollout.samples_per_prompt=3",
        "rollout.max_response_tokens=48",
        "rollout.ignore_eos=true",
        "placement.cpu_threads=1",
        "placement.device=cpu",
    ]


def start(arguments: list[str]) -> WarmProcess:
    command = [sys.executable, "-c", "from posttrain.cli.start import main; main()", "generate", *arguments]
    return WarmProcess(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, children=True)


def config(**changed: object) -> GenerateConfig:
    given = {"model": {"path": "x"}, "data": {"files": "p.parquet"}, "output": {"file": "o.parquet"}} | changed
    return GenerateConfig.model_validate(given)


def test_copies_have_devices_of_their_own() -> None:
    eight = {"devices": 8, "device": "cpu"}
    assert copies_of(config(placement=eight)) == 8
    two = {"engine": "vllm", "tensor_parallel": 2}
    assert copies_of(config(placement=eight, rollout=two)) == 4
    assert copies_of(config(placement=eight, rollout=two | {"endpoints": ["http://a:1"]})) == 1
    assert check(config(placement=eight, rollout=two)) == []
    (uneven,) = check(config(placement=eight, rollout=two | {"tensor_parallel": 3}))
    assert uneven.what == "8 devices do not divide into copies of the sampler on 3 each"


@pytest.mark.parametrize(
    ("nodes", "rollout", "said"),
    [
        (2, {}, ""),
        (3, {}, "8 devices do not spread evenly over 3 machines"),
        (2, {"engine": "vllm", "tensor_parallel": 8}, ""),
        (4, {"engine": "sglang", "tensor_parallel": 4}, ""),
        (2, {"engine": "http", "endpoints": ["http://a:1"]}, ""),
        (2, {"engine": "http", "engine_options": {"server": "mine.py"}}, "http has no copies on several machines"),
    ],
)
def test_devices_of_several_machines(nodes: int, rollout: dict[str, object], said: str) -> None:
    pytest.importorskip("ray")
    there = config(placement={"devices": 8, "nodes": nodes}, rollout=rollout)
    assert [each.what for each in check(there)] == ([said] if said else [])
    assert not [each for each in unsupported(there) if each.field.startswith("placement")]


@pytest.mark.slow
def test_several_copies_write_the_file_of_one(job: list[str], tmp_path: Path) -> None:
    assert start([*job, "output.file=whole.parquet"]).wait() == 0
    several = [*job, "placement.devices=3"]
    process = start(several)
    said, _ = process.communicate()
    assert process.returncode == 0 and "3 copies of the sampler, a process each" in said, said
    whole = (tmp_path / "whole.parquet").read_bytes()
    assert (tmp_path / "out.parquet").read_bytes() == whole
    # stopped in between, and finished on one device
    again, parts = [*several, "--overwrite"], tmp_path / "out.parquet.parts"
    process = start(again)
    while process.poll() is None and (len(list(parts.glob("part_*.parquet"))) < 2):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 75 and "parts are done and kept in" in " ".join(said.split()), said
    assert start(job).wait() == 0
    assert (tmp_path / "out.parquet").read_bytes() == whole


@pytest.mark.slow
def test_a_copy_that_fails_ends_the_run_with_its_words(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "breaks.py").write_text(
        "import sys\nif 'generation_copies' in ' '.join(sys.orig_argv):\n    raise RuntimeError('no luck here')\n"
    )
    process = start([*job, "placement.devices=2", "model.external_modules=[breaks]"])
    said, _ = process.communicate()
    assert process.returncode == 3 and "a copy of the sampler failed" in " ".join(said.split()), said
    assert "no luck here" in " ".join(said.split())
