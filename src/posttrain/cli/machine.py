"""Facts about this machine, without torch: memory, disks, the accelerator's driver, and how torch was built."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

GIB = 1024**3
MEMINFO = Path("/proc/meminfo")
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def memory_text() -> str:
    """Describe the memory: in all, free now, and what a container may use of it."""
    found = dict(re.findall(r"^(\w+): +(\d+) kB", _text(MEMINFO), re.MULTILINE))
    if "MemTotal" not in found:
        return "memory: unknown (no /proc/meminfo)"
    total, available = (int(found.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    limits = [int(text) for path in MEMORY_LIMITS if (text := _text(path).strip()).isdecimal()]
    limit = min([each for each in limits if each < total], default=None)
    held = f"; this process may use {_gib(limit)}" if limit is not None else ""
    return f"memory: {_gib(total)}, {_gib(available)} available{held}"


def disk_text(folder: Path) -> str:
    """Describe the space on the disk of a folder, or of the nearest parent that exists."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    usage = shutil.disk_usage(there)
    return f"{_gib(usage.free)} free of {_gib(usage.total)}"


def torch_text() -> str:
    """Describe the installed torch by its files: version, and what it was built for."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch: not installed: pip install torch"
    about = _text(Path(next(iter(spec.submodule_search_locations))) / "version.py")
    number = re.search(r"__version__ = '([^']+)'", about)
    built = re.search(r"^(cuda|hip)\b[^=]*= '([^']+)'", about, re.MULTILINE)
    kind = f"built for {'CUDA' if built[1] == 'cuda' else 'ROCm'} {built[2]}" if built else "built for the CPU alone"
    return f"torch {number[1] if number else installed('torch')}, {kind}"


def accelerator_text() -> str:
    """Describe the accelerators and their driver, and what keeps torch from using them."""
    cards = nvidia_cards()
    if not cards:
        driver = re.search(r"Kernel Module\s+(\S+)", _text(DRIVER))
        return (
            f"accelerator: none found (driver {driver[1]})" if driver else "accelerator: none found: runs use the CPU"
        )
    said = "\n".join(f"accelerator: {card}" for card in cards)
    if "built for the CPU alone" in torch_text():
        said += "\n  torch cannot use it: install a build of torch for CUDA (https://pytorch.org/get-started/locally)"
    return said


def nvidia_cards() -> list[str]:
    """Return name, memory and driver of every NVIDIA card, as nvidia-smi tells them; none without nvidia-smi."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    try:
        found = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi fails ({type(error).__name__}): the driver may not fit the card"]
    rows = [[cell.strip() for cell in line.split(",")] for line in found.stdout.splitlines() if line.strip()]
    return [f"{name}, {memory}, driver {driver}" for name, memory, driver in rows]


def installed(package: str) -> str:
    """Return the version of a package, by its name on the index; "" when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
