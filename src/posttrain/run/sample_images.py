"""The images of samples, once each, as small pictures in the run folder.

Pictures are encoded again from decoded pixels, so no other content of a file gets there.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from posttrain.libraries.disk_errors import naming
from posttrain.records.images import PromptImages, hash_of_files

FOLDER = "samples/images"  # of the run folder
MAX_FILES = 5000  # in that folder; later images are named and not written
MAX_SIDE = 384  # pixels of a picture; a larger image is scaled down


class SampleImages:
    """Writes the images of prompts of a run; one object per file of samples, whose groups share prompts."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder / FOLDER
        self._named: dict[str, list[dict[str, Any]]] = {}  # by content hash of the prompt's images
        self._there: set[str] | None = None

    def of(self, images: PromptImages) -> list[dict[str, Any]]:
        """Descriptions of a prompt's images, in order: {hash, file, width, height}; the size is the image's own, and ``file``,
        in the run folder, is null where no more were written."""
        if images.content_hash not in self._named:
            self._named[images.content_hash] = [self._write(file) for file in images.files]
        return self._named[images.content_hash]

    def _write(self, content: bytes) -> dict[str, Any]:
        if self._there is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._there = {entry.name for entry in os.scandir(self._folder)}
        digest = hash_of_files([content])
        name = f"{digest}.png"
        with Image.open(BytesIO(content)) as image:
            width, height = image.size
            if name not in self._there and len(self._there) < MAX_FILES:
                small = image.convert("RGB")
                small.thumbnail((MAX_SIDE, MAX_SIDE))
                beside = self._folder / f".{name}.{os.getpid()}"
                with naming(self._folder / name):
                    small.save(beside, "PNG")
                    beside.replace(self._folder / name)
                self._there.add(name)
        file = f"{FOLDER}/{name}" if name in self._there else None
        return {"hash": digest, "file": file, "width": width, "height": height}
