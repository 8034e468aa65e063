"""The images of one prompt or episode: the files themselves, and what the model's image processor made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # not loaded by posttrain plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImages:
    """One object per prompt, which all samples of its group share, or per sample of an episode. ``features`` may be computed
    when it is first read; a copy in another process holds plain arrays."""

    files: tuple[bytes, ...]  # encoded (PNG, JPEG, ...), in the order of their placeholders in the prompt
    # Of all files together, by the processor's names. Qwen2-VL: pixel_values [patches, values] float32 and image_grid_thw
    # [images, 3] int64; SmolVLM: pixel_values [1, tiles, 3, H, W] float32 and pixel_attention_mask [1, tiles, H, W] int64.
    features: Mapping[str, np.ndarray]
    content_hash: str  # of the files, see hash_of_files
    # Files whose tokens are in the prompt; those of the others are among an environment's answers. None: all of them.
    in_prompt: int | None = None

    @property
    def beyond_prompt(self) -> bool:
        """True when an environment's answers hold some of the images."""
        return self.in_prompt is not None and self.in_prompt < len(self.files)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImages:
    """The place of a prompt with images in a packed row, and the end of its responses. Where answers of an environment hold
    images, the response counts as prompt, too."""

    images: PromptImages
    start: int  # place of the prompt's first token
    prompt: int  # tokens of the prompt
    end: int  # behind the last token of its responses


def hash_of_files(files: Iterable[bytes]) -> str:
    """32 hexadecimal digits that tell these files, in this order, from others. Source: BLAKE2b, RFC 7693."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(len(file).to_bytes(8, "little"))  # so that two files are not the one they make together
        digest.update(file)
    return digest.hexdigest()
