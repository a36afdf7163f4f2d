"""The size of a checkpoint of a run that may not have begun."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from pretrax.checkpoint import check_sizes, steps_in
from pretrax.config import RunConfig
from pretrax.config.registry import build
from pretrax.doctor.disk import checkpoints
from pretrax.doctor.findings import Context, Finding
from pretrax.errors import UserError
from pretrax.model.axes import AXES
from pretrax.model.request import ModelRequest

_VOCABULARY = 128_256  # of Llama 3: for a tokenizer that is not known before the data is prepared


def checkpoint_size(context: Context) -> Iterator[Finding]:
    """Whether checkpoints fit on the disk, by the size of the newest one or of the state of the configured model."""
    if context.config is None or context.index:
        return
    directory = context.config.run_dir / 'checkpoints'
    try:
        steps = steps_in(directory)
        needed, note = sum(file.size for file in check_sizes(directory, steps[-1]).files.values()), ', as the newest'
    except (IndexError, UserError, OSError):  # there is none, or it is damaged
        needed, note = state_bytes(context.config)
    yield from checkpoints(context, needed, note)


def state_bytes(config: RunConfig) -> tuple[int, str]:
    """Bytes of the weights and the optimizer's state, in f32, without the data of the run; and a remark.

    Raises:
        UserError: the model is impossible.
    """
    known = getattr(config.data.options, 'vocab_size', None)
    sizes = config.batch.largest
    mesh = jax.make_mesh(
        (1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.local_devices()[:1]
    )
    request = ModelRequest(
        vocab_size=known or _VOCABULARY,
        sequence_length=sizes.sequence_length,
        documents_per_row=None,
        dtype=jnp.float32,
        platform='cpu',
        mesh=dict(mesh.shape),
    )
    model = build('model', config.model, request)
    optimizer = build('optimizer', config.optimizer, model.matrix_dimensions)
    with jax.set_mesh(mesh):
        weights = jax.eval_shape(model.init, jax.random.key(0))
        state = weights, jax.eval_shape(optimizer.init, weights)
    note = '' if known else f', with a vocabulary of {_VOCABULARY:,}'
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), note
