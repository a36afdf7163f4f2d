"""`init_from:` starts a run from the weights of another checkpoint: of Hugging Face (hf:DIR_OR_ID), or of a run.

Weights are read piece by piece and copied to the devices that the mesh assigns them to. No device and no host ever holds
all of them.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
import tokenizers

from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description, restore
from pretrax.config import InitFrom
from pretrax.errors import Report, UserError
from pretrax.huggingface.configs import compare
from pretrax.huggingface.model import TOKENIZER, open_model
from pretrax.model.transformer import Transformer
from pretrax.run.setup import Run
from pretrax.run.trained import tokenizer_of
from pretrax.storage import locate
from pretrax.train.step import TrainState, init_state

HF = 'hf:'
SIZED_BY_VOCABULARY = ('embed', 'unembed')

Piece = tuple[tuple[int, ...], np.ndarray]  # its index along the leading dimensions of the weight, and its values


class Pieces(Protocol):
    """Weights that can be read piece by piece."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, path: str) -> Iterator[Piece]: ...


@dataclasses.dataclass(frozen=True)
class Start:
    """Weights to start from."""

    place: str  # as configured
    pieces: Pieces
    vocab_size: int | None  # rows of the vocabulary that are tokens
    tokenizer: bytes | None  # content of tokenizer.json
    tokenizer_sha256: str | None


def warm_state(start: str | InitFrom, run: Run, report: Report) -> TrainState:
    """The state that a run starts from, on its devices: weights of a checkpoint, and its optimizer and step if configured.

    Raises:
        UserError: there is no checkpoint, its sizes differ, or its tokenizer is not that of the data.
    """
    start = InitFrom(path=start) if isinstance(start, str) else start
    asked = [key for key in ('optimizer', 'step', 'partial') if getattr(start, key)]
    if asked and start.path.startswith(HF):
        raise UserError(f'init_from: {start.path} has only whole weights\nleave out init_from.{asked[0]}')
    seed, recipe = run.config.seed, run.recipe
    if start.partial:
        state = init_state(recipe, seed)
        state = state._replace(weights=_partial_weights(start.path, run, state.weights, report))
    else:
        state = init_state(recipe, seed, start_weights(start.path, run, report))
    fields = (['optimizer'] if start.optimizer else []) + (['step', 'batch'] if start.step else [])
    if fields:
        directory, step = find_checkpoint(locate(start.path))
        like = run.like._asdict()
        state = state._replace(**restore(directory, step, {field: like[field] for field in fields}))
        if int(state.step) >= run.config.steps:
            raise UserError(
                f'init_from.step: {start.path} is at step {int(state.step)}, and steps = {run.config.steps} counts its steps too\n'
                'use a larger steps=, or leave out init_from.step'
            )
    optimizer = 'is restored' if start.optimizer else 'starts fresh'
    report(f'init_from: the weights of {start.path}; the optimizer {optimizer}; the next step is {int(state.step) + 1}')
    return state


def start_weights(place: str, run: Run, report: Report) -> Any:
    """All weights of a run, from a checkpoint. Raises UserError as `warm_state` does."""
    like = run.like.weights
    start = _hugging_face(place, run, like, report) if place.startswith(HF) else _own(place)
    _check_tokenizer(start, run.source.tokenizer, report)
    weights = _FittedPieces(start, like, run.recipe.model.vocab_size, report)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _place(weights.pieces(jax.tree_util.keystr(path, simple=True, separator='.')), leaf), like
    )


