"""Imports without the garbage collector."""

from __future__ import annotations

import gc

import pytest

from posttrain.libraries.importing import importing


def test_libraries_are_imported_without_the_garbage_collector() -> None:
    """A sixth of the CPU time that a command takes to start. It works again afterwards, also when an import fails."""
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > frozen
