"""Ends a run at the first token that the native sampler samples. A plug-in: ``model.external_modules: [first_token]``, with this
folder on the path."""

from __future__ import annotations

import os
from typing import Any

from posttrain.backends.rollout.native import engine

Opened = engine.NativeStream


class EndedAtOnce(Opened):
    """A stream whose first token is the last thing of the process."""

    def __init__(self, *arguments: Any, **settings: Any):
        settings["on_tokens"] = lambda count: os._exit(0)
        super().__init__(*arguments, **settings)


engine.NativeStream = EndedAtOnce  # type: ignore[misc]
