"""Names that a program of a checkout imports, and the peer's trainers among them. Nothing is run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from posttrain.checkout_files import imported_names
from posttrain.dialects.scripts.peer_trainers import BASES, Peer


@dataclass(frozen=True, slots=True)
class Import:
    """A name that a file imports."""

    module: str  # with the dots of a relative one
    name: str  # as the module has it

    @property
    def peer(self) -> Peer | None:
        peer = BASES.get(self.name)
        return peer if peer is not None and re.search(peer.modules, self.module) else None


def imports_of(source: ast.Module) -> dict[str, Import]:
    """Return every imported name, also inside functions."""
    return {name: Import(*given) for name, given in imported_names(source).items()}
