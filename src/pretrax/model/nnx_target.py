"""A user's Flax NNX class: built from the configuration, called on weights, and checked before anything is trained.

Letters: B batch, L length, V vocabulary.
"""

import importlib
import inspect
import pathlib
import traceback
import zlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from pretrax.errors import UserError, install_extra
from pretrax.model.axes import ROWS, along
from pretrax.model.nnx_matrices import find_matrices
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.shardlib import i32, key, num

PyTree = Any  # of arrays

FROM_BATCH = ('positions', 'segments')  # passed to the call, if it has parameters of these names
FLAGS = {'train': True, 'training': True, 'deterministic': False}  # arguments of modules, and their values in training


class NnxTarget:
    """The class that `model.target` names, with its arguments.

    Attributes:
        module_class: the class.
        draws: whether a call in training draws random numbers.
        variables: the `nnx.Param`s by their paths, abstract.
        matrices: the parameters that hold matrices, by dotted name.
        constants: names and types of variables that are neither trained nor random.

    Raises:
        UserError: Flax is missing, there is no such class, its arguments do not fit, or its call does not give logits.
    """

    def __init__(self, request: ModelRequest, options: NnxOptions):
        self.nnx, self.name = _flax(), options.target
        self.module_class = _class(options.target, self.nnx)
        supplied = {
            'vocab_size': request.vocab_size, 'sequence_length': request.longest, 'dtype': request.dtype,
        }  # fmt: skip
        self._arguments = _arguments(self.module_class, options, supplied)
        self.columns: int = self._arguments.get('vocab_size', request.vocab_size)
        self._call_takes = set(inspect.signature(self.module_class.__call__).parameters)
        built = self._build_abstract()
        self.variables = dict(self.nnx.to_flat_state(self.nnx.state(built, self.nnx.Param)))
        if not self.variables:
            raise UserError(f'model.target: {self.name} has no nnx.Param, so nothing in it trains')
        shapes = {path: one.get_value().shape for path, one in self.variables.items()}
        self.matrices = find_matrices(self.nnx, built, shapes, self.columns)
        self.draws, self.constants = self._check_call(request)

    @property
    def takes_segments(self) -> bool:
        """Whether the call keeps the documents of a row apart."""
        return 'segments' in self._call_takes

    def init(self, key: jax.Array) -> PyTree:
        """The initial parameters, as a nested dict."""
        nnx = self.nnx
        with nnx.use_eager_sharding(False):
            return _text_keys(nnx.to_pure_dict(nnx.state(self._build(key), nnx.Param)))

    def logits(
        self,
        weights: PyTree,
        tokens: i32['B L'],
        positions: i32['B L'],
        segments: i32['B L'],
        step_key: key[''] | None = None,
    ) -> num['B L V']:
        """The logits. With a key the module is called as in training, and draws its random numbers from it."""
        nnx = self.nnx
        with nnx.use_eager_sharding(False):
            module = self._build(jax.random.key(0))  # its initial values are replaced, so XLA does not compute them
            state = nnx.state(module, nnx.Param)
            nnx.replace_by_pure_dict(state, nnx.restore_int_paths(weights))
            nnx.update(module, state)
            self._prepare(module, step_key)
            return self._call(module, tokens, positions, segments, step_key is not None)

    def _build(self, key: jax.Array) -> Any:
        return self.module_class(**self._arguments, rngs=self.nnx.Rngs(key))

    def _prepare(self, module: Any, step_key: key[''] | None) -> None:
        """Switches a module to training, with random numbers from this key, or to evaluation."""
        nnx = self.nnx
        if step_key is None:
            module.eval()
            return
        module.train()
        state = nnx.state(module, nnx.RngState)
        for path, one in nnx.to_flat_state(state):
            shape = one.get_value().shape
            if isinstance(one, nnx.RngKey):  # each stream has numbers of its own, by its place in the module
                own = jax.random.fold_in(step_key, zlib.crc32(_dotted(path).encode()))
                one.set_value(jax.random.split(own, shape) if shape else own)
            else:
                one.set_value(jnp.zeros(shape, jnp.uint32))
        nnx.update(module, state)

    def _call(
        self, module: Any, tokens: i32['B L'], positions: i32['B L'], segments: i32['B L'], is_training: bool
    ) -> Any:
        given: dict[str, Any] = {'positions': positions, 'segments': segments}
        given |= {name: value is is_training for name, value in FLAGS.items()}
        return module(tokens, **{name: x for name, x in given.items() if name in self._call_takes})

    def _build_abstract(self) -> Any:
        """The module with shapes for values; nothing is computed."""
        nnx = self.nnx
        try:
            with nnx.use_eager_sharding(False):
                return nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        except Exception as error:
            raise UserError(f'model.target: {self.name} cannot be built\n{self._in_words(error)}') from error

    def _check_call(self, request: ModelRequest) -> tuple[bool, list[str]]:
        """Traces the call in training and in evaluation; nothing is computed."""
        nnx, length = self.nnx, request.sequence_length
        rows = 2 * along(ROWS, request.mesh)
        rows += along(ROWS, request.mesh) * (rows == length)  # so that a transposed result is seen
        seen: list[tuple[bool, list[str]]] = []

        def trace(tokens: i32['B L'], is_training: bool) -> None:
            module = self._build(jax.random.key(0))
            self._prepare(module, jax.random.key(0) if is_training else None)
            before = self._values(module)
            out = self._call(module, tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens), is_training)
            self._check_output(out, rows, length)
            after = self._values(module)
            changed = [path for path, (_, value) in after.items() if path not in before or before[path][1] is not value]
            self._check_changes({path: after[path][0] for path in changed})
            random = {path for path, (kind, _) in after.items() if issubclass(kind, nnx.RngState)}
            constants = [f'{_dotted(path)} (nnx.{after[path][0].__name__})' for path in after.keys() - random]
            seen.append((bool(random & set(changed)), sorted(constants)))

        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        mesh = AbstractMesh(tuple(request.mesh.values()), tuple(request.mesh), (AxisType.Auto,) * len(request.mesh))
        for is_training in (True, False):
            try:
                with jax.sharding.use_abstract_mesh(mesh), nnx.use_eager_sharding(False):
                    jax.eval_shape(lambda tokens, is_training=is_training: trace(tokens, is_training), tokens)
            except UserError:
                raise
            except Exception as error:
                when = 'training' if is_training else 'evaluation'
                passed = ', '.join((*FROM_BATCH, *FLAGS))
                raise UserError(
                    f'model.target: {self.name} fails when it is called in {when} with tokens i32[{rows}, {length}]\n'
                    f'{self._in_words(error)}\npretrax passes tokens, and by name, if the call has them: {passed}; '
                    'dropout takes its rngs from the constructor'
                ) from error
        return seen[0]

    def _values(self, module: Any) -> dict[tuple, tuple[type, Any]]:
        """Types and values of all variables but parameters and results of one call."""
        nnx = self.nnx
        state = nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.Intermediate)))
        return {path: (type(one), one.get_value()) for path, one in nnx.to_flat_state(state)}

    def _check_changes(self, changed: dict[tuple, type]) -> None:
        """Raises UserError if a call changes what is neither an `nnx.Intermediate` nor a state of random numbers."""
        for path, kind in changed.items():
            if issubclass(kind, self.nnx.RngState):
                continue
            why = (
                'BatchNorm averages over later tokens too, which a causal model may not see\n'
                'use nnx.LayerNorm or nnx.RMSNorm, or nnx.BatchNorm(..., use_running_average=True)'
                if issubclass(kind, self.nnx.BatchStat)
                else 'compute it in the call, or make it an nnx.Param or nnx.Intermediate'
            )
            raise UserError(
                f'model.target: a call of {self.name} changes {_dotted(path)}, an nnx.{kind.__name__}, and only '
                f'nnx.Param is carried from step to step\n{why}'
            )

    def _check_output(self, out: Any, rows: int, length: int) -> None:
        """Raises UserError, with the fix, if a result is not logits [B, L, V]."""
        expected = rows, length, self.columns
        fix = _fix_of_output(out, expected)
        if fix:
            raise UserError(
                f'model.target: {self.name} returns {_shown(out)} for tokens i32[{rows}, {length}]\n'
                f'expected the logits: floating point, {list(expected)}, which is [batch, length, vocabulary]\n{fix}'
            )

    def _in_words(self, error: Exception) -> str:
        """The first lines of an error of the user's code, and where it arose there."""
        message = '\n'.join(str(error).strip().split('\n')[:3])[:400]
        own = pathlib.Path(inspect.getfile(self.module_class)).parent
        frames = [f for f in traceback.extract_tb(error.__traceback__) if own in pathlib.Path(f.filename).parents]
        place = f'\n  {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}' if frames else ''
        return f'{type(error).__name__}: {message}{place}'


