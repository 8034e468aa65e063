"""The commit of a folder, as git names it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from posttrain.run.commit import commit_of


def test_the_commit_of_the_users_folder(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == {}
    (tmp_path / "reward.py").write_text("1")
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*user, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    found = commit_of(tmp_path)
    assert len(found["commit"]) == 40 and found["uncommitted_changes"] is False
    (tmp_path / "reward.py").write_text("2")
    assert commit_of(tmp_path) == found | {"uncommitted_changes": True}
