"""Predict the memory and speed of a training step.

Nothing is compiled. The plan also lists the layouts that would be faster. With --budget, it chooses the sizes of the
model, the number of tokens and the layout for an amount of FLOPs, chip-hours or days, and prints the time and cost.
"""

import dataclasses

from pretrax.cli._arguments import Configuration, HardwareOption, SlicesOption
from pretrax.errors import UserError
from pretrax.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked(Configuration):
    """The arguments of `pretrax plan`."""

    topology: HardwareOption = None
    slices: SlicesOption = None
    verify: bool = option('Compile the fastest layouts, and compare their memory with the plan.', default=False)
    budget: str | None = option("'5000 h100-hours', '1e21 flops' or '30 days', for all chips.", metavar='AMOUNT')
    price: float | None = option('With --budget: the price of a chip-hour.', min=0)
    mttf: float | None = option('Predict the goodput with these hours between failures.', min=0.01)
    write_speed: float = option('GB/s at which a machine writes checkpoints.', default=1.26, min=0.001)
    island_bandwidth: float | None = option('GB/s between an island and the bucket: predict the rounds.', min=1e-6)
    law: str | None = option('With --budget: a fit.json of `pretrax scaling`. [default: published]', metavar='FILE')


def plan(asked: Asked) -> None:
    from pretrax.cost.memory import shards_on_hosts
    from pretrax.cost.topology import parse_topology

    loaded = asked.load()
    if asked.topology is None:
        raise UserError('plan needs --topology, such as --topology v5e-256 or --topology h200')
    if asked.budget is None and {asked.price, asked.law} != {None}:
        raise UserError('--price and --law need --budget, such as --budget "30 days"')
    if asked.budget is not None and asked.verify:
        raise UserError('plan the configuration that --budget prints, and use --verify without --budget')
    hardware = parse_topology(asked.topology, asked.slices or 1)
    import jax

    jax.config.update('jax_platforms', 'cpu')  # a plugin must not look for a TPU or GPU that is not here
    from pretrax.plan.auto import settled
    from pretrax.plan.compiled_facts import CompiledFacts
    from pretrax.plan.plan import make_plan, report, verified

    between = None if asked.mttf is None else 3600 * asked.mttf
    if asked.budget is not None:
        from pretrax.cost.scaling_laws import PUBLISHED
        from pretrax.plan.budget import buy, lines_of, parse_budget, read_law

        law = PUBLISHED if asked.law is None else read_law(asked.law)
        bought = buy(loaded, hardware, parse_budget(asked.budget, hardware), law, between, 1e9 * asked.write_speed)
        print('\n'.join(lines_of(bought, hardware, law, asked.price)))
        return
    loaded = settled(loaded, print, hardware)
    compiled = CompiledFacts(loaded, hardware, print)
    found = make_plan(loaded, hardware, print, compiled)
    print('\n'.join(report(found)))
    best = found.now or (found.found[0] if found.found else None)
    if between is not None and best is not None:
        from pretrax.plan.failures import lines_of as goodput_lines

        state = best.state_of_machine(hardware.devices_per_host)
        every = loaded.checkpoint.every
        lines = goodput_lines(state, best.prediction.seconds, every, between, 1e9 * asked.write_speed)
        print('\n'.join(['', *lines]))
    if asked.island_bandwidth is not None and best is not None:
        from pretrax.config.batch import tokens_before
        from pretrax.plan.federation import Rounds

        hosts, held, shards = shards_on_hosts(best.mesh, hardware.devices_per_host)
        bandwidth, readers = 1e9 * asked.island_bandwidth, hosts * held / shards
        rounds = Rounds(loaded.federation, found.n_params, best.prediction.seconds, bandwidth, readers)
        print('\n'.join(['', *rounds.lines(tokens_before(loaded.batch, loaded.steps))]))
    if asked.verify:
        print()
        for line in verified(loaded, hardware, found, compiled):
            print(line, flush=True)
