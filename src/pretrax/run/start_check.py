"""Would this run start? Checks what can be known without its data, before a run directory is made or text is read.

`train`, `train --dry-run` and the engines of `launch` call `check_start`, each for the devices that the run would have.
"""

import os
import pathlib
import tempfile
import uuid
from typing import Any

import jax

from pretrax.config import RunConfig, feature, plugin_factory
from pretrax.config.registry import DEFAULTS
from pretrax.config.schema import Distill, Faults, Log
from pretrax.data.batches.source import DataRequest, Source
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.data.options import PREFIX, STDLIB, TextOptions, keys_of_text
from pretrax.data.text import check_text
from pretrax.data.tokenizers.tokenizer_files import BYTES
from pretrax.errors import Report, UserError, disk_fix
from pretrax.observe.trackers import check_credentials, check_trackers
from pretrax.run.contracts import check_run
from pretrax.run.processes import is_first_process
from pretrax.run.resume import being_trained, check_init_from, check_unchanged, lock_patience
from pretrax.run.same_run import check_same_run
from pretrax.run.setup import check_setup, open_source, prepare
from pretrax.run.watch import stacks_on_timer
from pretrax.storage import AnyPath, BucketPath, lease, locate
from pretrax.storage.locate import working_directory
from pretrax.storage.parts import parts_of
from pretrax.system.locks import holder_of
from pretrax.system.target import Target


def check_start(config: RunConfig, report: Report, allow_changes: bool = False, target: Target | None = None) -> None:
    """Checks a run as far as seconds suffice, the cheapest first: directory, trackers, files, model, components.

    Args:
        target: the machines that the run is meant for; None: this one, with the processes that have joined.

    Raises:
        UserError: the run would not start.
    """
    run_dir, trackers, data = config.run_dir, config.log.trackers(), config.data
    options: Any = data.options
    is_here = target is None or target.has_these_files
    if target is None:
        check_same_run(config)
        if is_first_process():
            if not lock_patience() and (holder := holder_of(working_directory(run_dir))) is not None:
                raise being_trained(run_dir, holder)
            if isinstance(run_dir, BucketPath) and (holder := lease.holder_of(run_dir / lease.FILE)):
                report(f'WARNING: {holder}, or was until it was lost: `train` waits to find out')
    if is_here:
        _check_writable(run_dir, config.log, config.faults)
        if is_first_process():
            check_trackers(trackers)
    elif target is not None and target.variables is not None:
        check_credentials(trackers, target.variables)
    absent = {} if is_here else _absent_files(config.start, config.distill, options)
    if absent:
        named = ', '.join(f'{key}={name}' for key, names in absent.items() for name in names)
        report(f'WARNING: {named}: not here, so not checked; the machines of the run need it')
    try:
        vocab_size = check_text(options) if data.name == DEFAULTS['data'] and 'data' not in absent else None
    except UserError as error:
        prepared = sorted((working_directory(run_dir) / 'data').glob('tokens-*'))
        if not prepared or not isinstance(options, TextOptions):
            raise
        nulls = ' '.join(f'data.{key}=null' for key in dict.fromkeys(['text', *keys_of_text(options)]))
        fix = f'data.tokens={prepared[-1]} {nulls} --allow-changes'
        raise UserError(f'{error}\nthis run has the tokens of its text; to continue with them: {fix}') from error
    try:
        if 'init_from' not in absent:
            check_init_from(run_dir, config.model.name, config.start)
        if config.distill is not None and 'distill' not in absent:
            feature('distill')(config.distill).check_exists()
        check_unchanged(config, allow_changes, lambda text: None)
    except OSError as error:  # a bucket that only the machines of the run reach
        if is_here:
            raise
        report(f'WARNING: {error.filename or run_dir}: not checked here: {error.strerror or error}')
    if target is None or target.count:
        check_setup(config, target, vocab_size)
        _check_components(config, target is None, vocab_size)


