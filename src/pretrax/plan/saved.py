"""A compiled step as a file: written by `pretrax compile --save FILE`, run by `pretrax train --compiled FILE`.

The file is a ZIP of `manifest.json` and `executable`, which JAX serializes. Loading an executable means running a
program, so its author matters:

- nobody but the user who loads it and root may have written or may replace the file (`system/trusted.py`). An object
  in a bucket has no owner, and is not loaded;
- the manifest must name this hardware, these versions and flags, and the program that this run would compile. Its
  digest is compared with that of the traced step before the executable is read;
- JAX's serialization is a pickle. It is read by an unpickler that accepts only the classes of an executable, so that
  the file cannot call anything else.

Someone who can write files as you can still make such a file compute something else. Do not load files from people whom
you do not trust.
"""

import hashlib
import io
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, Literal

import jax
import pydantic
from jax.experimental import serialize_executable

from pretrax.config import RunConfig, diff, effect_of, from_manifest, written_values
from pretrax.errors import UserError, first_line, system_errors
from pretrax.jax_compat import EXECUTABLE_CLASSES, ExecutableUnpickler, can_be_loaded
from pretrax.plan.step import PlannedStep
from pretrax.run.setup import Run
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.storage.locate import write_whole
from pretrax.system.software import flags, versions
from pretrax.system.trusted import why_untrusted

_LARGEST = 4 << 30


class Manifest(pydantic.BaseModel):
    """Description of a compiled step."""

    model_config = pydantic.ConfigDict(extra='forbid')

    format: Literal['pretrax-compiled-step']
    version: Literal[1]
    platform: str
    device_kind: str
    mesh: dict[str, int]
    processes: int
    versions: dict[str, str]
    flags: dict[str, str]
    compiler_options: dict[str, bool | int | float | str] = {}  # options of XLA that were set for this program, by name
    batch: tuple[int, int]  # sequences, tokens per sequence
    arrays: dict[str, str]  # dtype[shape] of the state and the batch, by name
    config: dict[str, Any]
    program: str  # SHA-256 of the lowered step
    executable: str  # SHA-256 of the executable


def check_one_size(config: RunConfig, option: str) -> None:
    """Raises UserError if the batches of a run grow: a file has the step for batches of one size."""
    if len(config.batch.sizes) > 1:
        raise UserError(
            f'{option}: the batches of this run grow at step {list(config.batch.sizes)[1]}, and a file has the step '
            'for one size\n'
            f'leave {option.split()[0]} out: the program cache keeps the step of each size; or give batch.tokens and '
            'batch.sequence_length as plain numbers'
        )


def save(planned: PlannedStep, path: AnyPath) -> int:
    """Writes a compiled step, whole or not at all. Returns the size of the file in bytes.

    Raises:
        UserError: the step does not fit, so it was not compiled; XLA cannot store it, or load it again; or the file
            cannot be written.
    """
    if planned.compiled is None:
        raise UserError(f'--save {path}: the step does not fit, so there is nothing to save')
    _check_loadable(planned.run, f'--save {path}')
    try:
        executable, _, _ = serialize_executable.serialize(planned.compiled)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f'--save {path}: XLA cannot store this program: {first_line(error)}\n'
            'leave out --save, or options in compiler.options that choose another library for products'
        ) from error
    manifest = _manifest(planned.run, planned.lowered, executable)
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr('manifest.json', manifest.model_dump_json(indent=1))
        archive.writestr('executable', executable)
    with system_errors(f'--save {path}: cannot be written'):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
        if isinstance(path, pathlib.Path):  # a umask may let a group write to it
            path.chmod(path.stat().st_mode & ~0o022)
    return len(content.getvalue())


def opened(path: str | AnyPath, config: RunConfig) -> Callable[[Run, Any], Any]:
    """Opens a compiled step. Returns a function that loads it, given the prepared run and the lowered step.

    Raises:
        UserError: the file is damaged, or the configuration differs. The returned function raises it if the hardware,
            the versions, the flags or the program differ.
    """
    path = locate(path) if isinstance(path, str) else path
    if isinstance(path, BucketPath):
        raise UserError(
            f'--compiled {path}: it is in a bucket, and loading it would run the program of whoever can write there\n'
            'if you trust them, copy the file to this machine'
        )
    check_one_size(config, f'--compiled {path}')
    manifest, executable = _read(path)
    changes = diff(from_manifest(manifest.config), config)
    baked = [(key, old, new) for key, old, new in changes if effect_of(key).on == 'step']
    if baked:
        shown = [f'    {key}: {old} -> {new}' for key, old, new in baked[:5]]
        raise _differs(path, 'the step was compiled for another configuration', *shown)
    return lambda run, lowered: _load(path, manifest, executable, run, lowered)


def _check_loadable(run: Run, option: str) -> None:
    if not can_be_loaded(list(run.mesh.devices.flat)):
        raise UserError(
            f'{option}: a step for several CPU devices hangs when it is loaded: XLA loses the order of collectives\n'
            f'leave {option.split()[0]} out: on CPUs, each run of several devices compiles its step'
        )


