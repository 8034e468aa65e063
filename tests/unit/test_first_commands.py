"""README's three commands, as tools/first_commands.py reads them to measure them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools/first_commands.py"


def test_the_commands_are_those_of_readme() -> None:
    spec = importlib.util.spec_from_file_location("first_commands", TOOL)
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    install, train, chat = tool.commands()
    assert install[:2] == ["pip", "install"] and install[-1].endswith(".whl")
    assert train[:2] == ["posttrain", "demo"] and "--gguf" in train
    assert chat[:2] == ["posttrain", "chat"] and chat[2].endswith(".gguf") and chat[-1] == "What is 3 + 4?"
