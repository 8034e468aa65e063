"""Facts about a machine that doctor reports: with and without an accelerator, in a container with less memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli import machine
from posttrain.cli.doctor import PURPOSES, purpose_of
from posttrain.registry import optional_libraries


def test_every_optional_library_is_for_something() -> None:
    assert all(purpose_of(library) for library in optional_libraries())
    assert set(PURPOSES) <= set(optional_libraries())


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n")
    (tmp_path / "max").write_text(f"{4 * 1024**3}\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "MEMORY_LIMITS", (tmp_path / "none", tmp_path / "max"))
    assert machine.memory_text() == "memory: 32.0 GiB, 16.0 GiB available; this process may use 4.0 GiB"
    (tmp_path / "max").write_text("max\n")
    assert machine.memory_text() == "memory: 32.0 GiB, 16.0 GiB available"
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "none")
    assert "unknown" in machine.memory_text()


def test_a_card_and_a_torch_that_cannot_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 570.86'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine, "torch_text", lambda: "torch 2.13.0+cpu, built for the CPU alone")
    said = machine.accelerator_text()
    assert said.startswith("accelerator: NVIDIA H100, 81559 MiB, driver 570.86\n")
    assert "torch cannot use it: install a build of torch for CUDA" in said
    monkeypatch.setattr(machine, "torch_text", lambda: "torch 2.13.0, built for CUDA 12.8")
    assert machine.accelerator_text() == "accelerator: NVIDIA H100, 81559 MiB, driver 570.86"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert "nvidia-smi fails" in machine.accelerator_text()


def test_a_build_of_torch_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch is imported')")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.11.0+cu128'\ncuda: str | None = '12.8'\nhip = None\n")
    found = machine.find_spec("json")
    assert found is not None
    monkeypatch.setattr(found, "submodule_search_locations", [str(tmp_path / "torch")])
    monkeypatch.setattr(machine, "find_spec", lambda name: found)
    assert machine.torch_text() == "torch 2.11.0+cu128, built for CUDA 12.8"
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert machine.torch_text() == "torch: not installed: pip install torch"
