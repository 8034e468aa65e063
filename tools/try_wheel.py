"""Try a wheel as a stranger would: a new virtual environment, and the first commands there.

    python tools/try_wheel.py dist/posttrain-0.1.0-py3-none-any.whl [PYTHON ...]

Each PYTHON (default: this one) gets an environment with the wheel and the torch of constraints.txt. In a folder that has nothing
of the sources a configuration is planned, and a tiny model trained for a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def try_in(python: str, wheel: Path, folder: Path) -> None:
    """Raises: CalledProcessError for the first command that fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def call(*command: str | Path) -> None:
        print("$", *(Path(word).name if Path(word).is_absolute() else word for word in map(str, command)), flush=True)
        subprocess.run([str(word) for word in command], cwd=folder, env=environment, check=True)

    call(python, "-m", "venv", folder / "venv")
    inside = folder / "venv/bin"
    pip = [
        inside / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    call(*pip, "torch")
    call(*pip, wheel)
    (folder / "run.yaml").write_text(RUN)
    call(inside / "python", "-c", MAKE)
    for words in (["--version"], ["plan", "run.yaml"], ["train", "run.yaml"], ["report", "run"], ["doctor"]):
        call(inside / "posttrain", *words)
    call(inside / "python", "-c", LIBRARY)


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    for python in sys.argv[2:] or [sys.executable]:
        with tempfile.TemporaryDirectory() as folder:
            try_in(python, wheel, Path(folder))


if __name__ == "__main__":
    main()
