"""The other side of the environment ``verifiers``: run by a Python of its own, which has that package and nothing of this one.

Reads an episode from each line of standard input (JSON: env, options, trained, max_turns, training, number, base_url, api_key)
and answers with a line on standard output: {"reward", "metrics", "stop", "row"} or {"failure"}. All other output goes to
standard error. Versions before 0.4 have ``load_environment``; tasksets of later ones are played by tasksets.py.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

KEY = "POSTTRAIN_EPISODE_API_KEY"
TASKSETS = "posttrain_tasksets"
_loaded: dict[str, Any] = {}


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # environments print
    # Harnesses of verifiers 0.4 are started with uv, which is installed beside the package
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = await play(json.loads(line))
        except BaseException as error:  # noqa: BLE001 - someone's environment, which may also call sys.exit
            traceback.print_exc()
            answer = {"failure": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer) + "\n")
    if TASKSETS in sys.modules:
        await sys.modules[TASKSETS].close()


async def play(episode: dict[str, Any]) -> dict[str, Any]:
    """Play one rollout of the environment and score it with its rubric."""
    if isinstance(episode["env"], dict) or not has_load_environment():
        try:
            return dict(await tasksets().play(episode))
        except ImportError as error:
            if "verifiers" in str(error.name):
                raise unknown_interface() from error  # verifiers.v1 of 0.3 was another one
            raise
    env = environment(episode["env"], episode["options"])
    rows = env.get_dataset() if episode["training"] else env.get_eval_dataset()
    number = episode["number"] % len(rows)
    os.environ[KEY] = episode["api_key"]
    client = client_config()(api_base_url=episode["base_url"], api_key_var=KEY, max_retries=0)
    if not hasattr(env, "run_rollout"):
        raise unknown_interface()
    found = await env.run_rollout(rows[number], client, "policy", {})
    if found.get("error"):
        return {"failure": str(found["error"])[:1000]}
    metrics = {name: float(value) for name, value in (found.get("metrics") or {}).items() if _is_finite(value)}
    return {
        "reward": found["reward"],
        "metrics": metrics,
        "stop": str(found.get("stop_condition") or ""),
        "row": number,
    }


def has_load_environment() -> bool:
    """Return True for a verifiers before 0.4: later ones have their whole interface in ``verifiers.v1``."""
    return importlib.util.find_spec("verifiers.types") is not None or importlib.util.find_spec("verifiers.v1") is None


def tasksets() -> Any:
    """Import tasksets.py, which stands beside this file: its folder is on no path."""
    if TASKSETS not in sys.modules:
        if importlib.util.find_spec("verifiers.v1") is None:
            raise unknown_interface()
        found = importlib.util.spec_from_file_location(TASKSETS, Path(__file__).with_name("tasksets.py"))
        assert found is not None and found.loader is not None
        sys.modules[TASKSETS] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[TASKSETS])
    return sys.modules[TASKSETS]


def client_config() -> Any:
    """Return the class that tells an environment where its model is. Raises: TypeError for a version without it."""
    try:
        return importlib.import_module("verifiers.types").ClientConfig
    except (ModuleNotFoundError, AttributeError) as error:
        importlib.import_module("verifiers")  # raises where the package itself is missing
        raise unknown_interface() from error


def unknown_interface() -> TypeError:
    version = getattr(importlib.import_module("verifiers"), "__version__", "of this Python")
    return TypeError(
        f"verifiers {version} has another interface than load_environment and run_rollout (0.1.9 to 0.3) and than tasksets (0.4)"
    )


def environment(env: str, options: dict[str, Any]) -> Any:
    """Load an environment once: by the id of an installed one, or from a file or folder with ``load_environment``."""
    key = json.dumps([env, options], sort_keys=True)
    if key not in _loaded:
        path = Path(env).expanduser()
        if path.suffix == ".py" or path.is_dir():
            _loaded[key] = module_at(path).load_environment(**options)
        else:
            import verifiers

            _loaded[key] = verifiers.load_environment(env, **options)
    return _loaded[key]


def module_at(path: Path) -> Any:
    """Import a file, or the module in a folder that bears the folder's name."""
    name = path.stem.replace("-", "_")
    file = path if path.suffix == ".py" else path / f"{name}.py"
    if path.is_dir() and (path / name).is_dir():
        file = path / name / "__init__.py"
    sys.path.insert(0, str(file.resolve().parent))
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None or not file.is_file():
        raise FileNotFoundError(f"there is no {file} with load_environment")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


if __name__ == "__main__":
    sys.path = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]
    asyncio.run(main())
