"""The pages about launching: scripts that bash can read, YAML that is whole, settings that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from posttrain.config import RunConfig

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


def test_the_job_on_kubernetes_is_whole() -> None:
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
