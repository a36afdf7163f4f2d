"""Training and trained models for Python code: what `pretrax train`, `pretrax generate` and `pretrax eval` do.

A mistake is a `UserError`, with the message of the command line. A notebook shows the message only.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrax.config import RunConfig, from_values, load_plugin
from pretrax.config import load as load_config
from pretrax.cost.topology import topology_of
from pretrax.errors import Report, UserError
from pretrax.observe.progress import Progress
from pretrax.plan.auto import settled
from pretrax.run import setup
from pretrax.run.loop import train
from pretrax.run.result import OnStep, Result
from pretrax.run.setup import Run
from pretrax.weights.loaded import LoadedModel, check_dtype


def pretrain(
    config: RunConfig | Mapping[str, Any] | str | os.PathLike[str],
    overrides: Iterable[str] = (),
    *,
    on_step: OnStep | None = None,
    allow_changes: bool = False,
    verbose: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Trains a run, or resumes it from its newest checkpoint, as `pretrax train` does.

    A run that is finished gives its results again. An interrupt (Ctrl-C, or the stop button of a notebook) ends the
    training after its step and saves the state; the same call continues it. The first interrupt while the step is
    compiled, and a second one, raise KeyboardInterrupt and leave the newest checkpoint as it is.

    Args:
        config: what `load_config` returned; a file or the name of a packaged configuration; or the values themselves.
        overrides: `key=value` strings that change a file or values.
        on_step: is called after each step with its number, from 1, and its metrics: those of `metrics.jsonl`, without
            the speed and other means over several steps. The device computes the next step meanwhile, so a call that
            is shorter than a step costs nothing but reading the metrics. An exception in it ends the training, and
            the run continues from its newest checkpoint.
        allow_changes: resume although the configuration or the data has changed since the run began.
        verbose: show the whole start-up report, not only its essential lines.
        progress: where reports are shown; None: on standard output.

    Raises:
        UserError: the configuration is not valid, or does not fit the data, the devices or the existing run; another
            process trains the run; none of its checkpoints is readable; or too many steps in a row were skipped.
    """
    progress = progress or Progress()
    config = settled(_config(config, overrides), progress.message)
    return train(config, allow_changes=allow_changes, verbose=verbose, progress=progress, on_step=on_step)


def prepare(config: RunConfig, report: Report = print, devices: Sequence[Any] | None = None) -> Run:
    """Prepares a run without training it, and its data if it is not prepared yet, which may take a while.

    As in `pretrain`, numbers replace `auto` in the configuration. For devices that are not in this machine they are
    planned, if the plan knows the devices.

    Args:
        report: receives the lines of the start-up report.
        devices: devices to compile for that are not in this machine; None: the devices of this machine.

    Raises:
        UserError: the configuration does not fit the data, the model or the devices.
    """
    topology = None if devices is None else topology_of(devices)
    if devices is None or topology is not None:
        config = settled(config, report, topology)
    return setup.prepare(config, report, devices)


def _config(given: Any, overrides: Iterable[str]) -> RunConfig:
    if isinstance(given, RunConfig):
        if overrides:
            raise UserError('overrides change a file or values, not a loaded configuration\ngive them to load_config')
        return given
    if isinstance(given, Mapping):
        return from_values(given, overrides)
    return load_config(
        _path(given, 'config', 'a file, the values of a configuration, or what load_config returned'), overrides
    )


def load(
    run: str | os.PathLike[str] | Result,
    *,
    dtype: str | None = None,
    mesh: Mapping[str, int] | None = None,
    plugins: Sequence[str] = (),
) -> LoadedModel:
    """Opens a trained model on the devices of this machine.

    Args:
        run: what `pretrain` returned; a run (its name below `runs/`, its directory, also in a bucket) or one of its
            checkpoints; or a Hugging Face checkpoint, such as the output of `pretrax export` or hf:ORG/NAME.
        dtype: of activations and matrix products: f32, bf16 or fp16; None: that of the run, but f32 on CPUs.
        mesh: sizes of mesh axes, such as {'t': 2}; None: all devices shard the weights, but on CPUs each has all.
        plugins: Python files with the components of the model, unless they are imported.

    Raises:
        UserError: there is no such model, or its data or tokenizer is gone.
    """
    check_dtype(dtype, 'dtype')
    for plugin in plugins:
        load_plugin(plugin, Path())
    place = str(run.run.run_dir) if isinstance(run, Result) else run
    return LoadedModel(_path(place, 'run', 'a run, a checkpoint, or what pretrain returned'), None, dtype, mesh)


def _path(given: Any, name: str, expected: str) -> str:
    try:
        return os.fspath(given)
    except TypeError:
        raise UserError(f'{name} is {given!r}'[:100] + f'; expected {expected}') from None
