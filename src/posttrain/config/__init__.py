"""RunConfig and its sections: frozen, validated, free of torch and of I/O."""

from posttrain.config.schema import RunConfig

__all__ = ["RunConfig"]
