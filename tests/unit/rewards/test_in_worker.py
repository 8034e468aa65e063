"""What of a prompt goes to the process that scores."""

from __future__ import annotations

import numpy as np

from posttrain.processes import wire
from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.rewards.in_worker import plain_prompt, prompt_of


def test_a_prompt_crosses_without_its_images():
    """PNG files and pixels would be sent with each of its responses; rewards read the sizes alone."""
    grid = np.array([[1, 20, 10]])
    images = PromptImages(files=(b"PNG",), features={"image_grid_thw": grid}, content_hash="0")
    prompt = Prompt(prompt_id="a", token_ids=(1, 2), text="?", data_source="s", ground_truth=3, images=images)

    found = prompt_of(wire.from_bytes(wire.to_bytes(plain_prompt(prompt))))

    assert found == Prompt(
        prompt_id="a", token_ids=(1, 2), text="?", data_source="s", ground_truth=3, image_patches=((20, 10),)
    )
