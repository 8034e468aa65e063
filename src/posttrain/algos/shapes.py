"""Shape checks whose message names the tensors."""

from __future__ import annotations

from torch import Tensor

from posttrain.errors import ShapeError


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ShapeError unless all named tensors have one shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ShapeError("shapes differ: " + ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()))
