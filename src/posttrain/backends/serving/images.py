"""Images in requests to samplers with an image processor of their own: one token in the place of each image, and the pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from posttrain.errors import ModelError, Problem, RunStopped
from posttrain.models.loading import load_model_config
from posttrain.records.images import PromptImages

# Families that write an image as a run of one token, with other tokens before and after it
RUNS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def image_token_of(model_path: str, trust_remote_code: bool, engine: str) -> int:
    """Return the token of an image of the model in a folder. Raises: ModelError for a family that writes an image otherwise."""
    config = load_model_config(model_path, trust_remote_code)
    if config.model_type not in RUNS:
        what = f"prompts have images, which rollout.engine={engine} is given for models of type {', '.join(RUNS)} only"
        what += f"; this one is {config.model_type}"
        raise ModelError(Problem(what, fix="use rollout.engine=native or hf", field="rollout.engine"))
    return int(config.image_token_id)


def unexpanded(token_ids: Sequence[int], image_token: int, images: PromptImages) -> list[int]:
    """Return a prompt with one token for each image, which the sampler's own processor replaces by as many as it makes of it.

    Raises: RunStopped when the prompt has not as many runs of image tokens as images.
    """
    found: list[int] = []
    runs = 0
    for token, some in groupby(token_ids):
        found += [token] if token == image_token else some
        runs += token == image_token
    if runs != len(images.files):
        raise RunStopped(
            f"a prompt has {len(images.files)} images and {runs} places for them; a model that has sampled image tokens itself, "
            "in an earlier turn, cannot be sampled further by this engine: use rollout.engine=native"
        )
    return found


def refuse_images(images: Iterable[PromptImages | None]) -> None:
    """Raises: RunStopped where a request to a server holds images."""
    if any(each is not None for each in images):
        raise RunStopped(
            "prompts have images, and this sampler is a server, which takes token ids alone: use a sampler in the trainer's "
            "Python (rollout.engine=native, hf, or vllm without rollout.endpoints, engine_options.python and several machines)"
        )


def check_same_prompt(read: Sequence[int], token_ids: Sequence[int], engine: str) -> None:
    """Raises: RunStopped when a sampler has read other tokens than the trainer will, because its processor makes another number
    of tokens of an image."""
    if list(read) != list(token_ids):
        raise RunStopped(
            f"{engine} reads a prompt with images as {len(read)} tokens, and the trainer as {len(token_ids)}: its image "
            "processor scales images otherwise; give both the same settings (data.image_options, and the model's "
            "preprocessor_config.json), or use rollout.engine=native"
        )
