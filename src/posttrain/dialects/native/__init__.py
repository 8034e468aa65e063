"""posttrain's own configuration: the keys are RunConfig's fields."""

from posttrain.dialects.native.loader import load, read

__all__ = ["load", "read"]
