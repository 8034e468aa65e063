"""What every test gets: fixed random states, one thread, tiny models."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# The same examples on every run, and no deadline: a busy machine must not fail a test.
settings.register_profile("posttrain", derandomize=True, deadline=None)
settings.load_profile("posttrain")


@pytest.fixture(autouse=True)
def fixed_random_states() -> None:
    """The global generators start at 0 in every test. torch is not imported for the sake of tests that do without."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products gain nothing from a second thread and lose much to waiting for it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama whose input and output embeddings are shared. Do not write into it."""
    from posttrain.models.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny_llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Qwen3 (norms on queries and keys, separate output embedding). Do not write into it."""
    from posttrain.models.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny_qwen"), "qwen3")
