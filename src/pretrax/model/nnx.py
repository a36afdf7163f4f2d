"""Any Flax NNX module as a model: the same loop, data, optimizer, checkpoints and metrics as for the decoder.

The module maps tokens [B, L] to logits [B, L, V]. It runs under `jit` on whole arrays: XLA adds the communication, from
the annotations of the parameters (`nnx.with_partitioning`). So it is an `AutomaticModel`, with its own gradients,
evaluation and shardings. The `nnx.Param`s are trained. Dropout draws from a key of the seed and the step; in an
evaluation it is off.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pretrax.errors import UserError
from pretrax.model.axes import ROWS, along
from pretrax.model.base import AutomaticModel, MatrixAxes
from pretrax.model.loss import Batch, LossTerms, nonzero
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.nnx_target import NnxTarget
from pretrax.model.request import ModelRequest
from pretrax.shardlib import f32, i32, key, num
from pretrax.shardlib.types import current_mesh

PyTree = Any  # of arrays


class NnxModel(AutomaticModel):
    """A Flax NNX module as a model.

    Raises:
        UserError: as `NnxTarget`, or an annotation does not fit the mesh.
    """

    def __init__(self, request: ModelRequest, *, options: NnxOptions):
        self.options, self.mesh = options, request.mesh
        self.target = NnxTarget(request, options)
        self.draws = self.target.draws
        self.vocab_size, self.max_length = request.vocab_size, request.longest
        self.params = self._annotated_params()
        leaves = jax.tree.leaves(self.params)
        self.n_params = sum(leaf.size for leaf in leaves)
        self.flops_per_token = options.flops_per_token or 6.0 * self.n_params
        self.choices = self._choices(leaves)

    def _choices(self, leaves: list['_Annotated']) -> dict[str, str]:
        options, target = self.options, self.target
        choices = {
            'module': f'{options.target}({", ".join(f"{k}={v}" for k,
            v in options.arguments.items())}), automatic sharding',
            'documents in a row are kept apart': (
                'by segments' if target.takes_segments else 'NOT: the call of the module has no parameter `segments`'
            ),
            'random numbers': (
                'in training the module draws some (dropout), which depend on seed, step and '
                'pass' if self.draws else 'none'
            ),
            'flops': (
                f'{options.flops_per_token:,.4g} per token, as configured' if options.flops_per_token
                else f'{self.flops_per_token:,.4g} per token, estimated as 6 x parameters (or set '
                'model.flops_per_token)'
            ),
        }  # fmt: skip
        if target.constants:
            choices['variables that do not train'] = ', '.join(target.constants)
        replicated = [leaf for leaf in leaves if not any(leaf.spec)]
        if replicated and math.prod(self.mesh.values()) > 1:
            choices['replicated weights'] = (
                f'{len(replicated)} of {len(leaves)}, {sum(leaf.size for leaf in replicated):,} parameters, are on '
                'every device, and so is their optimizer state: the module does not annotate them'
            )
        return choices

    def init(self, key: jax.Array) -> PyTree:
        """The initial parameters of the module, as a nested dict."""
        return self.target.init(key)

    def logits(self, weights: PyTree, tokens: i32['B L']) -> num['B L V']:
        """The logits of whole sequences, one document per row."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
        return self.target.logits(weights, tokens, positions, jnp.ones_like(tokens))

    def shardings(self, like: PyTree) -> PyTree:
        """The sharding of each parameter on the current mesh, from the module's annotations and `model.axes`."""
        mesh = current_mesh()
        del like
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._specs())

    def matrix_dimensions(self, weights: PyTree, tables: bool = False) -> PyTree:
        """Looks up what `nnx_matrices` knows of the parameters."""

        def dims(path: tuple, _: Any) -> MatrixAxes | None:
            one = self.target.matrices.get(jax.tree_util.keystr(path, simple=True, separator='.'))
            return None if one is None or (one.is_table and not tables) else one.dims

        return jax.tree_util.tree_map_with_path(dims, weights)

    def _specs(self) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.spec, self.params, is_leaf=lambda x: isinstance(x, _Annotated))

    def make_gradients(self, accumulation: int) -> Callable[..., tuple[PyTree, LossTerms, dict]]:
        """weights, batch, key of the step if the module draws -> gradient of the mean loss, its terms, no tables."""
        devices = along(ROWS, self.mesh)

        def gradients(weights: PyTree, batch: Batch, step_key: key[''] | None = None) -> tuple[PyTree, LossTerms, dict]:
            count = jnp.sum(batch.mask)
            step_key = jax.random.key(0) if step_key is None else step_key  # then nothing is drawn

            def mean_loss(weights: PyTree, micro: Batch, number: Any) -> tuple[f32[''], f32['']]:
                nll = self._nll(weights, micro, jax.random.fold_in(step_key, number))
                total = jnp.sum(nll * micro.mask)
                return total / nonzero(count), total

            def gradient(weights: PyTree, micro: Batch, number: Any) -> tuple[PyTree, f32['']]:
                new, total = jax.grad(mean_loss, has_aux=True)(weights, micro, number)
                # Otherwise XLA may shard weights that are not annotated, and the next step does not expect it.
                return jax.lax.with_sharding_constraint(new, self._specs()), total

            if accumulation == 1:
                total, nll = gradient(weights, batch, 0)
                return total, {'nll': (nll, count)}, {}

            def split(x: jax.Array) -> jax.Array:  # each device's rows stay where they are
                apart = x.reshape(devices, accumulation, -1, *x.shape[1:]).swapaxes(0, 1)
                micros = apart.reshape(accumulation, -1, *x.shape[1:])
                return jax.lax.with_sharding_constraint(micros, PartitionSpec(None, tuple(ROWS.split()), 'c'))

            def add(total: PyTree, micro: tuple[Batch, Any]) -> tuple[PyTree, f32['']]:
                new, nll = gradient(weights, *micro)
                return jax.tree.map(jnp.add, total, new), nll

            zero = jax.tree.map(jnp.zeros_like, weights)
            total, nll = jax.lax.scan(add, zero, (jax.tree.map(split, batch), jnp.arange(accumulation)))
            return total, {'nll': (jnp.sum(nll), count)}, {}

        return gradients

    def make_evaluate(self) -> Callable[[PyTree, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
        """weights, batch -> numerator and denominator of the loss."""

        @jax.jit
        def evaluate(weights: PyTree, batch: Batch) -> dict[str, tuple[f32[''], f32['']]]:
            return {'nll': (jnp.sum(self._nll(weights, batch) * batch.mask), jnp.sum(batch.mask))}

        return evaluate

    def _nll(self, weights: PyTree, batch: Batch, step_key: key[''] | None = None) -> f32['B L']:
        """-log p(target) of each token, in f32."""
        logits = self.target.logits(weights, batch.tokens, batch.positions, batch.segments, step_key)
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        return -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]

    def _annotated_params(self) -> PyTree:
        """The parameters as `_Annotated` shapes."""
        tree: dict[str, Any] = {}
        for path, variable in self.target.variables.items():
            node = tree
            for part in path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(path[-1])] = self._annotated(path, variable)
        return tree

    def _annotated(self, path: tuple, variable: Any) -> '_Annotated':
        sharding = variable.get_metadata().get('out_sharding') or ()
        names = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        value = variable.get_value()
        spec = [self._ours(name, path) for name in names]
        for dimension, (size, axes) in enumerate(zip(value.shape, spec, strict=False)):
            over = 1
            for axis in axes or ():
                over *= self.mesh[axis]
            if size % over:
                raise UserError(
                    f'{".".join(map(str, path))} has {size} in dimension {dimension}, which mesh {
                        " x ".join(axes or ())
                    } = '
                    f'{over} does not divide\nuse a mesh that does, or other model.axes'
                )
        return _Annotated(value.shape, value.dtype, PartitionSpec(*spec))

    def _ours(self, name: str | tuple[str, ...] | list[str] | None, path: tuple) -> tuple[str, ...] | None:
        """Our mesh axes for one entry of an annotation."""
        if name is None:
            return None
        found: list[str] = []
        for one in name if isinstance(name, tuple | list) else (name,):
            axes: str | list[str] = self.options.axes.get(one, str(one))
            found += [axes] if isinstance(axes, str) else axes
        unknown = [axis for axis in found if axis not in self.mesh]
        if unknown:
            raise UserError(
                f"{'.'.join(map(str, path))} is annotated with '{name}', which model.axes does not map to "
                f'a mesh axis\nthe mesh has {", ".join(self.mesh)}: add model.axes.{unknown[0]}=...'
            )
        return tuple(found)


class _Annotated(jax.ShapeDtypeStruct):
    """The shape of a parameter and the axes of our mesh that shard it."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec):
        super().__init__(shape, dtype)
        self.spec = spec
