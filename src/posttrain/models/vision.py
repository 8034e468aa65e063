"""Image inputs of a language model: image features in place of the image tokens, and the matching positions.

A vision-language model here consists of a vision tower, layers that connect it to the language model, and the language model.
Images reach the language model only as embeddings and positions, which this file computes; packing, attention, heads and
samplers are those of text.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from posttrain.errors import ModelError, Problem
from posttrain.records.images import PlacedImages, PromptImages

# Families whose images enter by embeddings, positions and what is added after the first layers. Others attend to later tokens
# within an image (Gemma 3).
FAMILIES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL with experts",
    "smolvlm": "SmolVLM",
}
CHOOSE = "choose a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or SmolVLM model"
ADDED = "image_features_of_layers"  # argument of a forward pass: places and features, see AddedFeatures
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def has_vision(config: PretrainedConfig) -> bool:
    """Return True when a model of this configuration has a vision part."""
    return getattr(config, "vision_config", None) is not None


def reads_images(config: PretrainedConfig) -> bool:
    """Return True when a model of this configuration supports images here."""
    return config.model_type in FAMILIES


@dataclass(frozen=True, slots=True, eq=False)
class AddedFeatures:
    """Features that are added to the states of image tokens after each of the first K layers (DeepStack, arXiv:2406.04334)."""

    places: Tensor  # [n] int64, in the row
    features: tuple[Tensor, ...]  # K of [n, hidden]
    tokens: int  # of the row

    def part(self, stretch: Callable[[Tensor], Tensor]) -> AddedFeatures:
        """Return those of a slice of the row. Args: stretch takes it from values of the row, [N], and fills it with 0."""
        numbers = self.places.new_zeros(self.tokens)
        numbers[self.places] = torch.arange(1, len(self.places) + 1, device=self.places.device)
        here = stretch(numbers)
        places = here.nonzero()[:, 0]
        return AddedFeatures(places, tuple(each[here[places] - 1] for each in self.features), len(here))

    def to_states(self, layer: int, states: Tensor) -> Tensor:
        """Return the states behind a layer, [1, N, hidden], with its features."""
        where = torch.zeros_like(self.places), self.places
        return states.index_put(where, states[where] + self.features[layer].to(states.dtype))


def add_features_to_layers(model: PreTrainedModel) -> None:
    """Have the first layers of a model of such a family add the features that a pass has for them, as ``model_inputs`` gives
    them; transformers' own way wants an image for every image token, and a model may sample one in a response."""
    for layer in range(_added_layers(model)):

        def add(module: Any, given: Any, named: dict[str, Any], output: Tensor, layer: int = layer) -> Tensor:
            added: AddedFeatures | None = named.get(ADDED)
            return output if added is None else added.to_states(layer, output)

        cast(Any, model.get_decoder()).layers[layer].register_forward_hook(add, with_kwargs=True)


