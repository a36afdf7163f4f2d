"""What the communication of a real step costs on hardware that is not there, by the schedule of the compiled program.

    JAX_PLATFORMS=cpu python tests/deviceless/schedules.py ['name of a row']

in an environment with the extras `tpu` and `cuda`; a minute a row. docs/scaling.md and docs/parallelism.md quote it.
"""

import json
import sys
from pathlib import Path

from pretrax.config import load
from pretrax.cost.links import places_of
from pretrax.cost.topology import parse_topology
from pretrax.hlo.compiler_options import TABLE
from pretrax.hlo.schedule import read_schedule
from pretrax.plan.step import compile_ahead

CONFIGS = Path(__file__).parents[2] / 'configs' / 'scale'
DEFAULTS = [f'compiler.options.{option.name}=null' for option in TABLE]
ROWS = {  # configuration, hardware, slices or nodes, changes
    '8B on four nodes': ('8b', 'h100x8', 4, ['mesh.r=4', 'mesh.d=8']),
    '8B on v5p': ('8b', 'v5p:8x8x4', 1, ['mesh.d=256', 'batch.tokens=2097152']),
    "8B on v5p, XLA's defaults": ('8b', 'v5p:8x8x4', 1, ['mesh.d=256', 'batch.tokens=2097152', *DEFAULTS]),
    '16B on two v5e-256': ('16b', 'v5e-256', 2, ['mesh.r=2', 'mesh.d=256', 'batch.tokens=4194304']),
}


def found(name: str) -> dict[str, object]:
    """Milliseconds per step, and for each kind of collective and axes: bytes sent, and how many of them behind work."""
    config, hardware, slices, changes = ROWS[name]
    topology = parse_topology(hardware, slices)
    planned = compile_ahead(load(CONFIGS / f'{config}.yaml', changes), topology, lambda text: None)
    assert planned.compiled is not None, planned.needed
    mesh = planned.run.mesh
    schedule = read_schedule(planned.compiled.as_text(), dict(mesh.shape), topology, places_of(mesh.devices.flat))
    times = {name: getattr(schedule, name) * 1e3 for name in ('compute', 'seconds', 'exposed')}
    rows = [
        {'kind': row.kind, 'axes': ' '.join(row.axes), 'form': row.form, 'bytes': row.bytes, 'behind': row.behind,
         'seconds': row.seconds, 'exposed': row.exposed}
        for row in schedule.rows()
    ]  # fmt: skip
    return {'name': name, 'milliseconds': times, 'rows': rows}


if __name__ == '__main__':
    for name in sys.argv[1:] or ROWS:
        print(json.dumps(found(name)), flush=True)
