"""`pretrax plan --verify`: compiles the best candidates, and compares the compiler's memory with the predicted one."""

from collections.abc import Iterator

from pretrax.ahead.plan import Candidate, Plan
from pretrax.ahead.step import compile_ahead
from pretrax.amounts import size
from pretrax.config import RunConfig, from_values, written_values
from pretrax.scale.topology import Topology

BEST = 3


def verified(config: RunConfig, topology: Topology, plan: Plan) -> Iterator[str]:
    """A line per candidate, as soon as it is compiled.

    Raises:
        UserError: the plugin that compiles for the topology is not installed.
    """
    if not plan.found:
        yield 'nothing to verify: no candidate fits'
        return
    yield f'compiled{"":<16}{"predicted":>10}  error  change'
    for one in plan.found[:BEST]:
        ahead = compile_ahead(having(config, one), topology, lambda text: None)
        error = one.memory.total / ahead.needed - 1
        fits = 'fits' if ahead.fits else 'DOES NOT FIT'
        yield f'{size(ahead.needed):>8}, {fits:<14}{size(one.memory.total):>10}  {error:+5.0%}  {one.written()}'


def having(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration with the values of a candidate."""
    values = written_values(config)
    chosen = candidate.values()
    return from_values(values | {section: values[section] | chosen[section] for section in ('batch', 'model')}
                       | {'mesh': chosen['mesh']})  # fmt: skip
