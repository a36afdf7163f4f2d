"""`pretrax plan --budget`: the model, tokens, layout, days and cost that some FLOPs, chip-hours or days pay for.

A scaling law gives the parameters N and tokens D of C = 6 N D FLOPs, the search of a plan the layout, and its
prediction the time of a step, and `plan.failures` the share of the run that checkpoints and failures lose.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator

from pretrax.amounts import duration, size
from pretrax.config import RunConfig, from_values, written_values
from pretrax.cost.scaling_laws import PUBLISHED, Fit, Point, fit
from pretrax.cost.teacher import n_params
from pretrax.cost.topology import Topology
from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.plan.failures import CONSTANTS, Source, sources
from pretrax.plan.plan import Candidate, Planner
from pretrax.storage import locate
from pretrax.view.charts.chart import number_text

_FIRST_MFU = 0.4  # to guess the FLOPs of a budget in time
_LEAST_GOODPUT = 0.01  # a run that keeps less of its time makes no progress
_WRONG_SIZE = 0.3  # a model is refused if the logarithm of its parameters differs from the law by more


@dataclasses.dataclass(frozen=True)
class Purchase:
    """The run that a budget pays for."""

    sizes: list[str]  # arguments for the sizes of the model
    params: int  # N
    batch: int  # tokens of a step
    best: Candidate  # the fastest layout
    source: Source  # of its state after a failure
    between: float  # seconds between failures
    steps: int  # of the run

    @property
    def seconds(self) -> float:
        """From the start of the run to its end."""
        return self.steps * self.best.prediction.seconds / self.source.best_goodput(self.between)


def parse_budget(text: str, hardware: Topology) -> tuple[float, float]:
    """'1e21 flops' -> FLOPs, 0; '5000 h100-hours' or '30 days' -> 0, seconds of all the hardware. Raises UserError."""
    found = re.fullmatch(r'([\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([a-z0-9-]+)', text.strip().lower())
    amount, unit = (float(found[1].replace(',', '')), found[2]) if found else (0.0, '')
    of_chips = f'{hardware.version}-hours'
    units = {'days': 86400.0, 'hours': 3600.0, of_chips: 3600.0 / (hardware.chips * hardware.slices), 'flops': 0.0}
    if not 0 < amount < math.inf or unit not in units:
        raise UserError(f'--budget {text!r}: expected {of_chips}, flops, days or hours, such as "5000 {of_chips}"')
    return amount * (unit == 'flops'), amount * units[unit]


def read_law(path: str) -> Fit:
    """The last law in a `fit.json` that `pretrax scaling` wrote. Raises UserError."""
    try:
        written = json.loads(locate(path).read_bytes())
        points, approach = [Point(**point) for point in written['points']], written['fits'][-1]['approach']
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f'--law {path}: expected a fit.json of `pretrax scaling`: {error}') from None
    return fit(points, approach)


def sizes_for(arch: Architecture, params: float) -> list[str]:
    """The arguments that give a dense decoder the number of layers and the width with about `params` parameters.

    Heads keep their width and share keys as before, and the feed-forward keeps its ratio to the width. The layers grow
    with the width, or a quarter less.

    Raises:
        UserError: the decoder has experts, or no size is near.
    """
    if arch.experts.n_experts:
        raise UserError('--budget: the scaling law is for dense decoders\nuse model.experts.n_experts=0')

    group = arch.attention.n_heads // arch.attention.n_kv_heads

    def sizes(heads: int, n_layers: int) -> dict[str, int]:
        width = heads * arch.d_model // arch.attention.n_heads
        return {
            'n_layers': n_layers,
            'd_model': width,
            'attention.n_heads': heads,
            'attention.n_kv_heads': heads // group,
            'attention.d_head': arch.attention.d_head,
            'feed_forward.d_ff': 64 * max(1, round(arch.feed_forward.d_ff * width / arch.d_model / 64)),
        }

    def error(heads: int, n_layers: int) -> float:
        return math.log(n_params(arch.replace(sizes(heads, n_layers))) / params)

    def usual_layers(heads: int) -> int:
        return max(1, round(arch.n_layers * heads / arch.attention.n_heads))

    heads = group
    while error(heads, usual_layers(heads)) < 0:
        heads += group * 2 ** max(0, (heads // group).bit_length() - 5)  # up to 32 groups, then multiples of 2, 4, ...
    near = range(max(1, usual_layers(heads) * 3 // 4), usual_layers(heads) + 1)
    n_layers = min(near, key=lambda n: abs(error(heads, n)))
    if abs(error(heads, n_layers)) > _WRONG_SIZE:
        raise UserError(
            f'--budget: the scaling law says {number_text(params, digits=3)} parameters; with {n_layers} layers, this '
            f'model has {number_text(math.exp(error(heads, n_layers)) * params, digits=3)}\n'
            'use another budget, or a smaller vocabulary'
        )
    return [f'model.{key}={value}' for key, value in sizes(heads, n_layers).items()]


def buy(
    config: RunConfig, hardware: Topology, budget: tuple[float, float], law: Fit, between: float | None, speed: float
) -> Purchase:
    """The run that a budget pays for on all of the hardware.

    Args:
        config: its model is resized, and its batch is kept.
        budget: FLOPs, or seconds: see `parse_budget`.
        law: gives N for a number of FLOPs.
        between: seconds between failures of the hardware; None: as published.
        speed: bytes/s that a machine writes of a checkpoint.

    Raises:
        UserError: the model has no such size, nothing fits, or failures leave no time to train.
    """
    arch = Planner(config, hardware, lambda text: None).arch
    published = CONSTANTS['chip_seconds_between_failures'] / (hardware.chips * hardware.slices)
    between = float(between or published)
    n = hardware.n_devices
    flops = budget[0] or _FIRST_MFU * hardware.device.peak('bf16') * n * budget[1]
    close = 0.01
    while True:  # the FLOPs that a time pays for depend on the size
        sizes = sizes_for(arch, law.optimum(flops))
        planner = Planner(from_values(written_values(config), sizes), hardware, lambda text: None)
        search, params = planner.search(), planner.n_stored_params - planner.arch.n_padding_params
        if not search.found:
            lines = [f'--budget: {number_text(params, digits=3)} parameters on {hardware}:', *search.why_none()]
            raise UserError('\n'.join(lines))
        best, batch = search.found[0], planner.size.tokens
        source = sources(best.state_of_machine(hardware.devices_per_host), speed)[0]
        if (kept := source.best_goodput(between)) < _LEAST_GOODPUT:
            raise UserError(
                f'--budget: with a failure every {duration(between)}, the run makes no progress\n'
                'use fewer chips, or a higher --write-speed'
            )
        bought = budget[0] or 6 * params * batch * budget[1] * kept / best.prediction.seconds
        if abs(math.log(bought / flops)) < close:
            steps = max(1, round(bought / 6 / params / batch))
            return Purchase(sizes, params, batch, best, source=source, between=between, steps=steps)
        flops, close = bought, 2 * close  # so that this ends if two sizes lead to each other


def lines_of(bought: Purchase, hardware: Topology, law: Fit, price: float | None) -> Iterator[str]:
    """The output of `pretrax plan --budget`. `price`: of a chip-hour; None: not known."""
    tokens, best, chips = bought.steps * bought.batch, bought.best, hardware.chips * hardware.slices
    flops, hours = 6 * bought.params * tokens, bought.seconds / 3600
    ideal = law.optimum(flops)
    low, high = law.interval(flops, 1.0 if law is PUBLISHED else 0.95) or (ideal, ideal)
    params, of_law, least, most, trained = (number_text(n, digits=3) for n in (bought.params, ideal, low, high, tokens))
    cost = '' if price is None else f', {price * chips * hours:,.0f} at {price:g} per chip-hour'
    yield f'time: {hours / 24:,.3g} days of {hardware}, {chips * hours:,.0f} {hardware.version}-hours{cost}'
    yield f'model: {params} parameters; the scaling law says {of_law} ({least} to {most})'
    at_best, fewest, largest = (f'{flops / 6 / n**2:.3g}' for n in (ideal, high, low))
    yield (
        f'tokens: {trained}, {tokens / bought.params:.3g} per parameter; the law says {at_best} ({fewest} to '
        f'{largest}); {flops:.3g} FLOPs'
    )
    step = best.prediction
    within = f' ({step.published.interval(step.seconds)})' if step.published else ''
    yield (
        f'step: {step.seconds:.3g} s{within}, MFU {step.mfu:.0%}, {bought.batch / step.seconds:,.0f} tokens/s, '
        f'{size(best.memory.total)} of {size(hardware.memory)}'
    )
    source, between = bought.source, bought.between
    yield (
        f'lost: {1 - source.best_goodput(between):.2%} to checkpoints of {duration(source.written)} and to a failure '
        f'every {duration(between)}'
    )
    minutes = f'checkpoint.every=0 checkpoint.minutes={source.interval(between) / 60:.3g}'
    yield f'change: {" ".join(bought.sizes)} {best.written()} steps={bought.steps} {minutes}'
