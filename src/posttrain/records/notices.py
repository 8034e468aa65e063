"""What an engine has to tell people while it works."""

from __future__ import annotations


class Notices:
    """Sentences that wait until the loop shows them."""

    def __init__(self) -> None:
        self._waiting: list[str] = []

    def add(self, text: str) -> None:
        self._waiting.append(text)

    def take(self) -> list[str]:
        """Everything that waits, oldest first; nothing waits afterwards."""
        taken, self._waiting = self._waiting, []
        return taken
