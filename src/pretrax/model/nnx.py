"""Any Flax NNX module as a model: the same loop, data, optimizer, checkpoints and metrics as for the decoder.

The module maps tokens [B, L] to logits [B, L, V]. It runs under `jit` on whole arrays: XLA adds the communication, from the
annotations of the parameters (`nnx.with_partitioning`). So it is an `AutomaticModel`, with its own gradients, evaluation and
shardings. The `nnx.Param`s are trained. The module is called in evaluation mode (`module.eval()`): dropout is off.
"""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pretrax.errors import UserError, install_extra
from pretrax.model.axes import ROWS, along
from pretrax.model.base import AutomaticModel
from pretrax.model.loss import Batch
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.shardlib import f32, i32, num

PyTree = Any  # of arrays

CALLED_WITH = ('positions', 'segments')  # of the batch, if the module's call has parameters of these names


class NnxModel(AutomaticModel):
    """An `nnx.Module` as a model.

    Raises:
        UserError: Flax is missing, there is no such class, or its arguments or annotations do not fit.
    """

    def __init__(self, request: ModelRequest, *, options: NnxOptions):
        self.nnx = _flax()
        self.options, self.mesh = options, request.mesh
        self.target = _class(options.target, self.nnx)
        supplied = {
            'vocab_size': request.vocab_size, 'sequence_length': request.longest, 'dtype': request.dtype,
        }  # fmt: skip
        self.arguments = _arguments(self.target, options, supplied)
        call = set(inspect.signature(self.target.__call__).parameters)
        self.called_with = [name for name in CALLED_WITH if name in call]
        self.vocab_size, self.max_length = request.vocab_size, request.longest
        self.params = self._abstract()
        self.n_params = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        self.flops_per_token = options.flops_per_token or 6.0 * self.n_params
        apart = 'by segments' if 'segments' in call else 'NOT: the call of the module has no parameter `segments`'
        self.choices = {
            'module': f'{options.target}({", ".join(f"{k}={v}" for k, v in options.arguments.items())}), automatic sharding',
            'documents in a row are kept apart': apart,
            'flops': (
                f'{options.flops_per_token:,.4g} per token, as configured' if options.flops_per_token
                else f'{self.flops_per_token:,.4g} per token, estimated as 6 x parameters (or set model.flops_per_token)'
            ),
        }  # fmt: skip

    def init(self, key: jax.Array) -> PyTree:
        """The initial parameters of the module, as a nested dict."""
        with self.nnx.use_eager_sharding(False):
            return _text_keys(self.nnx.to_pure_dict(self.nnx.state(self._module(key), self.nnx.Param)))

    def logits(self, weights: PyTree, tokens: i32['B L']) -> num['B L V']:
        """The logits of whole sequences, one document per row."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
        return self._logits(weights, tokens, {'positions': positions, 'segments': jnp.ones_like(tokens)})

    def _logits(self, weights: PyTree, tokens: i32['B L'], others: dict[str, i32['B L']]) -> num['B L V']:
        nnx = self.nnx
        with nnx.use_eager_sharding(False):
            module = self._module(jax.random.key(0))  # its initial values are replaced, so XLA does not compute them
            state = nnx.state(module, nnx.Param)
            nnx.replace_by_pure_dict(state, nnx.restore_int_paths(weights))
            nnx.update(module, state)
            module.eval()
            return module(tokens, **{name: others[name] for name in self.called_with})

    def shardings(self, like: PyTree) -> PyTree:
        """The sharding of each parameter on the mesh in force, from the module's annotations and `model.axes`."""
        mesh = jax.sharding.get_mesh()
        del like
        return jax.tree.map(
            lambda leaf: NamedSharding(mesh, leaf.spec), self.params, is_leaf=lambda x: isinstance(x, _Annotated)
        )

    def make_gradients(self, accumulation: int) -> Callable[[PyTree, Batch], tuple[PyTree, dict[str, jax.Array], dict]]:
        """weights, batch -> gradient and terms of the mean loss over the batch, and no tables."""
        devices = along(ROWS, self.mesh)

        def gradients(weights: PyTree, batch: Batch) -> tuple[PyTree, dict[str, f32['']], dict]:
            count = jnp.sum(batch.mask)

            def mean_loss(weights: PyTree, micro: Batch) -> tuple[f32[''], dict[str, f32['']]]:
                nll = jnp.sum(self._nll(weights, micro) * micro.mask) / count
                return nll, {'nll': nll}

            gradient = jax.grad(mean_loss, has_aux=True)
            if accumulation == 1:
                return *gradient(weights, batch), {}

            def split(x: jax.Array) -> jax.Array:  # each device's rows stay where they are
                apart = x.reshape(devices, accumulation, -1, *x.shape[1:]).swapaxes(0, 1)
                micros = apart.reshape(accumulation, -1, *x.shape[1:])
                return jax.lax.with_sharding_constraint(micros, PartitionSpec(None, tuple(ROWS.split()), 'c'))

            def add(total: PyTree, micro: Batch) -> tuple[PyTree, dict[str, f32['']]]:
                new, terms = gradient(weights, micro)
                return jax.tree.map(jnp.add, total, new), terms

            zero = jax.tree.map(jnp.zeros_like, weights)
            total, terms = jax.lax.scan(add, zero, jax.tree.map(split, batch))
            return total, jax.tree.map(lambda term: jnp.sum(term, axis=0), terms), {}

        return gradients

    def make_evaluate(self) -> Callable[[PyTree, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
        """weights, batch -> numerator and denominator of the loss."""

        @jax.jit
        def evaluate(weights: PyTree, batch: Batch) -> dict[str, tuple[f32[''], f32['']]]:
            return {'nll': (jnp.sum(self._nll(weights, batch) * batch.mask), jnp.sum(batch.mask))}

        return evaluate

    def _nll(self, weights: PyTree, batch: Batch) -> f32['B L']:
        """-log p(target) of each token, in f32."""
        logits = self._logits(weights, batch.tokens, {'positions': batch.positions, 'segments': batch.segments})
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        return -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]

    def _module(self, key: jax.Array) -> Any:
        return self.target(**self.arguments, rngs=self.nnx.Rngs(key))

    def _abstract(self) -> PyTree:
        """The parameters as `_Annotated` shapes; nothing is computed."""
        nnx = self.nnx
        try:
            with nnx.use_eager_sharding(False):
                state = nnx.state(nnx.eval_shape(lambda: self._module(jax.random.key(0))), nnx.Param)
        except (TypeError, ValueError) as error:
            message = str(error).split('\n')[0][:300]
            raise UserError(
                f'model.target: {self.options.target} cannot be built\n{type(error).__name__}: {message}'
            ) from error
        flat = {path: self._annotated(path, variable) for path, variable in nnx.to_flat_state(state)}
        if not flat:
            raise UserError(f'model.target: {self.options.target} has no nnx.Param, so nothing in it trains')
        tree: dict[str, Any] = {}
        for path, leaf in flat.items():
            node = tree
            for part in path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(path[-1])] = leaf
        return tree

    def _annotated(self, path: tuple, variable: Any) -> '_Annotated':
        names = variable.get_metadata().get('out_sharding') or ()
        value = variable.get_value()
        spec = [self._ours(name, path) for name in names]
        for dimension, (size, axes) in enumerate(zip(value.shape, spec, strict=False)):
            over = 1
            for axis in axes or ():
                over *= self.mesh[axis]
            if size % over:
                raise UserError(
                    f'{".".join(map(str, path))} has {size} in dimension {dimension}, which mesh {" x ".join(axes or ())} = '
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


def _flax() -> ModuleType:
    try:
        from flax import nnx
    except ImportError as error:
        raise UserError(f'model.name=nnx needs Flax\n  {install_extra("nnx")}') from error
    return nnx


def _class(target: str, nnx: ModuleType) -> type:
    name, _, attribute = target.partition(':')
    try:
        found = getattr(importlib.import_module(name), attribute, None)
    except ImportError as error:
        raise UserError(
            f'model.target: the module {name} cannot be imported: {error}\n'
            'is it installed? a file beside the configuration: add its directory to PYTHONPATH'
        ) from error
    if not (inspect.isclass(found) and issubclass(found, nnx.Module)):
        raise UserError(f'model.target: {target} is {found!r}; expected a class that is an nnx.Module')
    return found


def _arguments(target: type, options: NnxOptions, supplied: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(target.__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in options.arguments if name not in parameters and not takes_any]
    if unknown or 'rngs' not in parameters:
        what = f'has no argument {unknown[0]}' if unknown else 'takes no rngs'
        known = ', '.join(name for name in parameters if name not in ('self', 'rngs'))
        raise UserError(f'model.arguments: {options.target} {what}\nit has: {known}')
    given = {name: value for name, value in supplied.items() if name in parameters} | options.arguments
    missing = [
        name for name, p in parameters.items()
        if name not in ('self', 'rngs') and name not in given and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]  # fmt: skip
    if missing:
        raise UserError(f'model.arguments: {options.target} needs {", ".join(missing)}')
    if given.get('vocab_size', supplied['vocab_size']) < supplied['vocab_size']:
        raise UserError(
            f"model.arguments.vocab_size = {given['vocab_size']} is smaller than the tokenizer's {supplied['vocab_size']}"
        )
    return given


def _text_keys(tree: PyTree) -> PyTree:
    """The tree with text for keys, as in checkpoints; layers in a list have numbers."""
    return {str(key): _text_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
