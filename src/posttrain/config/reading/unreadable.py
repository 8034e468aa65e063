"""Problems of files that are no readable text."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import Problem, nearest

_MARKS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


def unreadable(path: str, error: OSError | UnicodeDecodeError) -> Problem:
    """Say why a file cannot be read, and which one may be meant."""
    file = Path(path).expanduser()
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(path, file.read_bytes())
    if isinstance(error, FileNotFoundError) and file.is_symlink():
        return Problem(f"{path} is a link to {file.readlink()}, and there is no such file")
    if isinstance(error, FileNotFoundError):
        return Problem(f"there is no file {path}", fix=_nearby(path))
    if isinstance(error, IsADirectoryError):
        inside = [str(Path(path) / each.name) for each in sorted(file.glob("*.y*ml"))]
        return Problem(f"{path} is a folder", fix=f"name a file in it: {', '.join(inside[:3]) or 'FILE.yaml'}")
    return Problem(f"{path} cannot be read: {error.strerror}")


def _not_utf8(path: str, data: bytes) -> Problem:
    """The problem of a file in another encoding, with the line of its first byte that is not UTF-8."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            return Problem(f"{path} is a text file in {name}", fix="save it in UTF-8")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"{path} is not a text file in UTF-8: byte 0x{data[error.start]:02x}"
        return Problem(what, where=f"{path}:{line}", fix="save it in UTF-8")
    return Problem(f"{path} is not a text file in UTF-8", fix="save it in UTF-8")


def _nearby(path: str) -> str:
    folder = Path(path).expanduser().parent
    files = [str(file) for file in sorted(folder.glob("*.y*ml"))] if folder.is_dir() else []
    guess = nearest(path, files)
    return f"did you mean {guess}?" if guess else ""
