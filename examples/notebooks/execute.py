"""Execute the notebooks of this folder in place, each in a fresh kernel.

    python examples/notebooks/execute.py [NAME ...]

What is kept is what the cells show: no times, no warnings, no memory of who ran them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> list[Path]:
    """The notebooks of this folder, in their order."""
    return sorted(HERE.glob("*.ipynb"))


def load(path: Path) -> NotebookNode:
    """The notebook as it is in the file."""
    return nbformat.read(path, as_version=4)


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel; the file is left alone.

    The kernel imports this checkout, and neither reads nor writes settings of the user.
    Raises nbclient.exceptions.CellExecutionError at the first cell that fails.
    """
    notebook = load(path)
    with tempfile.TemporaryDirectory() as settings:
        # Sockets in that folder: no port of this machine is opened.
        private = {"transport": "ipc", "connection_file": f"{settings}/kernel.json"}
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        client = NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": str(HERE)}},
            record_timing=False,
            coalesce_streams=True,
            config=Config({"KernelManager": private} if os.name == "posix" else {}),
        )
        client.execute(
            env={
                # One thread, unless told otherwise: tensors are small, and bits are the same then.
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "PYTHONPATH": search,
                "IPYTHONDIR": settings,
                "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            }
        )
    return clean(notebook)


def clean(notebook: NotebookNode) -> NotebookNode:
    """The same notebook without what differs from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Execute the notebooks that were named, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", nargs="*", help="such as 02_fold_rules; all of them without one")
    names = parser.parse_args().name
    known = {path.stem: path for path in notebooks()}
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; use some of {', '.join(known)}")
    for name in names or known:
        print(f"== {name}", flush=True)
        nbformat.write(execute(known[name]), known[name])


if __name__ == "__main__":
    main()
