"""`pretrax plan CONFIG topology=v5p-128 slices=2`: memory and speed from sizes alone, and what would be faster."""

from pretrax.cli.compile import asked_topology, without_accelerators
from pretrax.config import RunConfig
from pretrax.errors import UserError


def plan(config: RunConfig, options: dict[str, str], verify: bool = False) -> None:
    """Prints the plan; with `verify` also what the compiler says of the best few."""
    topology = asked_topology(options)
    if topology is None:
        raise UserError('plan: for which hardware?\n  give topology=, such as topology=v5e-256 or topology=h200')
    without_accelerators()
    from pretrax.ahead.auto import settled
    from pretrax.ahead.plan import make_plan, report

    config = settled(config, print, topology)
    found = make_plan(config, topology, print)
    print('\n'.join(report(found)))
    if verify:
        from pretrax.ahead.verify import verified

        print()
        for line in verified(config, topology, found):
            print(line, flush=True)