def _partial_weights(place: str, run: Run, drawn: Any, report: Report) -> Any:
    """Drawn weights, except those that a checkpoint has with the same name and shape."""
    start = _own(place)
    _check_tokenizer(start, run.source.tokenizer, report)
    theirs = start.pieces.shapes
    like = jax.tree_util.tree_leaves_with_path(drawn)
    ours = {jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape for path, leaf in like}
    fits = [name for name, shape in ours.items() if theirs.get(name) == shape]
    if not fits:
        raise UserError(f'init_from: no weight of {place} has the name and shape of a weight of the model')
    count, whole = (sum(math.prod(ours[name]) for name in names) for names in (fits, ours))
    report(f'init_from: {len(fits)} of {len(ours)} weights, {count:,} of {whole:,} numbers, are from {place}')
    for name in ours.keys() - fits:
        there = f'{list(theirs[name])} there' if name in theirs else 'missing there'
        report(f'init_from: {name} is drawn: {list(ours[name])} here, {there}')
    for name in theirs.keys() - ours:
        report(f'init_from: {name} of {place} is not used: the model has no such weight')

    def choose(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        return _place(start.pieces.pieces(name), leaf) if name in fits else leaf

    return jax.tree_util.tree_map_with_path(choose, drawn)


def _hugging_face(place: str, run: Run, like: Any, report: Report) -> Start:
    model = open_model(place.removeprefix(HF))
    if not isinstance(run.recipe.model, Transformer):
        raise UserError(f'init_from: {place} is a {model.table.model_type}, but model.name is {run.config.model.name}')
    for note in model.notes:
        report(f'init_from: {note}')
    theirs, ours = model.arch, run.recipe.model.arch
    differences = compare(theirs, ours, f'in {place}', 'in the configuration')
    resized = ours.vocab_size > theirs.vocab_size
    allowed = {'vocab_size', 'padded_vocab_size'} if resized else set()
    allowed |= {'max_sequence_length'} if ours.positions != 'learned' else set()
    if theirs.tied and not ours.tied:
        allowed |= {'tied'}
        like = dataclasses.replace(like, unembed=None)
    # Differences that change the shapes or the meaning of weights. Any other choice works with the same weights.
    shaping = [name for name in differences if name not in allowed and _shapes_weights(name)]
    if shaping:
        raise UserError(
            f'init_from: model.{shaping[0]} differs: {differences[shaping[0]]}\n'
            'leave the sizes out of model:, and those of the checkpoint are used'
        )
    for name, what in differences.items():
        if name not in allowed:
            report(f'init_from: model.{name} differs: {what}')
    file = model.directory / TOKENIZER
    content = file.read_bytes() if file.is_file() else None
    return Start(place, model.weights(like), theirs.vocab_size, content, None)


def _shapes_weights(name: str) -> bool:
    """Whether a choice decides which weights exist, or their sizes. Other choices may be changed on purpose."""
    return not any(word in name for word in ('rope', 'softcap', 'window', 'every', 'eps', 'query', 'scale', 'offset'))


def _own(place: str) -> Start:
    directory, step = find_checkpoint(locate(place))
    description = read_description(directory, step)
    content = tokenizer_of(directory.parent, description)
    weights = CheckpointWeights(directory, step)
    return Start(place, weights, description.get('vocab_size'), content, description.get('tokenizer'))


def _check_tokenizer(start: Start, ours: Any, report: Report) -> None:
    """Raises UserError if an id that both tokenizers have is another token in each."""
    content = getattr(ours, 'content', None)
    if content is None or (start.tokenizer is None and start.tokenizer_sha256 is None):
        report(f'init_from: cannot compare the tokenizer with that of {start.place}: one of them has no tokenizer.json')
        return
    if ours.sha256 == (start.tokenizer_sha256 or hashlib.sha256(start.tokenizer or b'').hexdigest()):
        return
    if start.tokenizer is None:
        raise UserError(
            f'init_from: {start.place} was trained with another tokenizer (sha256 {start.tokenizer_sha256}), '
            f'and the data with {ours.sha256}\nuse its tokenizer.json: data.tokenizer=PATH'
        )
    before, now = (_by_id(tokenizers.Tokenizer.from_buffer(c)) for c in (start.tokenizer, content))
    differ = sorted(number for number in before.keys() & now.keys() if before[number] != now[number])
    if differ:
        raise UserError(
            f'init_from: {start.place} was trained with another tokenizer: {len(differ):,} ids are other tokens,\n'
            f'for example id {differ[0]}: {before[differ[0]]!r} there, {now[differ[0]]!r} in the data\n'
            'use its tokenizer.json: data.tokenizer=PATH'
        )
    report(
        f'init_from: the tokenizer of {start.place} is another file, but the {len(before.keys() & now.keys()):,} tokens agree'
    )


def _by_id(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


class _FittedPieces:
    """The pieces of a start, with shapes checked against the weights of the run. A smaller vocabulary is extended."""

    def __init__(self, start: Start, like: Any, vocab_size: int | None, report: Report):
        self.start, self.vocab_size = start, vocab_size
        self.shapes = {
            jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(like)
        }
        theirs = start.pieces.shapes
        self.unties = 'unembed' in self.shapes and 'unembed' not in theirs and 'embed' in theirs
        more = sorted(set(theirs) - set(self.shapes))
        missing = sorted(set(self.shapes) - set(theirs) - ({'unembed'} if self.unties else set()))
        if more or missing:
            problems = [f'{start.place} has {more[0]}, and the model does not'] * bool(more)
            problems += [f'the model has {missing[0]}, and {start.place} does not'] * bool(missing)
            raise UserError(f'init_from: {"; ".join(problems)}\nuse the model: section of that checkpoint')
        for path, ours in self.shapes.items():
            shape = theirs.get(path, theirs.get('embed'))
            grows = path in SIZED_BY_VOCABULARY and shape and ours[0] >= shape[0] and ours[1:] == shape[1:]
            if shape != ours and not grows:
                raise UserError(
                    f'init_from: {path} is {list(shape or ())} in {start.place}, but {list(ours)} in the model\n'
                    'use the sizes of the checkpoint in model:, or leave them out'
                )
        if self.unties:
            report(
                f'init_from: {start.place} shares its embedding with its unembedding; here the unembedding starts as a copy'
            )
        if vocab_size is not None and start.vocab_size is not None and vocab_size > start.vocab_size:
            report(
                f'init_from: the vocabulary grows from {start.vocab_size:,} to {vocab_size:,}; '
                'new tokens start as the mean of the old ones'
            )

    def pieces(self, path: str) -> Iterator[Piece]:
        source = 'embed' if path == 'unembed' and self.unties else path
        for at, piece in self.start.pieces.pieces(source):
            yield at, self._filled(piece, self.shapes[path]) if path in SIZED_BY_VOCABULARY else piece

    def _filled(self, table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A table with rows for new tokens, which are the mean of the old rows, so that none is likelier than an old one.

        Rows that pad the vocabulary are 0. Hewitt 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html.
        """
        old = self.start.vocab_size or len(table)
        new = self.vocab_size or old
        if table.shape == shape and new <= old:
            return table
        filled = np.zeros(shape, table.dtype)
        filled[: min(len(table), len(filled))] = table[: len(filled)]
        filled[old:new] = table[:old].mean(axis=0)
        return filled


def _place(pieces: Iterator[Piece], like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array from its pieces; each device gets its own slice."""
    sharding: Any = like.sharding
    indices = {_key(index, like.shape) for index in sharding.addressable_devices_indices_map(like.shape).values()}
    held = {key: np.empty([stop - start for start, stop in key], like.dtype) for key in indices}
    for at, piece in pieces:
        for key, slices in held.items():
            inside = all(start <= number < stop for number, (start, stop) in zip(at, key, strict=False))
            if inside:
                own = tuple(number - start for number, (start, _) in zip(at, key, strict=False))
                slices[own] = piece[tuple(slice(*bounds) for bounds in key[len(at) :])]
    return jax.make_array_from_callback(like.shape, sharding, lambda index: held[_key(index, like.shape)])


def _key(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
