"""Finds a Python with PyTorch, or makes an environment for it. PyTorch is not a dependency of the project."""

import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = 'torch==2.13.0'


class BenchmarkError(Exception):
    """An error that the user can fix."""


def run(*command: str | Path) -> subprocess.CompletedProcess:
    # In another directory: the repository's .python-version may name a Python without PyTorch.
    return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)


def has_torch(python: str | Path) -> bool:
    try:
        return run(python, '-c', 'import torch, numpy').returncode == 0
    except OSError:
        return False


def torch_python(given: str | None) -> Path:
    """A Python with PyTorch: the given one, or that of the environment .cache/torch-env, which is made if needed."""
    if given:
        if not has_torch(Path(given).absolute()):
            raise BenchmarkError(f'--torch-python {given} cannot import torch and numpy')
        return Path(given).absolute()
    home = HERE.parent / '.cache' / 'torch-env'
    python = home / 'bin' / 'python'
    if has_torch(python):
        return python
    tried = []
    for candidate in ('python3.11', 'python3.12', 'python3.13', 'python3'):
        print(f'creating {home} with {candidate} and {TORCH}; this downloads PyTorch once')
        try:
            for command in (
                [candidate, '-m', 'venv', '--clear', home],
                [python, '-m', 'pip', 'install', TORCH, 'numpy'],
            ):
                done = run(*command)
                done.check_returncode()
        except FileNotFoundError:
            tried.append(f'{candidate}: not found')
        except subprocess.CalledProcessError as error:
            output = (error.stderr or error.stdout).strip().splitlines() or ['no output']
            tried.append(f'{candidate}: {output[-1]}')
        else:
            if has_torch(python):
                return python
            tried.append(f'{candidate}: installed, but import torch fails')
    raise BenchmarkError(
        '\n'.join([f'no Python here can install {TORCH}:', *tried, 'give a Python with PyTorch: --torch-python PATH'])
    )
