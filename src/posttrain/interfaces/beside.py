"""Interface of samplers that sample while a step trains, in another thread than the loop's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class BesideTraining(Protocol):
    """Samplers in workers, as the loop sees them while it trains."""

    def beside_training(self) -> AbstractContextManager[None]:
        """Enter for as long as the samplers work while the policy does: lost ones cannot get its weights meanwhile."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Return True while no sampler is left, and one that was started again waits for the policy's weights."""
        ...

    def leave(self) -> None:
        """End the sampling that is under way in another thread: its samples are no longer needed."""
        ...

    def keep_weights(self, folder: Path) -> bool:
        """Write the weights that the samplers have, as they have them. Returns False where they cannot give them back."""
        ...

    def take_kept(self, folder: Path) -> None:
        """Have the samplers take the weights that ``keep_weights`` has written, and their version. Raises: RunStopped."""
        ...
