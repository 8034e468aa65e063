"""Run the notebooks of examples/notebooks and store their outputs in them.

    python tools/notebooks.py [NAME.ipynb ...]

Each runs in a folder of its own that is removed afterwards. Stored are the outputs that Jupyter would show, without the times
of its messages; nbformat writes the file, so that a run that changes nothing changes no other line.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
TIMEOUT_S = 300  # per cell
# Jupyter without ipywidgets warns that tqdm, which transformers imports, draws its bars as text.
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found", "OMP_NUM_THREADS": "1"}


def environment_with(more: dict[str, str]) -> dict[str, str]:
    """The environment of a kernel."""
    return dict(os.environ) | more


def executed(file: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in ``folder``. Returns: the notebook with its outputs. Raises: CellExecutionError for a cell that fails."""
    notebook = nbformat.read(file, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=TIMEOUT_S, coalesce_streams=True, resources=place)
    client.execute(env=environment_with(QUIET))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of the kernel's messages
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main() -> None:
    for file in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(file, Path(folder)), file)
        print(file)


if __name__ == "__main__":
    main()
