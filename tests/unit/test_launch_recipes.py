"""The pages about launching: scripts that bash can read, YAML that is whole, settings that exist."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from posttrain.cli.request import read_request
from posttrain.config import RunConfig
from posttrain.plan.roles import place

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["cluster.md", "launch-ray.md", "launch-slurm.md", "launch-kubernetes.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_are_bash(page: str) -> None:
    for script in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    named = re.findall(r"\b((?:placement|policy|rollout|run)\.[a-z_.]*[a-z_])(?==|`|,|\)|;)", (DOCS / page).read_text())
    named = [name for name in named if name != "run.yaml"]
    assert named
    for name in named:
        section: Any = RunConfig
        for part in name.split("."):
            assert isinstance(section, type) and issubclass(section, BaseModel) and part in section.model_fields, name
            section = section.model_fields[part].annotation


# Fields of KubeRay's RayJob (ray.io/v1) by the place they stand in.
KUBERAY = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        "entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec", "ttlSecondsAfterFinished",
        "activeDeadlineSeconds", "submissionMode", "suspend", "runtimeEnvYAML", "metadata", "clusterSelector", "jobId",
    },
    "spec.rayClusterSpec": {
        "rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions", "suspend",
        "headServiceAnnotations", "gcsFaultToleranceOptions", "managedBy",
    },
    "spec.rayClusterSpec.headGroupSpec": {"rayStartParams", "template", "serviceType", "headService", "enableIngress"},
    "spec.rayClusterSpec.workerGroupSpecs": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "scaleStrategy",
        "idleTimeoutSeconds", "numOfHosts", "suspend",
    },
}  # fmt: skip

STUBS = {  # what a node of a SLURM job has, as far as the script goes
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; [ "$1" = show ] && printf "node1\\nnode2\\n"; exit 0',
    "srun": 'echo "srun $*" >> "$CALLS"; while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1",
    "ray": '[ "$1" = status ] || { trap "exit 0" TERM; sleep 20 & wait; }',
    "posttrain": """trap "exit 75" TERM
        until grep -q "w node2 ray" "$CALLS"; do sleep 0.02; done  # as a run waits for its machines
        printf "%s\\n" "$@" > "$CALLS.words"; sleep "$LASTS" & wait $!; exit "$CODE" """,
}


def configured(words: list[str], folder: Path) -> RunConfig:
    """What ``posttrain WORDS`` would run, of a run file that is there."""
    (folder / "run.yaml").write_text("model: {path: m}\ndata: {train_files: [a.jsonl]}\n")
    command, file, *overrides = words
    assert (command, file) == ("train", "run.yaml")
    loaded = read_request([str(folder / "run.yaml"), *overrides], None, look_at_files=False).loaded
    assert isinstance(loaded.config, RunConfig)
    plan, problems = place(loaded.config)
    assert plan is not None and problems == []
    return loaded.config


def commands(text: str) -> list[list[str]]:
    """The words behind each ``posttrain`` in a script, or in what a script hands to bash."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"posttrain (train [^'\n]+)", text)
    return [shlex.split(words) for words in found]


def test_commands_under_ray_are_ours(tmp_path: Path) -> None:
    found = [configured(words, tmp_path) for block in blocks("launch-ray.md", "bash") for words in commands(block)]
    assert [(config.placement.devices, config.placement.nodes) for config in found] == [(8, 1), (16, 2), (16, 2)]
    assert [config.policy.engine for config in found] == ["fsdp"] * 3


@pytest.mark.parametrize(("code", "warned"), [(0, False), (3, False), (75, False), (75, True)])
def test_a_job_under_slurm(code: int, warned: bool, tmp_path: Path) -> None:
    """The script itself, on a machine where SLURM and Ray are stubs: what it starts, hands on and returns."""
    (script,) = blocks("launch-slurm.md", "bash")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in STUBS.items():
        (tmp_path / ".venv/bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / ".venv/bin/activate").write_text(f'PATH="{tmp_path}/.venv/bin:$PATH"\n')
    calls = tmp_path / "calls"
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
        "SLURM_GPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "64",
        "CALLS": str(calls), "CODE": str(code), "LASTS": "20" if warned else "0.1",
    }  # fmt: skip
    job = subprocess.Popen(["bash", "-c", script], env=os.environ | slurm, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not (words := tmp_path / "calls.words").exists() or not words.read_text().endswith("\n"):
            assert time.monotonic() < until
            time.sleep(0.02)
        if warned:
            job.send_signal(signal.SIGTERM)
        assert job.wait(60) == code
    finally:
        os.killpg(job.pid, signal.SIGKILL)
    config = configured(words.read_text().splitlines(), tmp_path)
    assert (config.placement.devices, config.placement.nodes, config.policy.engine) == (16, 2, "fsdp")
    assert config.placement.ray_address == "10.0.0.1:20007"
    said = calls.read_text().splitlines()
    assert sum("ray start --head" in line and "-w node1" in line for line in said) == 1
    assert sum("ray start --address=10.0.0.1:20007" in line and "-w node2" in line for line in said) == 1
    assert ("scontrol requeue 7" in said) == (code == 75)
    assert not (tmp_path / ".ray-token-7").exists()


def test_the_job_on_kubernetes_is_whole(tmp_path: Path) -> None:
    (text,) = blocks("launch-kubernetes.md", "yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    groups = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    for group in groups:  # the two volumes are there and mounted
        spec = group["template"]["spec"]
        mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]} == {"project", "shm"}
    # 2 nodes x 8 GPUs = the 16 devices of the command
    gpus = int(groups[1]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert f"placement.devices={groups[1]['replicas'] * gpus}" in job["spec"]["entrypoint"]
    pinned = re.search(r"^ray==(.*)$", (DOCS.parent / "constraints.txt").read_text(), re.M)
    assert pinned and job["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]
    for place_, known in KUBERAY.items():
        part: Any = job
        for name in filter(None, place_.split(".")):
            part = part[name]
        for each in part if isinstance(part, list) else [part]:
            assert each.keys() <= known, place_
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    (words,) = commands(job["spec"]["entrypoint"])
    config = configured(words, tmp_path)
    assert config.placement.nodes == groups[1]["replicas"] and config.policy.engine == "fsdp"
