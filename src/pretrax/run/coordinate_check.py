"""The coordinate check of muP: the sizes of activations after a few steps, at several widths.

Yang et al. 2022, arXiv:2203.03466, appendix D.1. Sizes are root mean squares, averaged over the layers and the seeds.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.config import RunConfig, load
from pretrax.errors import Report, UserError
from pretrax.model.transformer import Transformer
from pretrax.run.setup import Run, prepare
from pretrax.shardlib import i32, num, typed_shard_map
from pretrax.train.layer_statistics import make_layer_statistics
from pretrax.train.state import init_state
from pretrax.train.step import make_step
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.tables import text_table

Coordinates = dict[int, dict[str, float]]  # width -> what -> size
_LAYERS = {'attention_rms': 'attention', 'feed_forward_rms': 'feed-forward', 'residual_rms': 'residual stream'}
CHANGE = 'change of the logits'


def check_coordinates(
    config: str, overrides: Sequence[str], widths: Sequence[int], steps: int, seeds: int, mup: bool, report: Report
) -> Coordinates:
    """Trains models of several widths, and measures them.

    Heads, and the feed-forward if it is configured, grow with the width. The base width is that of the configuration,
    or the smallest one. The learning rate is constant.

    Args:
        config: a configuration of the decoder, of any width.
        overrides: key=value, after those of the configuration.
        steps: before the sizes are measured.
        seeds: how many models of each width.
        mup: False: without `model.mup`.

    Raises:
        UserError: a width does not fit the heads, or the model is not the decoder.
    """
    base = load(config, [*overrides])
    found: Coordinates = {}
    for width in widths:
        changes = _at_width(base, width, min(widths), mup)
        changed = {change.partition('=')[0] for change in (*changes, 'seed=')}
        kept = [one for one in overrides if one.partition('=')[0] not in changed and not one.startswith('schedule')]
        sizes = []
        for seed in range(base.seed, base.seed + seeds):
            at_width = load(config, [*kept, *changes, f'seed={seed}'])
            sizes.append(_sizes(prepare(at_width, lambda _: None), steps))
            report(
                f'{"muP" if mup else "standard"}, width {width}, seed {seed}: logits change by {sizes[-1][CHANGE]:.3g}'
            )
        found[width] = {what: float(np.mean([one[what] for one in sizes])) for what in sizes[0]}
    return found


def slopes(coordinates: Coordinates) -> dict[str, float]:
    """The slope of log(size) over log(width), by least squares, for everything that was measured."""
    x = np.log(list(coordinates))
    return {
        what: float(np.polyfit(x, [math.log(sizes[what]) for sizes in coordinates.values()], 1)[0])
        for what in next(iter(coordinates.values()))
    }


def as_text(name: str, coordinates: Coordinates) -> str:
    """A table with a column for each width, and the slopes."""
    rows = [[name, *map(str, coordinates), 'slope']]
    for what, slope in slopes(coordinates).items():
        rows.append([what, *(f'{sizes[what]:.3g}' for sizes in coordinates.values()), f'{slope:+.2f}'])
    return '\n'.join(text_table(rows, left=(0,)))


def as_chart(found: dict[str, Coordinates], steps: int) -> Chart:
    """A curve over the width for everything that was measured, and for each parametrization a panel."""
    panels = []
    for name, sizes in found.items():
        lines = [
            Line(what, list(sizes), [one[what] for one in sizes.values()], color=number)
            for number, what in enumerate(next(iter(sizes.values())))
        ]
        panels.append(Panel(f'{name}: sizes after {steps} steps', lines))
    return Chart(panels, 'width', log_x=True, log_y=True)


def _at_width(base: RunConfig, width: int, narrowest: int, mup: bool) -> list[str]:
    """Overrides for a model of another width."""
    options: Any = base.model.options
    known = options.dotted() if base.model.name == 'transformer' else {}
    usual = known.get('d_model')
    if not (usual and known.get('attention.n_heads')):
        raise UserError('mup check: the configuration needs model.d_model and model.attention.n_heads, of the decoder')
    if base.mesh.p != 1:
        raise UserError(f'mup check: mesh.p = {base.mesh.p}\nuse mesh.p=1')
    changes = [f'model.d_model={width}']
    for name in ('attention.n_heads', 'attention.n_kv_heads', 'feed_forward.d_ff'):
        if known.get(name):
            key, grown = f'model.{name}', known[name] * width / usual
            if grown != int(grown):
                raise UserError(
                    f'mup check: at width {width}, {key} would be {grown:g}\n'
                    f'use other --widths, or another {key} for model.d_model = {usual}'
                )
            changes.append(f'{key}={int(grown)}')
    if not mup:
        changes.append('model.mup=null')
    elif options.mup is None:
        changes.append(f'model.mup.base_width={narrowest}')
    return [*changes, 'schedule={name: constant}']


def _sizes(run: Run, steps: int) -> dict[str, float]:
    """Trains a model on one batch, and measures its activations and how far its logits have moved on that batch."""
    model: Any = run.recipe.model
    assert isinstance(model, Transformer)
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, run.recipe.seed)
        logits, step = jax.jit(_logits(model)), make_step(run.recipe)
        batch = run.batch(0)
        before = logits(state.weights, batch.tokens)
        for _ in range(steps):
            state, _ = step(state, batch)
        after = logits(state.weights, batch.tokens)
        statistics = make_layer_statistics(run.recipe, 0)(state, batch, jnp.zeros(run.rows, jnp.int32))
        found = {name: float(np.mean(statistics[key])) for key, name in _LAYERS.items() if key in statistics}
        return found | {CHANGE: float(jnp.sqrt(jnp.mean(jnp.square(after - before))))}


def _logits(model: Transformer) -> Any:
    weights_type = model.Weights

    @typed_shard_map
    def logits(weights: weights_type, tokens: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        return model.logits(weights, tokens)

    return lambda weights, tokens: logits(weights, tokens).astype(jnp.float32)
