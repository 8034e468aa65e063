"""Plain Hugging Face folders of the models, written during a run. They are for other programs: no run resumes from them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from posttrain.errors import RunStopped
from posttrain.interfaces.train_engine import OptimizedEngine, TrainEngine, ValueEngine
from posttrain.run.checkpoint_folders import BESIDE, COUNTERS, PREFIX
from posttrain.run.durable import is_of_the_disk, same_mode, sync


def export_models(folder: Path, step: int, policy: TrainEngine, critic: ValueEngine | None = None) -> Path:
    """Write ``folder``/global_step_N/policy, and critic: float32 weights, config and tokenizer (of a policy with an adapter,
    the adapter). Whole or absent; what was there under this name is replaced. Returns global_step_N.

    Raises: RunStopped when it cannot be written.
    """
    final = folder / f"{PREFIX}{step}"
    beside = folder / f"{PREFIX}{step}{BESIDE}"
    engines: dict[str, OptimizedEngine] = {"policy": policy} | ({"critic": critic} if critic else {})
    try:
        shutil.rmtree(beside, ignore_errors=True)
        for role, engine in engines.items():
            (beside / role).mkdir(parents=True)
            engine.save(beside / role, optimizer=False)
            (beside / role / COUNTERS).unlink(missing_ok=True)
        same_mode(beside)
        for path in [*beside.rglob("*"), beside]:
            sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(beside, final)
        sync(folder)
    except Exception as error:
        if not is_of_the_disk(error):
            raise
        shutil.rmtree(beside, ignore_errors=True)
        raise RunStopped(f"the models of step {step} could not be exported to {folder}: {error}") from error
    return final
