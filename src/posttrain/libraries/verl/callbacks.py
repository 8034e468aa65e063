"""The base of callbacks around checkpoints, as people import it from ``verl.trainer.ppo.checkpoint_callback``."""

from __future__ import annotations

from typing import Any


class CheckpointCallback:
    """A callback that does nothing; subclasses define ``on_save``."""

    def __init__(self, config: Any = None):
        self.config = config

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Called after the checkpoint of a step is complete."""
