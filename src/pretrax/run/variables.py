"""Variables of the environment that others read: JAX, XLA, NCCL, launchers. Each is used, ignored, or refused with the
fix.

`check_variables` looks at them once, at the start of a run, before JAX uses a device. What changes the numbers of a run
is refused, or is a warning of the start-up report. `TABLE` is the table of docs/clusters.md.
"""

import fnmatch
import functools
import os
import re
import select
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from pretrax.config.problems import nearest
from pretrax.errors import UserError
from pretrax.jax_compat import has_started, parse_xla_flags
from pretrax.system.accelerators import gpu_files
from pretrax.tables import read_table

type Variables = Mapping[str, str]

# Flags of XLA that trade exactness for speed, or the other way round.
_INEXACT = re.compile(r'--\w*(fast_m|excess_precision|precision|bf16|f16|f8|tf32|determini|nans|infs|reassoc)\w*')


class Row(NamedTuple):
    """How pretrax handles some variables. `names` are patterns as in a shell, separated by spaces."""

    names: str
    what: str
    is_ignored: bool = False

    def has(self, name: str) -> bool:
        """Whether a variable is one of these."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names.split())


_FILE = read_table(Path(__file__).with_suffix('.yaml'))
TABLE = tuple(Row(**row) for row in _FILE['table'])
# Settings in which the processes of a run must not differ.
SETTINGS = (*_FILE['refused'], *_FILE['changing'])


def check_variables() -> None:
    """Looks at the variables, and at the settings of JAX that a program has made.

    Raises:
        UserError: a run cannot be trained with one of them.
    """
    for setting, (wrong, why) in _FILE['refused'].items():
        value = jax.config.values.get(setting)
        is_wrong = fnmatch.fnmatchcase(str(value), wrong.removeprefix('not ')) != wrong.startswith('not ')
        if value is not None and is_wrong:
            name = setting.upper()
            raise UserError(f'{name} is set to {value}: {why}\nunset {name}')
    _check_gpus(os.environ)
    flags = '' if has_started() else os.environ.get('XLA_FLAGS', '').strip()
    if flags and (problem := _problem_of_flags(flags)):
        raise UserError(problem)


def seen_variables(variables: Variables = os.environ) -> list[tuple[str, str]]:
    """Lines of the start-up report, (topic, text): a warning per variable that changes a run, and what is set."""
    lines = [('WARNING', text) for text in warnings_of(variables)]
    rows = {name: next((row for row in TABLE if row.has(name)), None) for name in sorted(variables)}
    for verb, is_ignored in (('used', False), ('ignored', True)):
        names = [name for name, row in rows.items() if row is not None and row.is_ignored is is_ignored]
        if names:
            lines.append(('environment', f'{verb}: {", ".join(names)}'))
    return lines


def warnings_of(variables: Variables) -> list[str]:
    """Warnings for a run: variables that change its numbers or its end, and variables of JAX that JAX ignores."""
    settings = jax.config.values
    known = {name.upper() for name in settings if name.startswith('jax_')} | set(_FILE['more'])
    found = [
        f'{name.upper()}={settings[name]}: {what}'
        for name, what in _FILE['changing'].items()
        if name in settings and settings[name] not in (None, False) and name.upper() in variables
    ]
    found += [
        f'{name}: JAX {jax.__version__} has no such setting, and ignores it{nearest(name, known)}'
        for name in sorted(variables)
        if name.startswith('JAX_') and name not in known
    ]
    for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS'):
        if flags := [flag for flag in variables.get(name, '').split() if _INEXACT.match(flag)]:
            found.append(f'{name}={" ".join(flags)[:200]}: the numbers of the run differ from those without it')
    if variables.get('CUDA_VISIBLE_DEVICES', '0').strip() in ('', '-1') and gpu_files():
        found.append('CUDA_VISIBLE_DEVICES hides all GPUs: the run uses the CPU')
    return found


# Launchers that pretrax cannot join: what counts processes, numbers them, and has the host of the first, if anything
# does.
_OTHERS = {
    'MPICH or Intel MPI': ('PMI_SIZE', 'PMI_RANK', None),
    'torchrun or a like launcher': ('WORLD_SIZE', 'RANK', 'MASTER_ADDR'),
}


def check_other_launchers(count: int = 1, variables: Variables = os.environ) -> None:
    """Raises UserError if another launcher has started several processes, and those that were found are fewer."""
    for program, (size, rank, host) in _OTHERS.items():
        if rank in variables and variables.get(size, '1') not in ('1', str(count)):
            first = f'${host}' if host and host in variables else 'HOST'
            raise UserError(
                f'{size}={variables[size]}: {program} has started several processes, and pretrax does not read its '
                'variables\n'
                f'in each process set JAX_NUM_PROCESSES=${size} JAX_PROCESS_ID=${rank} '
                f'JAX_COORDINATOR_ADDRESS={first}:8476, '
                'or use mpirun of Open MPI, srun or pretrax launch'
            )


def _check_gpus(variables: Variables) -> None:
    """Raises UserError if CUDA_VISIBLE_DEVICES names an absent GPU: CUDA would hide it and all that follow."""
    text, count = variables.get('CUDA_VISIBLE_DEVICES', '').strip(), len(gpu_files())
    if not count or text in ('', '-1'):
        return
    for name in map(str.strip, text.split(',')):
        if not (name.startswith(('GPU-', 'MIG-')) or (name.isdecimal() and int(name) < count)):
            raise UserError(
                f'CUDA_VISIBLE_DEVICES={text}: {name!r} is not a GPU of this machine, '
                f'which has the numbers 0 to {count - 1}\n'
                'CUDA would hide it and those that follow; name others, or unset CUDA_VISIBLE_DEVICES'
            )


@functools.cache
def _problem_of_flags(flags: str) -> str:
    """What is wrong with XLA_FLAGS, with the fix; '' if XLA accepts them. XLA itself would end the process."""
    said = _said_by_child(flags)
    if unknown := re.search(r'Unknown flags? in XLA_FLAGS: (.*)', said):
        names = [flag.partition('=')[0] for flag in unknown[1].split()]
        known = re.findall(r'^\t--(\w+)=', _said_by_child('--help'), re.MULTILINE)
        of_tpus = all(name.startswith('--xla_tpu') for name in names)
        near = nearest(names[0].removeprefix('--'), known, '; did you mean --')
        return f'XLA_FLAGS: the installed XLA (JAX {jax.__version__}) does not know {", ".join(names)}{near}\n' + (
            'flags of TPUs belong in LIBTPU_INIT_ARGS' if of_tpus else 'leave it out'
        )
    if wrong := re.search(r"Couldn't interpret value (.*) for flag (\w+)", said):
        return (
            f'XLA_FLAGS: --{wrong[2]}={wrong[1]}: XLA does not accept this value\nwrite another value, or leave it out'
        )
    if file := re.search(r'Could not open file "([^"]*)"', said):
        return f'XLA_FLAGS: {file[1]} is neither a flag, which begins with --, nor a file with flags\nwrite --{file[1]}'
    return ''


def _said_by_child(flags: str) -> str:
    """What XLA says when a child of this process reads these flags, at most 100 kB; a wrong one ends a process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the child calls nothing that waits for a thread of this process
        child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.environ['XLA_FLAGS'] = flags
        parse_xla_flags()
        os._exit(0)
    os.close(writing)
    with open(reading, 'rb') as said:
        ready, _, _ = select.select([said], [], [], 30)
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = said.read(100_000)
    os.waitpid(child, 0)
    return text.decode(errors='replace')
