"""Which Python has PyTorch: no dependency of the project, so that a benchmark makes an environment for it."""

import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = 'torch==2.13.0'


class BenchmarkError(Exception):
    """What the person at the terminal can mend."""


def run(*command: str | Path) -> subprocess.CompletedProcess:
    # Elsewhere, so that the repository's .python-version, under which there may be no PyTorch, does not apply.
    return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)


def has_torch(python: str | Path) -> bool:
    try:
        return run(python, '-c', 'import torch, numpy').returncode == 0
    except OSError:
        return False


def torch_python(given: str | None) -> Path:
    """An interpreter that has PyTorch: the given one, or that of an environment made for it in .cache/torch-env."""
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
        print(f'making {home} with {candidate} and {TORCH}; this downloads PyTorch once')
        try:
            for command in (
                [candidate, '-m', 'venv', '--clear', home],
                [python, '-m', 'pip', 'install', TORCH, 'numpy'],
            ):
                done = run(*command)
                done.check_returncode()
        except FileNotFoundError:
            tried.append(f'{candidate}: not there')
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip().splitlines() or ['nothing said']
            tried.append(f'{candidate}: {said[-1]}')
        else:
            if has_torch(python):
                return python
            tried.append(f'{candidate}: installed, but import torch fails')
    raise BenchmarkError(
        '\n'.join([f'no Python here can install {TORCH}:', *tried, 'give one that has it: --torch-python PATH'])
    )