def _absent_files(start: str | None, distill: Distill | None, data: Any) -> dict[str, list[str]]:
    """{section: the files and directories that it names and this machine lacks}, of sections that lack any.

    Other machines may reach buckets and the hub that this one does not.
    """
    named: dict[str, list[Any]] = {'init_from': [start], 'distill': [], 'data': []}
    named['distill'] = [getattr(distill, key, None) for key in ('teacher', 'cache')]
    for options in getattr(data, 'mixture', None) or [data]:
        named['data'] += [getattr(options, key, None) for key in ('tokenizer', 'tokens', 'validation_tokens')]
        named['data'] += [getattr(options, 'chat_template', None), *getattr(options, 'specs', ())]
    absent = {section: [name for name in names if name and not _is_here(name)] for section, names in named.items()}
    return {section: names for section, names in absent.items() if names}


def _is_here(name: str) -> bool:
    if name in (STDLIB, BYTES):
        return True
    return '://' not in name and locate(name.removeprefix(PREFIX).partition('*')[0] or '.').exists()


def _check_components(config: RunConfig, is_here: bool, vocab_size: int | None) -> None:
    """Checks the results of a user's components, on simulated devices if the run is meant for other machines.

    A user's data are opened only for other machines: here they are checked when the run opens them.
    """
    is_own_data = config.data.name != DEFAULTS['data']
    own = [kind for kind in DEFAULTS if plugin_factory(kind, getattr(config, kind).name)]
    if not own or (is_own_data and is_here) or (not is_own_data and vocab_size is None):
        return
    with tempfile.TemporaryDirectory(prefix='pretrax-check-') as scratch:
        log = config.log.model_copy(update={'peak_tflops': 1.0})  # the peak of this machine is not measured for it
        config = config.model_copy(update={'run_dir': pathlib.Path(scratch), 'log': log})
        if vocab_size is None:
            source: Source = open_source(config, lambda text: None)
        else:
            length = config.batch.largest.sequence_length
            request = DataRequest(config.seed, length, pathlib.Path(scratch), lambda text: None, config.steps)
            source = SyntheticSource(request, vocab_size, length + 1)
        check_run(prepare(config, lambda text: None, jax.devices(), source))


def _check_writable(run_dir: AnyPath, log: Log, faults: Faults) -> None:
    """Raises UserError if a file of the run cannot be written."""
    if isinstance(run_dir, BucketPath) and is_first_process():
        probe = run_dir / f'.probe-{uuid.uuid4().hex}'
        try:
            probe.write_bytes(b'probe')
            probe.unlink()
        except OSError as error:
            raise UserError(f'run_dir: {run_dir} cannot be used: {error.strerror} ({error.filename})') from error
    run_dir = working_directory(run_dir)
    trackers = {'tb': log.tensorboard, 'wandb': log.wandb, 'profile': log.profile}
    for name in ('', 'stacks', 'checkpoints', *(name for name, is_on in trackers.items() if is_on)):
        check_directory(run_dir, run_dir / name)
    with stacks_on_timer(faults.stack_trace_to):
        pass  # they can be written
    for name in ('lock', 'config.yaml', 'startup.txt', 'metrics.jsonl', 'attempts.jsonl', 'stacks/process-0.txt'):
        path = run_dir / name
        if path.is_dir() and not parts_of(path):
            raise _unusable(run_dir, path, 'is a directory')
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise _unusable(run_dir, path, 'is not writable', 'change its permissions, or use another directory')


def check_directory(run_dir: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """The nearest existing parent of a directory. Raises UserError if no file can be created there."""
    parent = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise _unusable(run_dir, parent, 'is a file')
    try:
        tempfile.TemporaryFile(dir=parent).close()  # permissions do not suffice: the disk may be read-only or full
    except OSError as error:
        raise _unusable(run_dir, parent, f'is not writable: {error.strerror}', disk_fix(error)) from error
    return parent


def _unusable(run_dir: pathlib.Path, path: pathlib.Path, problem: str, fix: str = 'use another directory') -> UserError:
    return UserError(f'run_dir: {run_dir} cannot be used: {path} {problem}\n{fix}: run_dir=PATH')
