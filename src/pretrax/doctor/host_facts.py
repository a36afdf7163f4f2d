"""What a launcher asks of a host before it starts anything there, and how the answers of several hosts are judged.

`python -m pretrax.doctor.host_facts '{"token": ..., "config": ..., "overrides": [...]}'` is the program of a host that
is reached through a command such as ssh. It prints its facts as one line of JSON, with the port on which it listens.
Then it reads lines `ADDRESS PORT`, and prints {"problem": ...}, which is null if it reaches that port. It ends with its
standard input.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pretrax import __version__
from pretrax.config import RunConfig, load, written_values
from pretrax.doctor.network import connect, listen
from pretrax.errors import UserError, system_errors
from pretrax.storage import BucketPath
from pretrax.system.accelerators import gpus_here

_CONNECT_SECONDS = 10.0

type Facts = dict[str, Any]


def facts(config: str, overrides: Sequence[str], token: str) -> Facts:
    """The facts of this host, which can be written as JSON.

    Args:
        config: the file of the configuration, or its packaged name, as seen from the working directory.
        token: the name of a file in the run directory, from `write_token`.
    """
    found: Facts = {
        'host': socket.gethostname(),
        'pretrax': __version__,
        'sources': _sources(),
        'jax': importlib.metadata.version('jax'),
        'gpus': gpus_here(),
    }
    try:
        loaded = load(config, list(overrides))
    except UserError as error:
        return found | {'problem': error.short_text()}
    return found | {'config': digest(loaded), 'problem': _run_dir_problem(loaded, token)}


def digest(config: RunConfig) -> str:
    """A digest of all values of a configuration, without secrets."""
    text = json.dumps(written_values(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_token(config: RunConfig) -> str:
    """Writes an empty file in the run directory on a disk, and returns its name. In a bucket it writes nothing.

    Raises:
        UserError: the directory cannot be written.
    """
    token = f'.shared-{secrets.token_hex(8)}'
    if not isinstance(config.run_dir, BucketPath):
        with system_errors(f'run_dir: {config.run_dir} cannot be written', '\nuse another directory: run_dir=PATH'):
            config.run_dir.mkdir(parents=True, exist_ok=True)
            (config.run_dir / token).touch()
    return token


def remove_token(config: RunConfig, token: str) -> None:
    """Removes the file of `write_token`."""
    if not isinstance(config.run_dir, BucketPath):
        (config.run_dir / token).unlink(missing_ok=True)


def problem_of(found: Facts, own: Facts) -> str | None:
    """The first reason why a host cannot run what this machine would run, with the fix; None: it can."""
    if found['pretrax'] != own['pretrax']:
        return f'pretrax {found["pretrax"]}, but {own["pretrax"]} here\ninstall the same version there'
    if found['sources'] != own['sources']:
        return (
            f'pretrax {found["pretrax"]} with other source files than here\n'
            'update it there: git pull, or install the same version'
        )
    if found['jax'] != own['jax']:
        return f'JAX {found["jax"]}, but {own["jax"]} here\ninstall the same version there: uv sync'
    if found['problem']:
        return found['problem']
    if found['config'] != own['config']:
        return 'the configuration has other values than here\ncopy the file there, or put it on a shared disk'
    return None


def _sources() -> str:
    """A digest of the code and the tables of pretrax: two checkouts of one version may differ."""
    root, total = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*root.rglob('*.py'), *root.rglob('*.yaml')]):
        total.update(f'{path.relative_to(root)}\0'.encode() + path.read_bytes())
    return total.hexdigest()[:16]


def _run_dir_problem(config: RunConfig, token: str) -> str | None:
    directory = config.run_dir
    try:
        if isinstance(directory, BucketPath):
            (directory / 'attempts.jsonl').is_file()
            return None
        if not (directory / token).is_file():
            return (
                f'run_dir: {directory.absolute()} is not the directory of that name on the machine of the launcher\n'
                'use a directory that all hosts share, or a bucket: run_dir=s3://BUCKET/PATH'
            )
        own = directory / f'{token}-{socket.gethostname()}-{os.getpid()}'
        own.touch()
        own.unlink()
    except OSError as error:
        return f'run_dir: {directory} cannot be used: {error.strerror or error}'
    return None


def main(request: Mapping[str, Any]) -> None:
    with listen() as listening:
        print(json.dumps(facts(**request) | {'port': listening.getsockname()[1]}), flush=True)
        for line in sys.stdin:
            address, port = line.split()
            print(json.dumps({'problem': connect(address, int(port), _CONNECT_SECONDS)}), flush=True)


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
