"""``python stand_in.py ARGUMENTS``: a warm process in the place of ``python ARGUMENTS``, for the scripts of a shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from warm.client import SOCKET, ask, end_of

if __name__ == "__main__":
    connection, _ = ask(os.environ[SOCKET], sys.argv[1:], os.environ)
    code = end_of(connection)
    sys.exit(code if code >= 0 else 128 - code)
