"""Predict the memory and speed of a training step.

Nothing is compiled. The plan also lists the layouts that would be faster.
"""

from pretrax.cli._arguments import ConfigFile, HardwareOption, Overrides, SlicesOption
from pretrax.errors import UserError
from pretrax.option import option


def plan(
    config: ConfigFile,
    overrides: Overrides = (),
    topology: HardwareOption = None,
    slices: SlicesOption = None,
    verify: bool = option('Compile the fastest layouts, and compare their memory with the plan.', default=False),
) -> None:
    from pretrax.config import load
    from pretrax.cost.topology import parse_topology

    loaded = load(config, overrides)
    if topology is None:
        raise UserError('plan needs --topology, such as --topology v5e-256 or --topology h200')
    hardware = parse_topology(topology, slices or 1)
    import jax

    jax.config.update('jax_platforms', 'cpu')  # a plugin must not look for a TPU or GPU that is not here
    from pretrax.plan.auto import settled
    from pretrax.plan.compiled_facts import CompiledFacts
    from pretrax.plan.plan import make_plan, report, verified

    loaded = settled(loaded, print, hardware)
    compiled = CompiledFacts(loaded, hardware, print)
    found = make_plan(loaded, hardware, print, compiled)
    print('\n'.join(report(found)))
    if verify:
        print()
        for line in verified(loaded, hardware, found, compiled):
            print(line, flush=True)
