"""The counting task: what is drawn is what is asked and answered."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from itertools import islice

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from posttrain.config.data import DataConfig
from posttrain.config.reward import RewardConfig
from posttrain.data.images import ImageRules
from posttrain.data.readers import check_files, read_rows
from posttrain.data.shapes import COLORS, Difficulty, Picture, Shape, draw, pictures, write_shapes
from posttrain.errors import ConfigError, DataError
from posttrain.records.prompts import Prompt
from posttrain.rewards.load import load_rewards


def blobs(pixels, color):
    """Connected areas of a color, in an image [height, width, 3]: one fills up from each pixel that is left."""
    left = {tuple(place) for place in np.argwhere((pixels == COLORS[color]).all(axis=2)).tolist()}
    count = 0
    while left:
        count += 1
        front = [left.pop()]
        while front:
            row, column = front.pop()
            near = {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)} & left
            left -= near
            front += near
    return count


@pytest.mark.parametrize("difficulty", [Difficulty(), Difficulty(max_shapes=9, kinds=4, colors=6, size=40)])
def test_every_shape_is_one_area_of_its_color(difficulty):
    for picture in islice(pictures(3, difficulty), 30):
        pixels = np.asarray(Image.open(BytesIO(draw(picture, difficulty.size))))
        assert pixels.shape == (difficulty.size, difficulty.size, 3)
        for color in COLORS:
            assert blobs(pixels, color) == sum(shape.color == color for shape in picture.shapes)


def test_questions_and_answers_by_hand():
    shapes = (
        Shape("circle", "red", 1, 1, 8),
        Shape("circle", "blue", 21, 1, 8),
        Shape("square", "red", 1, 21, 8),
    )
    asked = [Picture(shapes, kind, color) for kind in ("circle", None) for color in ("red", None)]
    assert [(picture.question, picture.answer) for picture in asked] == [
        ("How many red circles are there?", 1),
        ("How many circles are there?", 2),
        ("How many red shapes are there?", 2),
        ("How many shapes are there?", 3),
    ]


def test_answers_are_equally_frequent():
    """6 answers, 0 to 5, in 3,000 draws: 500 of each, and a standard deviation of sqrt(3000 x 1/6 x 5/6) = 20."""
    found = Counter(picture.answer for picture in islice(pictures(1, Difficulty()), 3000))
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert all(abs(count - 500) < 5 * 20 for count in found.values())
    alone = Counter(picture.answer for picture in islice(pictures(1, Difficulty(kinds=1)), 300))
    assert sorted(alone) == [1, 2, 3, 4, 5]  # nothing else could be in the picture


def test_files_are_read_and_scored(tmp_path):
    paths = write_shapes(tmp_path / "new", train_rows=20, validation_rows=5, seed=1, difficulty=Difficulty())
    data = DataConfig(train_files=[str(paths[0])], validation_files=[str(paths[1])])
    assert check_files(data) == []
    train, validation = ([*read_rows(path, data, images=ImageRules.of(data))] for path in paths)
    assert (len(train), len(validation)) == (20, 5)

    images = [row.images[0].content + row.messages[0]["content"][1]["text"].encode() for row in [*train, *validation]]
    assert len(set(images)) == 25
    row = train[3]
    assert row.messages[0]["content"][1]["text"].endswith(" are there? Answer with a number.")
    prompt = Prompt(prompt_id="0", token_ids=(1,), text="", data_source=row.data_source, ground_truth=row.ground_truth)
    rewards = load_rewards(RewardConfig(terms=[{"name": "by_data_source"}]))
    outcomes = [rewards.score_response(prompt, f"There are {number}.") for number in (row.ground_truth, "17")]
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0]


def test_the_same_arguments_give_the_same_files(tmp_path):
    def rows(folder, **changes):
        arguments = {"train_rows": 8, "validation_rows": 4, "seed": 1, "difficulty": Difficulty()} | changes
        return [pq.read_table(path).to_pylist() for path in write_shapes(tmp_path / folder, **arguments)]

    train, validation = rows("a")
    assert rows("b") == [train, validation]
    assert rows("c", train_rows=9)[1] == validation
    assert rows("d", seed=2)[0] != train


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"max_shapes": 0, "kinds": 5}, "max_shapes is 0; use 1 to 36\nkinds is 5; use 1 to 4"),
        ({"colors": 7}, "colors is 7; use 1 to 6"),
        ({"size": 4}, "size is 4; use 8 to 1024"),
        # 26 shapes need a grid of 6 x 6, and 6 cells of 6 pixels are 36
        ({"max_shapes": 26, "size": 35}, "26 shapes do not fit on 35 x 35 pixels; use a size of at least 36"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, changes, what):
    with pytest.raises(ConfigError) as error:
        write_shapes(tmp_path, train_rows=1, validation_rows=1, seed=1, difficulty=Difficulty(**changes))
    assert str(error.value) == what


def test_too_few_pictures_are_told(tmp_path):
    """One circle on 8 x 8 pixels, of side 4, 5 or 6, a pixel free around it: 3 x 3 + 2 x 2 + 1 x 1 = 14 places."""
    tiny = Difficulty(max_shapes=1, kinds=1, size=8)
    with pytest.raises(DataError, match="there are hardly more than 14 such pictures; 1001 are requested"):
        write_shapes(tmp_path, train_rows=1000, validation_rows=1, seed=1, difficulty=tiny)