def _fix_of_output(out: Any, expected: tuple[int, int, int]) -> str | None:
    """What to change in a call that returns this; None: nothing."""
    if isinstance(out, dict | tuple | list):
        named = out.items() if isinstance(out, dict) else enumerate(out)
        fitting = [name for name, x in named if getattr(x, 'shape', None) == expected]
        return f'return only element {fitting[0]!r}' if fitting else 'return one array: the logits'
    if not isinstance(out, jax.Array):
        return 'return one array: the logits'
    B, L, V = expected
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return 'return the logits themselves, before any argmax, comparison or sampling'
    if out.shape == expected:
        return None
    if out.shape == (B, V):
        return 'return the logits of every token, not those of the last one'
    if out.shape == (B * L, V):
        return 'do not flatten batch and length'
    if out.ndim != 3:
        return f'the result has {out.ndim} dimensions'
    if out.shape[:2] == (L, B):
        return 'the batch comes first'
    if out.shape[:2] != (B, L):
        return 'return the logits of every token that was passed; pretrax shifts the targets itself'
    if out.shape[2] > V:
        return (
            f'if the columns after {V} are padding, set model.arguments.vocab_size={out.shape[2]} or return '
            f'logits[..., :{V}]; otherwise the unembedding is missing'
        )
    return f'the last layer must have {V} outputs: the vocabulary of the tokenizer, passed as vocab_size'


def _shown(out: Any) -> str:
    """The shape and dtype of an array, or of what a container holds."""
    if isinstance(out, tuple | list):
        return f'a {type(out).__name__} of ' + ', '.join(map(_shown, out))
    if isinstance(out, dict):
        return 'a dict of ' + ', '.join(f'{name!r}: {_shown(x)}' for name, x in out.items())
    if isinstance(out, jax.Array):
        return f'{out.dtype}{list(out.shape)}'
    return 'None' if out is None else f'a {type(out).__name__}'


def _dotted(path: tuple) -> str:
    return '.'.join(map(str, path))


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
            f"model.arguments.vocab_size = {given['vocab_size']} is smaller than the tokenizer's "
            f'{supplied["vocab_size"]}'
        )
    return given


def _text_keys(tree: PyTree) -> PyTree:
    """The tree with text for keys, as in checkpoints; layers in a list have numbers."""
    return {str(key): _text_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
