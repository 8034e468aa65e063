"""Rows of a program on SkyRL that reads them in its own way, as a dataset class of verl's form (docs/own-classes.md).

The program's ``get_train_dataset`` and ``get_eval_dataset`` are called by the bridge, in the Python that has SkyRL. Their items
are those of SkyRL's own dataset: (prompt, env_class, env_extras, ...), or a mapping with these names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from posttrain.envs.agent.bridged import Bridge
from posttrain.envs.skyrl_program import BRIDGE, PROMPT, python_of
from posttrain.errors import DataError, Problem


class ProgramRows:
    """The rows of one of the program's two datasets, read once.

    Args: config, ``file``, ``folder``, ``arguments`` and ``python`` as in the environment skyrl_program; what, training or
        validation.
    Raises: ConfigError without a Python; DataError when the program gives no rows.
    """

    def __init__(self, config: Mapping[str, Any], what: str):
        bridge = Bridge(os.path.expanduser(python_of(config.get("python"))), BRIDGE, "SkyRL")
        asked = {"file": str(config["file"]), "folder": str(config["folder"]), "arguments": list(config["arguments"])}
        try:
            answer = bridge.ask({**asked, "rows": what})
        finally:
            bridge.kill()
        if "rows" not in answer:
            raise DataError(Problem(f"{config['file']} gives no {what} rows: {answer.get('failure')}"))
        self._rows = [_row(item, number) for number, item in enumerate(answer["rows"])]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def _row(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return an item in verl's fields. A prompt that is a text, such as a task's folder, is kept for the program's generator."""
    prompt, extras = item["prompt"], dict(item.get("env_extras") or {})
    text = {PROMPT: prompt} if isinstance(prompt, str) else {}
    environment = {"env_class": item["env_class"]} if item.get("env_class") else {}
    return {
        "raw_prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "data_source": str(extras.get("data_source") or item.get("env_class") or "skyrl_program"),
        "extra_info": {**extras, **environment, **text, "index": number},
    }
