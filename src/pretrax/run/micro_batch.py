"""Measures `batch.micro: auto`: runs the real step with larger and larger micro-batches.

Starts with one sequence per micro-batch and at least doubles it, always with the same batch, until tokens/s grows by
less than `MIN_SPEEDUP` or the compiler reports that the next size does not fit. The result is kept in
`~/.cache/pretrax/micro.json` (or in `XDG_CACHE_HOME`), one entry per device, versions and configuration. Delete the
file to measure again.
"""

import hashlib
import json
import pathlib
import time
from typing import Any

import jax

from pretrax.amounts import size
from pretrax.config import RunConfig, settle, values_in_step
from pretrax.config.batch import common_sequences, micro_batch_sizes, sequence_shards
from pretrax.cost.memory import memory_of
from pretrax.errors import Report, UserError
from pretrax.run.compiled_step import lower_step
from pretrax.run.devices import device_memory
from pretrax.run.setup import Run, prepare
from pretrax.system.cache import cache_directory, read_entries, write_entries
from pretrax.system.cores import available_memory, cpu_name, usable_cores
from pretrax.system.software import flags, versions
from pretrax.train.state import init_state

MIN_SPEEDUP = 1.02  # of a larger micro-batch
STEPS = 3  # timed steps per size, after one that is not timed; the fastest counts


def measured_micro(config: RunConfig, report: Report, cache: pathlib.Path | None = None) -> tuple[int, str]:
    """The fastest number of sequences per device and micro-batch, and the reason.

    Args:
        config: the run; every axis of its mesh is a number.
        cache: directory of `micro.json`; None: the user's cache.

    Raises:
        UserError: not even one sequence fits.
    """
    path = (cache or cache_directory()) / 'micro.json'
    smallest = prepare(settle(config, micro=None, origin=''), lambda text: None)
    key = _key(smallest)
    entries = read_entries(path)
    kept = entries.get(key)
    if isinstance(kept, dict) and isinstance(kept.get('micro'), int) and isinstance(kept.get('why'), str):
        return kept['micro'], f'{kept["why"]}; measured earlier, kept in {path}'
    speeds: dict[int, float] = {}
    ended = 'the largest is all sequences at once'
    for micro in _sizes(smallest):
        report(f'batch.micro: trying {micro}')
        speed = _speed(settle(config, micro=micro, origin=''))
        if isinstance(speed, str):
            ended = f'{micro} {speed}'
            break
        before = max(speeds.values(), default=0.0)
        speeds[micro] = speed
        if speed < MIN_SPEEDUP * before:
            ended = f'{micro} is not faster'
            break
    if not speeds:
        raise UserError(f'batch.micro: {ended}\nuse model.save=none, more devices, or a smaller batch.sequence_length')
    best = max(speeds, key=lambda micro: speeds[micro])
    by_size = ', '.join(f'{micro}: {speed:,.0f}' for micro, speed in speeds.items())
    why = f'measured, tokens/s by micro-batch {by_size}; {ended}'
    return best, f'{why}; {write_entries(path, entries | {key: {"micro": best, "why": why}})}'


def _sizes(run: Run) -> list[int]:
    """The micro-batch sizes to try, each at least twice the one before. They suit batches of every size."""
    sizes: list[int] = []
    per_device = common_sequences(run.sizes) // sequence_shards(run.mesh.shape)
    for n in micro_batch_sizes(per_device, run.mesh.shape['p']):
        if not sizes or n >= 2 * sizes[-1]:
            sizes.append(n)
    return sizes


def _speed(config: RunConfig) -> float | str:
    """Tokens/s of the real step, or the reason why it cannot run."""
    run = prepare(config, lambda text: None)
    limit = _limit(run)
    with jax.set_mesh(run.mesh):
        try:
            step = lower_step(run).compile(compiler_options=run.compiler_options.values)
            needed = memory_of(step)
            if limit is not None and needed > limit:
                return f'does not fit: {size(needed)} of {size(limit)}'
            state, batch = (
                init_state(run.recipe, config.seed)._replace(constants=run.constants(lambda text: None)),
                run.batch(run.first_batch),
            )
            seconds = []
            for _ in range(1 + STEPS):
                began = time.perf_counter()
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
                seconds.append(time.perf_counter() - began)
        except jax.errors.JaxRuntimeError as error:
            if 'RESOURCE_EXHAUSTED' not in str(error) and 'memory' not in str(error):
                raise
            return f'does not fit: {str(error).splitlines()[0][:120]}'
    return run.size.tokens / min(seconds[1:])


def _limit(run: Run) -> int | None:
    """Memory for a program on one device, in bytes. Simulated devices share the free memory of the machine."""
    device = run.mesh.devices.flat[0]
    if device.platform != 'cpu':
        return device_memory(device)
    return available_memory() // run.mesh.size


def _key(run: Run) -> str:
    """Everything that the result depends on: devices, versions, flags, and the keys that affect the step."""
    device = run.mesh.devices.flat[0]
    facts: dict[str, Any] = {
        'config': values_in_step(run.config),
        'mesh': dict(run.mesh.shape),
        'versions': versions(),
        'flags': flags(),
        'compiler_options': run.compiler_options.values,
        'cores': usable_cores(),
        'vocabulary': run.source.vocab_size,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    kind = cpu_name() if device.platform == 'cpu' else device.device_kind
    return f'{run.mesh.size} x {kind} | jax {jax.__version__} | {digest}'
