"""What every test gets: fixed random states, one thread, tiny models."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

sys.path.append(str(Path(__file__).parent))  # batches.py, warm/

os.environ["OMP_NUM_THREADS"] = "1"  # see one_thread

# The same examples on every run, and no deadline: a busy machine must not fail a test.
settings.register_profile("posttrain", derandomize=True, deadline=None)
settings.load_profile("posttrain")

logging.getLogger().addHandler(
    logging.NullHandler()
)  # what nobody looks at is not printed: some tests look at what is printed

WHOLLY_SLOW = re.compile(r"^pytestmark = (pytest\.mark\.slow|\[.*pytest\.mark\.slow.*\])$", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that have none of the tests that are asked for, as far as their text says so: to import and collect all
    of them costs each process of a test run half a minute."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    if re.match(r"slow( and |$)", config.option.markexpr):
        return None if "slow" in collection_path.read_text(encoding="utf-8") else True
    if re.match(r"not slow( and |$)", config.option.markexpr):
        if collection_path.parent.name == "gpu" and "not gpu" in config.option.markexpr:
            return True
        # megatron-core's import alone takes five seconds
        whole = collection_path.name.startswith("test_megatron_") or WHOLLY_SLOW.search(
            collection_path.read_text(encoding="utf-8")
        )
        return True if whole else None
    return None


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays to the end, so that the garbage collector need not go through it again and
    again: that took up to four fifths of the time of tests that make many objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_random_states() -> None:
    """The global generators start at 0 in every test. torch is not imported for the sake of tests that do without."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        if torch.cuda.is_available():
            torch.manual_seed(0)
        else:  # where there is none, torch.manual_seed keeps the text of the stack for each kind of one: 1 ms and 20 KiB a test
            torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny products gain nothing from a second thread and lose much to waiting for it: not here, not in a run before, and not in
    the runs that are started as processes."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What comes to the root logger in a test."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    """Slow tests can start processes that have torch and posttrain imported already, and Ray's workers are such (warm/). WARM of
    a test's file names further modules that they are to have imported."""
    if request.node.get_closest_marker("slow"):
        from warm.processes import have_imported, offer, warm_ray_workers

        offer()
        if names := getattr(request.module, "WARM", ()):
            have_imported(*names)
        with suppress(ImportError):
            warm_ray_workers()


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """The processes that a run starts for rewards, environments and code of users are forked from one that has imported what they
    need: to start one takes half a second of CPU time, or five with torch. How they start and end is looked at in
    tests/unit/processes, where they are started as users start them."""
    from posttrain.processes import start
    from warm.processes import start_warm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "start", start_warm)
        yield


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


@pytest.fixture(scope="session")
def tiny_scorer(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Folder of a random reward model of the tiny Llama's shape, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from posttrain.models.tiny import draw_weights

    folder = tmp_path_factory.mktemp("tiny_scorer")
    config = AutoConfig.from_pretrained(tiny_llama, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    draw_weights(model, 3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with heads of 32, which vLLM can run too; embeddings shared. Do not write into it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from posttrain.models.tiny import draw_weights, tiny_tokenizer

    folder = tmp_path_factory.mktemp("served_model")
    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **ids,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, 0)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
