"""Executes the notebooks, and stores their outputs in them, so that they can be read without being run:

    uv run python scripts/run_notebooks.py [FILE ...]

tests/examples/test_notebooks.py checks that the outputs are those of the cells.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

REPOSITORY = Path(__file__).parents[1]


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the code, so that outputs of other code are found."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == 'code']
    return hashlib.sha256('\0'.join(code).encode()).hexdigest()


def execute(path: Path) -> None:
    """Runs a notebook in a copy of its directory, as on a computer that has never run it."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory() as directory:
        place = shutil.copytree(
            path.parent, Path(directory, 'copy'), ignore=shutil.ignore_patterns('runs', '__pycache__')
        )
        environment = {**os.environ, 'XDG_CACHE_HOME': directory, 'JAX_PLATFORMS': 'cpu'}
        client = nbclient.NotebookClient(
            notebook, timeout=1200, record_timing=False, resources={'metadata': {'path': str(place)}}
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == 'code':
            cell.outputs = shown(cell.outputs)
    notebook.metadata = {'kernelspec': notebook.metadata.kernelspec, 'language_info': {'name': 'python'}}
    notebook.metadata['executed'] = digest(notebook)
    nbformat.write(notebook, path)


def shown(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The pictures and values, and what was printed as one text,
    without lines that name a directory of this machine.
    """
    texts = [output.text for output in outputs if output.get('name') == 'stdout']
    lines = [line for line in ''.join(texts).splitlines(keepends=True) if tempfile.gettempdir() not in line]
    printed = [nbformat.v4.new_output('stream', name='stdout', text=''.join(lines))] if lines else []
    return [*printed, *(output for output in outputs if output.output_type != 'stream')]


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    for path in paths or sorted([*REPOSITORY.glob('notebooks/*.ipynb'), *REPOSITORY.glob('examples/*/*.ipynb')]):
        print(path, flush=True)
        execute(path.resolve())


if __name__ == '__main__':
    main()
