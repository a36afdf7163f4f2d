"""Checks the results of a user's components before the first step. Each message names a line of the user's file.

Components of pretrax itself are not checked. The checks trace a component and compute nothing, except for
`check_behavior`, which computes one update and two losses.
Letters: R rows, L sequence length.
"""

import contextlib
import dataclasses
import functools
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree import leaves_with_path
from jax.tree_util import keystr

from pretrax.config import build, plugin_factory
from pretrax.config.batch import rows_of
from pretrax.config.schema import Component as Section
from pretrax.data.batches.source import HostBatch, check_source
from pretrax.errors import UserError
from pretrax.model.base import AutomaticModel, Model, check_model
from pretrax.model.loss import Batch
from pretrax.shardlib import ShardingError, check, f32, scope, typed_shard_map
from pretrax.shardlib.types import is_array_annotation
from pretrax.train.average import ScheduleFree
from pretrax.train.groups import settings_of, without_frozen
from pretrax.train.host_memory import on_device
from pretrax.train.step import TrainState, make_step
from pretrax.train.validation import make_evaluate

if TYPE_CHECKING:
    from pretrax.run.setup import Run

_WIDEST, _MOST_LINES = 160, 6  # of the message of an exception
_CHECKED_ROWS = 4  # of a batch, before training
_LEAST_PEAK, _LEAST_UNIT = 0.01, 0.1  # of a multiplier of the learning rate, and of a learning rate that is a unit


class PluginError(UserError):
    """A mistake in a user's component. Its cause, if it has one, is the exception that the user's code raised."""


@dataclasses.dataclass(frozen=True)
class Component:
    """The component `name` of the section `kind`. `factory` makes it; it is None if pretrax does, without checks."""

    kind: str
    name: str
    factory: Any

    @classmethod
    def registered(cls, kind: str, name: str) -> Self:
        """The component that is registered under this name."""
        return cls(kind, name, plugin_factory(kind, name))

    def __bool__(self) -> bool:
        """Whether the component is a user's."""
        return self.factory is not None

    def place(self, code: Any = None) -> str:
        """FILE:LINE of a function or class of the user; of the factory, if the code is not of its file."""
        file, line = _file_and_line(self.factory)
        other, line_of_code = _file_and_line(code)
        return f'{file}:{line_of_code if other == file else line}'

    def require(self, is_right: Any, found: str, expected: str, code: Any = None) -> None:
        """Raises PluginError if a result of the user's `code` is not right: what was found, and what is expected."""
        if not is_right:
            raise PluginError(f'{self.place(code)}: {self.kind} {self.name}: {found}\nexpected {expected}')

    @contextlib.contextmanager
    def running(self, what: str, code: Any = None) -> Iterator[None]:
        """Makes an exception of the user's code a `PluginError` with its line.

        An error of a device or of a file that exists may not repeat itself, and stays as it is.
        """
        try:
            yield
        except Exception as error:
            passing = UserError | MemoryError | jax.errors.JaxRuntimeError
            is_of_disk = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            if not self or isinstance(error, passing) or is_of_disk:
                raise
            place, text = self._origin(error, code)
            lines = [line[:_WIDEST] for line in (*str(error).strip().splitlines()[:_MOST_LINES], *text)]
            message = '\n'.join([f'{type(error).__name__}: {lines[0] if lines else ""}', *lines[1:]])
            raise PluginError(f'{place}: {self.kind} {self.name}: {what} raised {message}') from error

    def _origin(self, error: Exception, code: Any) -> tuple[str, list[str]]:
        """FILE:LINE of an exception in the user's file, and the text of the line, if it is known."""
        file, _ = _file_and_line(self.factory)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        later = re.search(r'where: (.+), line (\d+)', str(error))  # of a claim that shardlib verified after tracing
        if later and later[1] == Path(file).name:
            lines.append(int(later[2]))
        if not lines:
            return self.place(code), []
        return f'{file}:{lines[-1]}', [f'    {linecache.getline(file, lines[-1] or 0).strip()}']