def _manifest(run: Run, lowered: Any, executable: bytes) -> Manifest:
    device = run.mesh.devices.flat[0]
    return Manifest(
        format='pretrax-compiled-step',
        version=1,
        platform=device.platform,
        device_kind=device.device_kind,
        mesh=dict(run.mesh.shape),
        processes=len({d.process_index for d in run.mesh.devices.flat}),
        versions=versions(),
        flags=flags(),
        compiler_options=run.compiler_options.values,
        batch=(run.rows, run.size.sequence_length),
        arrays={
            jax.tree_util.keystr(place, simple=True, separator='.'): f'{x.dtype}{list(x.shape)}'
            for place, x in jax.tree_util.tree_leaves_with_path(lowered.in_avals[0])
        },
        config=written_values(run.config),
        program=hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        executable=hashlib.sha256(executable).hexdigest(),
    )


def _read(path: pathlib.Path) -> tuple[Manifest, bytes]:
    """The manifest and the executable of an undamaged file of a trusted owner."""
    with system_errors(f'--compiled {path}: cannot be read'):
        why = why_untrusted(path)
    if why:
        raise UserError(
            f'--compiled {path}: {why}, and loading the file would run their program\n'
            'if you trust them, copy the file to a directory to which only you can write'
        )
    if not path.is_file():
        raise UserError(f'--compiled {path}: it is not a file')
    try:
        with zipfile.ZipFile(path) as archive:
            if sorted(archive.namelist()) != ['executable', 'manifest.json'] or any(
                i.file_size > _LARGEST for i in archive.infolist()
            ):
                raise ValueError('it has other members')
            manifest = Manifest.model_validate_json(archive.read('manifest.json'))
            executable = archive.read('executable')
    except OSError as error:
        raise UserError(f'--compiled {path}: cannot be read: {error.strerror}') from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        what = first_line(error)[:200] or type(error).__name__
        raise UserError(f'--compiled {path}: it is not a compiled step of pretrax, or it is damaged\n{what}') from error
    if hashlib.sha256(executable).hexdigest() != manifest.executable:
        raise UserError(f'--compiled {path}: it is damaged: the executable differs from its digest in the manifest')
    return manifest, executable


def _load(path: pathlib.Path, manifest: Manifest, executable: bytes, run: Run, lowered: Any) -> Any:
    """The step, if the manifest agrees with this run and machine."""
    _check_loadable(run, f'--compiled {path}')
    here = _manifest(run, lowered, b'')
    for what, there, now in (
        ('for other hardware', manifest.device_kind, here.device_kind),
        ('for another mesh', manifest.mesh, here.mesh),
        ('for another number of processes', manifest.processes, here.processes),
        ('by other versions', manifest.versions, here.versions),
        ('with other flags', manifest.flags, here.flags),
        ('with other options of XLA', manifest.compiler_options, here.compiler_options),
        ('for other batches', manifest.batch, here.batch),
        ('for other arrays', manifest.arrays, here.arrays),
        ('from another program, since pretrax or a plugin has changed,', manifest.program, here.program),
    ):
        if there != now:
            raise _differs(path, f'the step was compiled {what}', *_both(there, now))
    try:
        unloaded, _, no_kwargs = _Unpickler(
            executable, run.mesh.devices.flat[0].client, list(run.mesh.devices.flat)
        ).load()
        # Trees and arguments come from the lowered step, whose program is the same.
        return jax.stages.Compiled(unloaded.load(), [], lowered.args_info, lowered.out_tree, no_kwargs=no_kwargs)
    except Exception as error:  # a malformed pickle can raise anything
        what = first_line(error) or type(error).__name__
        raise UserError(f'--compiled {path}: the executable cannot be loaded on this machine\n{what[:300]}') from error


def _both(there: Any, now: Any) -> list[str]:
    """The first differences of two values."""
    if isinstance(there, dict) and isinstance(now, dict):
        differ = [key for key in sorted({*there, *now}) if there.get(key) != now.get(key)]
        return [
            f'    {key}: {there.get(key, "none")} in the file, {now.get(key, "none")} in this run' for key in differ[:4]
        ]
    return [f'    {there} in the file, {now} in this run']


def _differs(path: pathlib.Path, what: str, *lines: str) -> UserError:
    return UserError(
        '\n'.join(
            [
                f'--compiled {path}: {what}',
                *lines,
                'compile it again for this run: pretrax compile CONFIG --save FILE, or leave --compiled out',
            ]
        )
    )


class _Unpickler(ExecutableUnpickler):
    """JAX's unpickler, restricted to the classes of an executable."""

    def __init__(self, content: bytes, client: Any, devices: list[Any]):
        super().__init__(io.BytesIO(content), client, devices)

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in EXECUTABLE_CLASSES:
            raise pickle.UnpicklingError(f'it names {module}.{name}, which is not part of an executable')
        return super().find_class(module, name)
