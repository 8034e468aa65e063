"""A service with a tiny model, whose worker runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.backends.tinker.service import Service
from posttrain.build.serve_tinker import start_service
from tinker_client import settings


@pytest.fixture(scope="module")
def service(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = start_service(
        settings(tiny_llama, tmp_path_factory.mktemp("tinker"), max_tokens_per_micro_batch=12, max_adapters=64)
    )
    made.worker.start()
    yield made
    made.worker.close()
