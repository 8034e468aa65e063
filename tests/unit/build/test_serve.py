"""What an endpoint is told from its configuration."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from posttrain.build import serve
from posttrain.config.serve import EndpointConfig


@pytest.mark.parametrize(
    ("mode", "noted"), [(0o600, False), (0o400, False), (0o644, True), (0o640, True), (0o602, True)]
)
def test_a_token_that_others_can_read_is_noted(mode: int, noted: bool, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    file.chmod(mode)
    notes = serve.readable_by_others(EndpointConfig(token_file=str(file)))
    assert [f"chmod 600 {file}" in note for note in notes] == [True] * noted
    assert serve.readable_by_others(EndpointConfig()) == []


def test_by_which_names_this_machine_is_called() -> None:
    assert serve.host_names(EndpointConfig()) == {"localhost", "127.0.0.1"}
    assert serve.host_names(EndpointConfig(host="::1", host_names=["Box.lan."])) == {"localhost", "::1", "box.lan"}
    assert socket.gethostname().lower() in serve.host_names(EndpointConfig(host="0.0.0.0"))
