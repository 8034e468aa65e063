"""Notices of engines to the user."""

from __future__ import annotations


class Notices:
    """Sentences that an engine leaves for the loop to show."""

    def __init__(self) -> None:
        self._waiting: list[str] = []

    def add(self, text: str) -> None:
        self._waiting.append(text)

    def add_once(self, text: str) -> None:
        """Add a sentence unless it waits already."""
        if text not in self._waiting:
            self._waiting.append(text)

    def take(self) -> list[str]:
        """Take all sentences, oldest first."""
        taken, self._waiting = self._waiting, []
        return taken


FROM_OWN_FUNCTIONS = Notices()  # about results of the user's own losses and estimators, in this process
