"""Checks that a run would start on the machines of an engine, in a process of its own: `launch` imports no JAX."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from pretrax.errors import Report, UserError
from pretrax.system.children import run_tool
from pretrax.system.target import Target

_SECONDS = 60.0  # for the check; without an answer the run is launched, with a warning


def check_start(words: Sequence[str], target: Target, allow_changes: bool, say: Report) -> None:
    """Runs `pretrax.doctor.start_check` for the devices of other machines, simulated on this one.

    Args:
        words: the file of the configuration, and changes to it.
        say: receives warnings.

    Raises:
        UserError: the run would not start.
    """
    count, there = str(max(target.count, 1)), json.dumps(dataclasses.asdict(target))
    kept = {name: text for name, text in os.environ.items() if name != 'XLA_FLAGS'}
    command = [sys.executable, '-m', 'pretrax.doctor.start_check', there, json.dumps(allow_changes), *words]
    variables = kept | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': count}
    done = run_tool(command, _SECONDS, environment=variables)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        why = next(reversed(done.stderr.strip().splitlines()), f'exit code {done.returncode}')
        say(f'WARNING: launch: whether the run would start was not checked: {why[:200]}')
        return
    for line in answer['warnings']:
        say(line)
    if (problem := answer['problem']) is not None:
        raise UserError(f'{problem}\nthe run would not start; to launch it without this check: --unchecked')
