"""Images of prompts: where they stand, and how much of them the model reads."""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import Section


class ImageSettings(Section):
    """The part that the datasets of training and of generation share."""

    image_column: str | None = "images"
    """Column with the images of a prompt, one or a list (docs/vision.md); may be absent. null means that no column is looked
    at, and <image> in a prompt is text."""
    image_folder: str | None = None
    """Folder in which relative paths of images begin; null means that of the dataset file."""
    video_column: str | None = "videos"
    """Column with videos, which this version refuses; may be absent. null means that it is not looked at."""
    max_image_pixels: int = Field(default=89_478_485, ge=1, le=89_478_485)
    """Largest image that is read, width x height; a larger one is refused before it is decoded."""
    image_options: dict[str, bool | int | dict[str, int]] = {}
    """Settings of the model's image processor that are changed: max_pixels, min_pixels, size, do_image_splitting."""
    image_cache_mib: int = Field(default=2048, ge=0)
    """Processed images that are kept for later steps, MiB; others are processed again when they are needed. 0 keeps those of the
    last prompt alone."""
