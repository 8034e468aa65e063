"""Try a wheel as a stranger would: a new virtual environment, and the first commands there, without make and a compiler.

    python tools/try_wheel.py dist/posttrain-0.1.0-py3-none-any.whl [PYTHON ...]

Each PYTHON (default: every one of Python 3.11, 3.12 and 3.13 that is found here) gets an environment with the torch of
constraints.txt and then the wheel, which must bring nothing for CUDA. In a folder that has nothing of the sources a
configuration is planned, a tiny model trained for a step, and the demo run for two. Every extra must resolve beside that torch,
alone and all together, except those of engines that need a torch of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
# They bring a build of torch for CUDA, each its own version.
OWN_TORCH = ("vllm", "sglang")
# For work on the package itself, installed by `make`.
TOOL_EXTRAS = ("dev",)
MAKE = """
import json
from pathlib import Path
from posttrain.models.tiny import write_tiny_model
write_tiny_model(Path("tiny"), "llama")
rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "data_source": "sums"} for n in range(8)]
Path("train.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""
RUN = """
model: {path: tiny}
data: {train_files: [train.jsonl], prompts_per_step: 2}
rollout: {samples_per_prompt: 2, max_response_tokens: 4}
reward: {terms: [{name: exact_match}]}
run: {total_steps: 1, folder: run}
placement: {device: cpu}
"""
LIBRARY = "import posttrain; run = posttrain.Run('run'); assert run.metrics.num_rows == 1; print(run)"
COMMANDS = (
    ["--version"],
    ["plan", "run.yaml"],
    ["train", "run.yaml"],
    ["report", "run"],
    ["doctor"],
    ["demo", "--steps", "2", "--folder", "demo"],
)


def interpreters() -> list[str]:
    """Find an interpreter of every version, on the path or among those of pyenv; a version without one is reported."""
    found = []
    for version in VERSIONS:
        pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
        candidates = [shutil.which(f"python{version}"), *map(str, pyenv), sys.executable]
        works = next((each for each in candidates if each and _version(each) == version), None)
        if works:
            found.append(works)
        else:
            print(f"no Python {version} was found here: not tried", flush=True)
    return found


def _version(python: str) -> str:
    script = "import venv, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    return done.stdout.strip()


class Stranger:
    """A new environment in a folder of its own, whose commands see neither the sources nor any program of the system."""

    def __init__(self, python: str, folder: Path):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.folder, self.bin = folder, folder / "venv/bin"
        self._installing = kept
        self._running = kept | {"PATH": str(self.bin), "XDG_CACHE_HOME": str(folder / "cache"), "CC": "", "CXX": ""}
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True, env=kept)
        print(f"\n{self.output('python', '--version').strip()}", flush=True)

    def pip(self, *words: str | Path) -> None:
        """Run pip install with the tested versions."""
        command = [self.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["-c", ROOT / "constraints.txt", *words]
        print("$ pip install", *(Path(word).name if os.path.isabs(word) else word for word in words), flush=True)
        subprocess.run([str(word) for word in command], cwd=self.folder, env=self._installing, check=True)

    def run(self, program: str, *words: str) -> None:
        """Run a program of the environment. Raises: CalledProcessError."""
        print("$", program, *words if "\n" not in words[-1] else words[:-1], flush=True)
        subprocess.run([self.bin / program, *words], cwd=self.folder, env=self._running, check=True)

    def output(self, program: str, *words: str) -> str:
        """Run a program of the environment and return what it prints."""
        command = [self.bin / program, *words]
        return subprocess.run(command, cwd=self.folder, env=self._running, check=True, stdout=-1, text=True).stdout

    def packages(self) -> set[str]:
        """The names of everything installed."""
        listed = self.output("python", "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
        return {each["name"] for each in json.loads(listed)}


def try_in(python: str, wheel: Path, folder: Path) -> None:
    """Raises: CalledProcessError for the first command that fails; AssertionError for a package that must not come."""
    here = Stranger(python, folder)
    here.pip("torch")
    before = here.packages()
    here.pip(wheel)
    for_cuda = {name for name in here.packages() - before if name.lower().startswith(("nvidia", "cuda", "triton"))}
    assert not for_cuda, f"the wheel brought {for_cuda}"
    (folder / "run.yaml").write_text(RUN)
    here.run("python", "-c", MAKE)
    for words in COMMANDS:
        here.run("posttrain", *words)
    here.run("python", "-c", LIBRARY)
    for extra in extras():
        here.pip("--dry-run", f"{wheel}[{extra}]")
    here.pip("--dry-run", f"{wheel}[{','.join(extras())}]")


def extras() -> list[str]:
    """The extras that a user of the wheel may ask for beside the torch that is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name not in (*OWN_TORCH, *TOOL_EXTRAS)]


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    for python in sys.argv[2:] or interpreters():
        with tempfile.TemporaryDirectory() as folder:
            try_in(python, wheel, Path(folder))


if __name__ == "__main__":
    main()
