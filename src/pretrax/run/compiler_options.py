"""The options with which XLA compiles the step: chosen, changed by `compiler.options`, checked before it compiles.

`compiler.options` wins over the choice. XLA_FLAGS and LIBTPU_INIT_ARGS of the user win over the choice too: an option
that they name is left to them. They lose against `compiler.options`, since options of a program win over flags of the
process.

XLA is asked what it knows: a program of one addition, compiled with the options for a device of the run, takes less
than a tenth of a second once the compiler is loaded.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pretrax.config.problems import nearest
from pretrax.errors import UserError, first_line
from pretrax.hlo.compiler_options import (
    TABLE,
    CompilerOption,
    Situation,
    Value,
    by_reason,
    choose_options,
    hardware_of,
    written,
    wrong_hardware,
)
from pretrax.system.software import flags


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """Options for `jax.stages.Lowered.compile`."""

    situation: Situation  # what they were chosen for
    chosen: tuple[CompilerOption, ...]  # rows of the table that are set
    given: Mapping[str, Value]  # those of the configuration
    removed: tuple[str, ...] = ()  # chosen ones that the configuration removes
    left: tuple[str, ...] = ()  # chosen ones that flags of the environment set
    unknown: tuple[str, ...] = ()  # chosen ones that this XLA does not know

    @property
    def values(self) -> dict[str, Value]:
        """{name: value} of everything that is set."""
        return {one.name: one.value for one in self.chosen} | dict(self.given)

    def __str__(self) -> str:
        """One line: '6 set for v5p, d=256; 1 from compiler.options: xla_a=true'; '' if there is nothing to report."""
        given = ', '.join(f'{name}={written(value)}' for name, value in self.given.items())
        parts = [
            f'{len(self.chosen)} set for {self.situation}' if self.chosen else '',
            f'{len(self.given)} from compiler.options: {given}' if given else '',
            f'removed by compiler.options: {", ".join(self.removed)}' if self.removed else '',
            f'left to XLA_FLAGS or LIBTPU_INIT_ARGS: {", ".join(self.left)}' if self.left else '',
            f'unknown to this XLA: {", ".join(self.unknown)}' if self.unknown else '',
        ]
        return '; '.join(part for part in parts if part)

    def lines(self) -> list[str]:
        """A table of what is set, with the reasons."""
        lines = []
        for group in by_reason(self.chosen):
            lines += [f'    {one}' for one in group] + [f'        {group[0].reason}']
        return lines + [f'    {name}={written(value)}, from compiler.options' for name, value in self.given.items()]


def choose_compiler_options(
    given: Mapping[str, Value | None], devices: list[Any], mesh: Mapping[str, int], slices: int
) -> CompilerOptions:
    """The options for the step of a run.

    Args:
        given: `compiler.options` of its configuration; None removes an option.
        devices: those of the run, of this machine or not.
        slices: TPU slices, or nodes.

    Raises:
        UserError: an option of the configuration is unknown, has a wrong value, or is for other hardware.
    """
    situation = Situation(hardware_of(devices[0].platform, devices[0].device_kind), mesh, slices)
    own = next((device for device in devices if device.process_index == jax.process_index()), devices[0])
    values = {name: value for name, value in given.items() if value is not None}
    _check(values, situation.hardware, own)
    rows = choose_options(situation)
    known = {row.name for row in TABLE}
    if strangers := [name for name, value in given.items() if value is None and name not in known]:
        raise UserError(
            f'compiler.options.{strangers[0]} = null removes an option that pretrax never sets'
            f'{nearest(strangers[0], known)}\nleave it out'
        )
    by_flags = set(re.findall(r'--(xla_\w+)', ' '.join(flags().values())))
    removed = tuple(row.name for row in rows if row.name in given and given[row.name] is None)
    rows = [row for row in rows if row.name not in given]
    left = tuple(row.name for row in rows if row.name in by_flags)
    rows = [row for row in rows if row.name not in by_flags]
    unknown = _unknown({row.name: row.value for row in rows}, own)
    rows = [row for row in rows if row.name not in unknown]
    return CompilerOptions(situation, tuple(rows), values, removed, left, unknown)


def _check(given: Mapping[str, Value], hardware: str, device: Any) -> None:
    """Raises UserError if an option of the configuration cannot be used."""
    for name, value in given.items():
        key = f'compiler.options.{name} = {written(value)}'
        if why := wrong_hardware(name, hardware):
            raise UserError(f'{key}: {why}, but this run is for {hardware}\nleave it out')
        if refusal := _refusal({name: value}, device):
            if 'No such' in refusal:
                close = nearest(name, {row.name for row in TABLE if hardware in row.hardware})
                if not close and not re.match('xla_[a-z]', name):
                    close = '; names of options begin with xla_, in lower case and without dashes'
                raise UserError(
                    f'{key}: the installed XLA (JAX {jax.__version__}) has no such option{close}\nleave it out'
                )
            raise UserError(f'{key}: XLA refuses the value: {refusal}\nwrite another value, or leave it out')


def _unknown(options: Mapping[str, Value], device: Any) -> tuple[str, ...]:
    """The options that XLA refuses. They are tried together first: usually it knows them all."""
    if not options or _refusal(options, device) is None:
        return ()
    return tuple(name for name, value in options.items() if _refusal({name: value}, device) is not None)


def _refusal(options: Mapping[str, Value], device: Any) -> str | None:
    """What XLA says against options for a device; None: it accepts them."""
    return _answer(json.dumps(options), device)


@functools.cache
def _answer(options: str, device: Any) -> str | None:
    mesh = Mesh([device], ('d',))
    with jax.set_mesh(mesh):  # that of a run may be set
        shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        program = jax.jit(lambda x: x + 1).lower(shape)
    try:
        program.compile(compiler_options=json.loads(options))
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:  # the last two: JAX reads a few options itself
        if options == '{}':
            raise
        _answer('{}', device)  # raises if XLA cannot compile without them either
        return re.sub(r'^[A-Z_]+: ', '', first_line(error)).strip(' :')
    return None