def build_component(kind: str, section: Section, *supplied: Any) -> Any:
    """`build`, and the checks that need only the component.

    Raises:
        UserError: the component of a user fails, or is not what its kind needs.
    """
    component = Component.registered(kind, section.name)
    with component.running('it'):
        built = build(kind, section, *supplied)
    found = f'it returned {describe(built)}'
    try:
        if kind == 'data':
            check_source(built, section.name)
        elif kind == 'model':
            check_model(built, section.name)
    except UserError as error:
        raise (PluginError(f'{component.place()}: {error}') if component else error) from None
    if component and kind == 'data':
        size = built.vocab_size
        found, expected = f'vocab_size is {size!r}', 'a positive integer: the number of token ids'
        component.require(_is_integer(size) and size > 0, found, expected)
    elif component and kind == 'model' and not isinstance(built, AutomaticModel):
        _check_members(component, built)
    elif component and kind == 'optimizer' and not isinstance(built, ScheduleFree):
        is_one = not inspect.isclass(built) and hasattr(built, 'init') and hasattr(built, 'update')
        component.require(is_one, found, 'an optax.GradientTransformation, such as optax.scale_by_adam()')
    elif component and kind == 'schedule':
        component.require(callable(built), found, 'a function: step -> multiplier of the learning rate')
    return built


def _check_members(component: Component, model: Model) -> None:
    name, weights = type(model).__name__, getattr(model, 'Weights', None)
    expected = "a class Weights with @pytree_dataclass, whose fields are types such as f32['V/t M/d']"
    found = 'no Weights' if weights is None else f'Weights = {describe(weights)}'
    component.require(is_array_annotation(weights), f'{name} has {found}', expected)
    for method, signature in (('init', 'init(key) -> Weights'), ('loss', 'loss(weights, batch) -> LossTerms')):
        is_own = getattr(type(model), method) is not getattr(Model, method)
        component.require(is_own, f'{name} has no {method}', f'a method {signature}')


def check_schedule(name: str, schedule: Callable[[Any], Any], steps: int, learning_rate: float) -> None:
    """Raises UserError if a user's schedule is not finite and at least 0 at some steps, or has learning rates.

    A learning rate of 0.1 and more may be a unit: the schedule has then all of it.
    """
    component = Component.registered('schedule', name)
    if not component:
        return
    expected = 'a number, finite and at least 0: the multiplier of the learning rate at this step'
    with component.running('the schedule', schedule):
        value = _traced(schedule, jax.ShapeDtypeStruct((), jnp.int32))
        component.require(_is_scalar(value), f'the schedule returned {describe(value)}', expected, schedule)
        compiled, largest = jax.jit(schedule), 0.0
        for step in np.unique(np.linspace(0, steps - 1, 9, dtype=np.int32)):
            value = float(compiled(step))
            is_right = 0 <= value < math.inf
            component.require(is_right, f'the schedule returned {value} for step {step}', expected, schedule)
            largest = max(largest, value)
        expected = 'a multiplier of optimizer.learning_rate, such as 1.0 at the peak: divide by the peak'
        is_share = largest >= _LEAST_PEAK or learning_rate >= _LEAST_UNIT
        component.require(is_share, f'the schedule returned {largest:.3g} at most', expected, schedule)


