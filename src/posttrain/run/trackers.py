"""All trackers of a run as one; a tracker that fails is switched off, and the run continues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from posttrain.config import TrainingConfig
from posttrain.interfaces.tracker import Tracker


class Trackers:
    """See interfaces.tracker.Tracker. ``required`` ones (metrics.jsonl) may stop the run: losing them would be silent loss.
    ``in_words`` replaces the names of fields in a message by those of the user's own configuration."""

    def __init__(
        self,
        required: Sequence[Tracker],
        optional: Sequence[Tracker],
        in_words: Callable[[str], str] = str,
    ):
        self._required = list(required)
        self._optional = list(optional)
        self._in_words = in_words

    def begin(self, config: TrainingConfig, total_steps: int, first_step: int) -> None:
        self._each(lambda tracker: tracker.begin(config, total_steps, first_step))

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        self._each(lambda tracker: tracker.phase(name, step, total))

    def advance(self, units: int) -> None:
        self._each(lambda tracker: tracker.advance(units))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def message(self, text: str) -> None:
        said = self._in_words(text)
        self._each(lambda tracker: tracker.message(said))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._required:
            call(tracker)
        for tracker in list(self._optional):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  # whatever a third-party tracker raises; it must not end a run
                self._optional.remove(tracker)
                name = type(tracker).__name__
                print(f"tracker {name} failed and is switched off: {type(error).__name__}: {error}", file=sys.stderr)
