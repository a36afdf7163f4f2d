"""The rows of a sweep as tasks of a Ray cluster: `pretrax bench SWEEP --row N` on whatever node has room."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pretrax.errors import Report
from pretrax.launch.ray_cluster import Cluster
from pretrax.system.children import end_with_parent

_RETRIES = 3  # of a row whose node is lost
_TAIL = 10  # lines shown of a row that fails


def run_rows(
    cluster: Cluster,
    arguments: Sequence[str],
    rows: int,
    *,
    directory: str,
    environment: Mapping[str, str],
    at_once: int | None,
    say: Report,
) -> bool:
    """Runs all rows of a sweep, and reports each one. Returns whether none has failed.

    Args:
        cluster: where; its bundle is the resources of a row.
        arguments: arguments of `pretrax bench`, without the row.
        at_once: how many run at once; None: as many as there is room for.
    """
    ray, bundle = cluster.ray, cluster.bundle
    others = {name: amount for name, amount in bundle.items() if name not in ('CPU', 'GPU')}
    task = ray.remote(run_row).options(
        num_cpus=bundle.get('CPU', 0), num_gpus=bundle.get('GPU', 0), resources=others, max_retries=_RETRIES
    )
    left, running, failed = list(range(1, rows + 1)), {}, False
    while left or running:
        while left and (at_once is None or len(running) < at_once):
            row = left.pop(0)
            running[task.remote([*arguments, '--row', str(row)], directory, dict(environment))] = row
        (ended,), _ = ray.wait(list(running), num_returns=1)
        row = running.pop(ended)
        try:
            code, lines = ray.get(ended)
        except ray.exceptions.RayError as error:
            code, lines = 1, [f'row {row}: {str(error).strip().splitlines()[-1][:300]}']
        failed = failed or code != 0
        say('\n'.join(line for line in lines if line.startswith('[') or code))
    return not failed


def run_row(arguments: Sequence[str], directory: str, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Runs `pretrax bench` to its end. Returns its exit code and its last lines."""
    done = subprocess.run(
        [sys.executable, '-m', 'pretrax', 'bench', *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
        preexec_fn=end_with_parent,
    )
    return done.returncode, done.stdout.splitlines()[-_TAIL:]


def show_command(arguments: Sequence[str]) -> list[str]:
    """The command that prints the table of all rows."""
    return [sys.executable, '-m', 'pretrax', 'bench', *arguments, '--show']