def check_init(name: str, model: Model) -> None:
    """Raises UserError if a user's `init` does not return its `Weights`, in f32. The mesh of the run must be set."""
    component = Component.registered('model', name)
    if not component or isinstance(model, AutomaticModel):
        return
    with component.running('init', model.init):
        weights = _traced(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    try:
        with scope():
            check(weights, model.Weights, 'weights')
    except ShardingError as error:
        component.require(False, 'init does not return its Weights', f'its types:\n{error}', model.init)
    for path, leaf in leaves_with_path(weights):
        found = f'init returned weights{keystr(path)} as {describe(leaf)}'
        component.require(leaf.dtype == jnp.float32, found, 'weights in float32', model.init)
    one, other = (jax.make_jaxpr(model.init)(jax.eval_shape(lambda: jax.random.key(0))).consts for _ in range(2))
    is_same = len(one) == len(other) and all(map(np.array_equal, one, other))
    expected = 'random numbers of its key only, such as jax.random.normal(key, shape): other processes draw the same'
    component.require(is_same, 'init, called twice, returned different weights', expected, model.init)


def check_run(run: 'Run') -> None:
    """Checks what a run has of a user: its batches, its tokenizer, its loss, its optimizer. Computes nothing.

    Raises:
        UserError: one of them returns something else than its contract says.
    """
    source, *others = (run.components[kind] for kind in ('data', 'schedule', 'optimizer', 'model'))
    if source:
        _check_source(source, run)
        _check_tokenizer(source, run)
    if not any(others):
        return
    model = run.recipe.model
    with jax.set_mesh(run.mesh), contextlib.ExitStack() as stack:
        if others[2] and not isinstance(model, AutomaticModel):
            _check_loss(others[2], run)
            _check_logits(others[2], run)
        if others[1] and not isinstance(run.recipe.optimizer, ScheduleFree):
            _check_update(others[1], run)
        for component in others:  # the model last: an error without a line of the user is most likely of its loss
            stack.enter_context(component.running('a step', type(model).loss if component is others[2] else None))
        make_step(run.recipe).eval_shape(run.like, run.abstract_batch())


def check_behavior(run: 'Run', state: TrainState) -> None:
    """Computes an update and two losses with a user's optimizer and model. The mesh of the run must be set.

    Raises:
        UserError: the update points against the gradient, or a loss depends on later tokens or is not finite.
    """
    optimizer, model = run.components['optimizer'], run.components['model']
    target: Any = getattr(run.recipe.model, 'target', None)
    model = dataclasses.replace(model, factory=target.module_class) if model.name == 'nnx' else model
    if optimizer and not isinstance(run.recipe.optimizer, ScheduleFree):
        _check_direction(optimizer, run, state)
    if model and run.teaching is None and int(state.step) == 0:
        _check_causality(model, run, state)


def read_rows(run: 'Run', host: Callable[[slice], HostBatch], rows: slice) -> HostBatch:
    """Some rows of a batch, [R, L]. Raises UserError if those of a user's source are not a batch of its vocabulary."""
    component = run.components['data']
    try:
        with component.running('a batch', type(run.source).batch):
            batch = HostBatch(*host(rows))
    except PluginError as error:
        error.exit_code = 1  # it may be a fault of the moment, so a launcher starts the run again
        raise
    if component:
        _check_rows(component, run, batch, (rows.stop - rows.start, run.size.sequence_length))
    return batch


@contextlib.contextmanager
def keeping_traceback(directory: Path) -> Iterator[None]:
    """Writes the traceback of an exception in a user's component to a file, and adds its path to the message."""
    try:
        yield
    except PluginError as error:
        if error.__cause__ is not None:
            path = directory / 'traceback.txt'
            path.write_text(''.join(traceback.format_exception(error.__cause__)))
            error.args = (f'{error}\nthe traceback is in {path}',)
        raise


def describe(value: Any) -> str:
    """A value as a message shows it: 'None', 'float32[3, 4]', 'a tuple of (None, float32[])', 'a function'."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    if hasattr(value, 'shape') and hasattr(value, 'dtype'):
        return f'{value.dtype}{list(value.shape)}'
    if isinstance(value, tuple | list):
        return f'a {type(value).__name__} of ({", ".join(map(describe, value[:3]))}{", ..." * (len(value) > 3)})'
    if isinstance(value, dict):
        return f'a dict with the keys {list(value)[:5]}'
    if inspect.isclass(value):
        return f'the class {value.__name__}'
    return 'a function' if inspect.isroutine(value) else f'an object of {type(value).__name__}'


def _check_source(component: Component, run: 'Run') -> None:
    code, length = type(run.source).batch, run.sizes.largest.sequence_length

    def read(number: int, start: int = 0) -> HostBatch:
        first, count, _ = rows_of(run.sizes, number)
        size = math.gcd(first, count)
        rows = slice(min(start, size - 1), min(size, _CHECKED_ROWS))
        with component.running(f'batch({first // size}, {rows}, {size})', code):
            batch = run.source.batch(first // size, rows, size)
        _check_rows(component, run, batch, (rows.stop - rows.start, length))
        return batch

    is_equal, numbers = functools.partial(np.array_equal, equal_nan=True), (0, run.steps - 1)
    read_and_copied = [(batch := read(number), HostBatch(*map(np.copy, batch))) for number in numbers]
    before = [copied for _, copied in read_and_copied]
    is_same = all(is_equal(*arrays) for pair in read_and_copied for arrays in zip(*pair, strict=True))
    component.require(is_same, 'reading a batch changes an earlier one', 'new arrays for each batch', code)
    is_learned = any((batch.mask > 0).any() for batch in before)
    component.require(is_learned, f'the mask of batches {numbers} is 0 everywhere', 'a token to learn', code)
    expected = 'a pure function of the seed, the step and the row: np.random.default_rng((request.seed, step, row))'
    for number, batch in zip(numbers, before, strict=True):
        is_same = all(map(is_equal, batch, read(number)))
        component.require(is_same, f'batch {number}, read twice, is not the same', expected, code)
    later = read(0, start=1)
    is_same = all(is_equal(part, whole[-len(part) :]) for part, whole in zip(later, before[0], strict=True))
    component.require(is_same, 'the rows of batch 0 depend on which rows are read with them', expected, code)
    rows = slice(0, min(run.rows, _CHECKED_ROWS))
    for _, held_out in run.source.validation_parts.values() if run.eval.every else ():
        with component.running('validation', held_out):
            batch = held_out(0, rows, run.rows)
        _check_rows(component, run, batch, (rows.stop, run.size.sequence_length), held_out)


def _check_rows(component: Component, run: 'Run', batch: Any, shape: tuple[int, int], code: Any = None) -> None:
    """Raises PluginError if a batch is not five arrays [R, L] of the right dtypes and ranges.

    A mask may not be finite: training skips a step whose loss is not finite.
    """
    code, fields = code or type(run.source).batch, HostBatch._fields
    is_one = isinstance(batch, tuple | list) and len(batch) == len(fields)
    expected = f'a HostBatch({", ".join(fields)}), such as pack_rows returns'
    component.require(is_one, f'a batch is {describe(batch)}', expected, code)
    for name, array in zip(fields, batch, strict=True):
        wanted, dtypes = ('int32', (np.int32, np.int64)) if name != 'mask' else ('float32', (np.float32, np.float64))
        is_right = isinstance(array, np.ndarray) and array.dtype in dtypes and array.shape == shape
        expected = f'{wanted}{list(shape)}: [rows, sequence length]; convert with .astype(np.{wanted})'
        component.require(is_right, f'{name} of a batch is {describe(array)}', expected, code)
        low, high, is_id = array.min(), array.max(), name in ('tokens', 'targets')
        top = run.source.vocab_size - 1 if is_id else math.inf
        is_right = not low < 0 and not high > top
        expected = f'ids from 0 to vocab_size - 1 = {top}' if is_id else 'values of at least 0'
        component.require(is_right, f'{name} of a batch has {low if low < 0 else high}', expected, code)


def _check_tokenizer(component: Component, run: 'Run') -> None:
    tokenizer, top = run.source.tokenizer, run.source.vocab_size - 1
    if tokenizer is None or type(tokenizer).__module__.startswith('pretrax.'):
        return
    for name in ('encode', 'decode', 'end_of_text'):
        expected = 'encode(text) -> ids, decode(ids) -> text, and end_of_text: the id that ends a text, or None'
        component.require(hasattr(tokenizer, name), f'its tokenizer has no {name}', expected)
    with component.running('encode', tokenizer.encode):
        ids = tokenizer.encode('The 3 cats sat.')
    is_right = isinstance(ids, list | tuple | np.ndarray) and all(_is_integer(i) and 0 <= i <= top for i in ids)
    expected = f'a list of ids from 0 to vocab_size - 1 = {top}'
    component.require(is_right, f'encode returned {describe(ids)}', expected, tokenizer.encode)
    with component.running('decode', tokenizer.decode):
        text = tokenizer.decode([int(i) for i in ids])
    component.require(isinstance(text, str), f'decode returned {describe(text)}', 'text (str)', tokenizer.decode)


def _check_loss(component: Component, run: 'Run') -> None:
    model, code, returned = run.recipe.model, type(run.recipe.model).loss, []
    weights_type: Any = model.Weights

    @typed_shard_map
    def trace(weights: weights_type, batch: Batch) -> dict[str, f32['']]:
        returned.append((model.loss(weights, batch), model.denominators(batch)))
        return {}

    with component.running('loss', code):
        jax.eval_shape(lambda weights, batch: trace(on_device(weights), batch), run.like.weights, run.abstract_batch())
    terms, counts = returned[-1]
    expected = "{'nll': (numerator, denominator)}: sums over this device's tokens, such as loss_terms returns"
    component.require(isinstance(terms, dict) and terms, f'loss returned {describe(terms)}', expected, code)
    for name, term in terms.items():
        is_pair = isinstance(term, tuple) and len(term) == 2
        is_right = is_pair and (term[1] is None or all(map(_is_scalar, term)))
        component.require(is_right, f'loss returned {name!r}: {describe(term)}', expected, code)
    are_right = isinstance(counts, dict) and all(map(_is_scalar, counts.values()))
    own, expected = type(model).denominators, "sums of the batch, such as {'nll': jnp.sum(batch.mask)}"
    component.require(are_right, f'denominators returned {describe(counts)}', expected, own)
    summed = sorted(name for name, (_, count) in terms.items() if count is not None)
    found = f'loss has the terms {summed}, but denominators(batch) has {sorted(counts)}'
    expected = 'the same terms\ndefine denominators(batch), with the denominator of each term, from the batch'
    component.require(summed == sorted(counts), found, expected, code)


def _check_logits(component: Component, run: 'Run') -> None:
    """Raises PluginError if the logits of a user's model have fewer columns than there are tokens."""
    model, code, returned = run.recipe.model, type(run.recipe.model).logits, []
    if _file_and_line(code)[0] != _file_and_line(component.factory)[0]:  # a part of the decoder, whose logits are ours
        return
    weights_type: Any = model.Weights

    @typed_shard_map
    def trace(weights: weights_type, batch: Batch) -> dict[str, f32['']]:
        returned.append(model.logits(weights, batch.tokens))
        return {}

    with component.running('logits', code):
        jax.eval_shape(lambda weights, batch: trace(on_device(weights), batch), run.like.weights, run.abstract_batch())
    columns = getattr(returned[-1], 'shape', (0,))[-1] * run.mesh.shape['t']
    found = f'logits returned {describe(returned[-1])} on each device: {columns} columns over mesh.t'
    expected = f'num[B/r/d/e L/c V/t], a column for each of {run.source.vocab_size} tokens: V = request.vocab_size'
    component.require(columns >= run.source.vocab_size, found, expected, code)


def _check_update(component: Component, run: 'Run') -> None:
    weights, state = without_frozen(run.like.weights, settings_of(run.recipe, run.like.weights)), run.like.optimizer
    update = run.recipe.optimizer.update
    with component.running('update', update):
        returned = _traced(update, weights, state, weights)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    component.require(is_pair, f'update returned {describe(returned)}', 'a tuple (updates, state)', update)
    for what, now, before in (('updates', returned[0], weights), ('state', returned[1], state)):
        of_now, of_before = ({keystr(path): describe(x) for path, x in leaves_with_path(t)} for t in (now, before))
        wrong = next((path for path in {**of_before, **of_now} if of_now.get(path) != of_before.get(path)), '')
        found = f'{what}{wrong} of update is {of_now.get(wrong, describe(now))}'
        expected = f'{of_before.get(wrong, describe(before))}, as in {"the gradient" if now is returned[0] else "init"}'
        is_same = of_now == of_before and jax.tree.structure(now) == jax.tree.structure(before)
        component.require(is_same, found, expected, update)


def _check_direction(component: Component, run: 'Run', state: TrainState) -> None:
    optimizer, settings = run.recipe.optimizer, settings_of(run.recipe, state.weights)

    def wave(w: jax.Array) -> jax.Array:
        return 0.01 * jnp.sin(100 * w + sum(jnp.indices(w.shape, sparse=True)) + 1.0)

    @jax.jit
    def products(weights: Any) -> list[jax.Array]:
        """<update, gradient> of the first updates of a fresh state."""
        weights = without_frozen(on_device(weights), settings)
        gradient, moments, found = jax.tree.map(wave, weights), optimizer.init(weights), []
        for _ in range(3):
            update, moments = optimizer.update(gradient, moments, weights)
            found.append(optax.tree.vdot(update, gradient))
        return found

    with component.running('update', optimizer.update):
        values = [float(value) for value in products(state.weights)]
    first = next((value for value in values if value != 0), 0.0)  # an optimizer may wait before its first update
    found = 'its first update points against the gradient' if first < 0 else f'its first update is {first}'
    expected = (
        'a direction, like the gradient: pretrax subtracts learning_rate * update\n'
        'leave out the learning rate, as in optax.scale_by_adam(), or add optax.scale(-1.0)'
    )
    component.require(first >= 0, found, expected, optimizer.update)


def _check_causality(component: Component, run: 'Run', state: TrainState) -> None:
    """Changes the tokens in the second half of each sequence, and compares the losses of the first half."""
    run, batch = run.at(int(state.batch)), run.batch(int(state.batch))
    model, length = run.recipe.model, run.size.sequence_length
    half = length // 2 | 1  # odd: the sequences of a device begin at an even token
    code = component.factory if isinstance(model, AutomaticModel) else type(model).loss
    n_tokens = min(run.source.vocab_size, model.vocab_size or run.source.vocab_size)
    is_late = (np.arange(length) if model.column_order is None else model.column_order) >= half

    @jax.jit
    def changed(batch: Batch) -> tuple[Batch, Batch]:
        early = dataclasses.replace(batch, mask=jnp.where(is_late, 0.0, jnp.ones_like(batch.mask)))
        return early, dataclasses.replace(early, tokens=jnp.where(is_late, (batch.tokens + 1) % n_tokens, batch.tokens))

    evaluate = make_evaluate(model)
    with component.running('loss', code):
        one, other = (jax.tree.map(float, evaluate(state.weights, early)) for early in changed(batch))
    total = sum(numerator for numerator, _ in one.values())
    component.require(math.isfinite(total), f'the loss of the first batch is {total}', 'a finite loss', code)
    if 'nll' in one:
        (nll, _), (nll_of_other, _) = one['nll'], other['nll']
        found = f'the loss of the first {half} tokens of a sequence changes with the tokens after them'
        expected = 'a causal model: what predicts a token may depend only on the tokens before it'
        component.require(abs(nll - nll_of_other) <= 1e-5 * abs(nll), found, expected, code)


def _traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Traces a function and returns its result. Arrays have shapes but no values; other results stay as they are."""
    returned = []
    jax.eval_shape(lambda *values: returned.append(function(*on_device(values))), *arguments)
    return returned[0]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (getattr(value, 'shape', None) == () and value.dtype != bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _file_and_line(code: Any) -> tuple[str, int]:
    """Where a function, method or class is defined; ('', 0) if that is not known."""
    code = inspect.unwrap(getattr(code, '__func__', getattr(code, 'func', code)))
    code = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    try:
        return inspect.getsourcefile(code) or '', inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return '', 0