def _added_layers(model: PreTrainedModel) -> int:
    return len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def vision_parts(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules besides the language model: the tower and its connection. [] without one."""
    if not has_vision(model.config):
        return []
    body, decoder = model.base_model, model.get_decoder()
    return [f"{model.base_model_prefix}.{name}" for name, part in body.named_children() if part is not decoder]


def freeze_vision(model: PreTrainedModel, field: str = "model.freeze_vision") -> None:
    """Exclude the vision tower, and its connection to the language model, from training.

    Args: field is the setting that asks for it, for messages.
    Raises: ModelError when there is none.
    """
    parts = vision_parts(model)
    if not parts:
        what = f"{model.name_or_path} has no vision tower to freeze"
        raise ModelError(Problem(what, fix=f"leave {field} out", field=field))
    for name in parts:
        model.get_submodule(name).requires_grad_(False)


def model_inputs(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor,
    placed: Sequence[PlacedImages] = (),
    idle: Sequence[PromptImages] = (),
) -> dict[str, Any]:
    """Return the forward inputs of a packed row: ids and positions, or embeddings and positions when it holds images.

    Features of equal images are computed once and carry gradient where the tower is trained. A model with three-part positions
    (time, height, width: multimodal rotary embeddings) gets those of its own rule for each prompt; responses continue from
    there.

    Args: token_ids, position_ids [N] int64, positions from 0 in every prompt as for text; placed: the images in the row; idle:
        images outside of it, each of which is a pass of the tower that changes no number.
    Returns: tensors [1, N], but inputs_embeds [1, N, hidden] and three-part position_ids [3, 1, N], and AddedFeatures.
    Raises: ModelError when the model's family does not support images, or the numbers of image tokens and features differ.
    """
    if not placed and not idle:
        return {"input_ids": token_ids[None], "position_ids": position_ids[None]}
    features = image_features(model, [each.images for each in placed])
    # Before the embeddings, where processes with images have their passes.
    nothing = [image_features(model, [one])[one.content_hash].sum() * 0 for one in idle]
    places, rows = [], []
    positions = position_ids.expand(3, -1).clone() if _three_parts(model) else position_ids
    for each in placed:
        prompt = token_ids[each.start : each.start + each.prompt]
        is_image = prompt == model.config.image_token_id
        found = features[each.images.content_hash]
        if len(found) != int(is_image.sum()):
            raise _other_count(int(is_image.sum()), len(found))
        places.append(each.start + is_image.nonzero()[:, 0])
        rows.append(found)
        if _three_parts(model):
            end = each.start + each.prompt
            positions[:, each.start : end], shift = _positions(model, prompt, is_image, each.images)
            positions[:, end : each.end] += shift
    embedded = model.get_input_embeddings()(token_ids)
    more: dict[str, Any] = {}
    if placed:
        at = torch.cat(places)
        shown, *added = torch.cat(rows).split(embedded.shape[1], dim=1)
        # Distinct places: the gradient of each feature is a plain read, which is deterministic.
        embedded = embedded.index_put((at,), shown.to(embedded.dtype))
        more = {ADDED: AddedFeatures(at, tuple(added), len(token_ids))} if added else {}
    for none in nothing:
        embedded = embedded + none.to(embedded.dtype)
    return {
        "inputs_embeds": embedded[None],
        "position_ids": positions[:, None] if _three_parts(model) else positions[None],
        **more,
    }


def image_features(model: PreTrainedModel, images: Sequence[PromptImages]) -> dict[str, Tensor]:
    """Compute the features for the image tokens of each prompt, [tokens, hidden x (1 + K)], carrying gradient where the tower
    does: the embeddings, and beside them what is added after each of K layers. By content hash, so that equal images are computed
    once, and all in one batch.

    Raises: ModelError when the model's family does not support images.
    """
    _refuse_other_families(model)
    body: Any = model.base_model
    found: dict[str, Tensor] = {}
    for along, each in _passes(images):
        given = {
            name: torch.tensor(np.concatenate([of[name] for of in each.values()], axis=along), device=model.device)
            for name in next(iter(each.values()))
        }
        output = body.get_image_features(**given, return_dict=True)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        features = torch.cat([torch.cat(tuple(each)) for each in layers], dim=1)
        # Each unit gives the same number of tokens.
        units = [of["pixel_values"].shape[along] for of in each.values()]
        parts = features.split([count * len(features) // sum(units) for count in units])
        found |= zip(each, parts, strict=True)
    return found


def tower_passes(images: Sequence[PromptImages]) -> int:
    """Return the number of passes of the tower that ``image_features`` makes."""
    return len(_passes(images))


def _passes(images: Sequence[PromptImages]) -> list[tuple[int, dict[str, Mapping[str, np.ndarray]]]]:
    """Split distinct images into what the tower reads at once. Patches of any sizes are concatenated in one row; tiles,
    [1, tiles, 3, height, width], must have one size.

    Returns: of each pass the axis to concatenate along, and the processor's arrays by content hash.
    """
    distinct = {one.content_hash: one.features for one in images}
    groups = groupby(distinct.items(), key=lambda item: item[1]["pixel_values"].shape[2:])
    return [(1 if tile else 0, dict(some)) for tile, some in groups]


def position_shift(position_ids: Tensor, start: int, end: int) -> int:
    """Return the difference between the positions after a prompt and its number of tokens: below 0 where an image's tokens
    share positions, 0 for text.

    Args: position_ids of ``model_inputs``, in whose row the prompt spans the places from start to end.
    """
    return int(position_ids[..., start:end].max()) + 1 - (end - start)


def copy_processor(model_path: str, folder: Path) -> None:
    """Copy the settings of a model's image processor to its weights, so that the folder is complete.

    Args: model_path is the folder or hub id that the model came from.
    """
    for name in PROCESSOR_FILES:
        file = cached_file(
            model_path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None and not (folder / name).exists():
            shutil.copy(file, folder / name)


def _three_parts(model: PreTrainedModel) -> bool:
    return hasattr(model.base_model, "get_rope_index")


def _positions(model: PreTrainedModel, prompt: Tensor, is_image: Tensor, images: PromptImages) -> tuple[Tensor, int]:
    """Return the positions of a prompt, [3, tokens], by the model's own rule, and the shift of the tokens after it."""
    body: Any = model.base_model
    found, shift = body.get_rope_index(
        input_ids=prompt[None],
        mm_token_type_ids=is_image[None].int(),
        image_grid_thw=torch.tensor(images.features["image_grid_thw"], device=prompt.device),
    )
    return found[:, 0], int(shift)


def _refuse_other_families(model: PreTrainedModel) -> None:
    if not reads_images(model.config):
        raise ModelError(
            Problem(
                f"{model.config.model_type} at {model.name_or_path} was given images, which are supported for "
                f"{', '.join(FAMILIES.values())}",
                fix=f"{CHOOSE}, or leave the images out",
                field="model.path",
            )
        )


def _other_count(tokens: int, features: int) -> ModelError:
    what = f"a prompt has {tokens} image tokens, and the model makes {features} features of its images"
    return ModelError(
        Problem(what, fix="use the image processor of the model, and prompts that are not cut", field="data")
    )
