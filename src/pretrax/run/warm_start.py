"""`init_from:` weights of another checkpoint at the start of a run: of Hugging Face (hf:DIR_OR_ID), or of a run of ours.

The weights come a piece at a time and go to where the mesh wants them: no device, and no host, holds them all.
"""

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
import tokenizers

from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description, restore
from pretrax.config import InitFrom
from pretrax.errors import UserError
from pretrax.huggingface.configs import compare
from pretrax.huggingface.model import TOKENIZER, open_model
from pretrax.model.transformer import Transformer
from pretrax.run.setup import Run
from pretrax.run.trained import tokenizer_of
from pretrax.train.step import TrainState, init_state

HF = 'hf:'
SIZED_BY_VOCABULARY = ('embed', 'unembed')

Piece = tuple[tuple[int, ...], np.ndarray]


class Pieces(Protocol):
    """Where weights come from."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, path: str) -> Iterator[Piece]: ...


@dataclasses.dataclass(frozen=True)
class Start:
    """Weights to start from: where they are said to be, their pieces, the rows of their vocabulary, their tokenizer."""

    place: str
    pieces: Pieces
    vocab_size: int | None
    tokenizer: bytes | None  # content of tokenizer.json
    tokenizer_sha256: str | None


def start_state(start: str | InitFrom, run: Run, say: Callable[[str], None]) -> TrainState:
    """The state that a run starts from, on its devices: weights of elsewhere, and what else the configuration asks for.

    Raises:
        UserError: nothing is there, it has other sizes, or its tokenizer is not the one that made the data's tokens.
    """
    start = InitFrom(path=start) if isinstance(start, str) else start
    asked = [key for key in ('optimizer', 'step', 'partial') if getattr(start, key)]
    if asked and start.path.startswith(HF):
        raise UserError(f'init_from: {start.path} has nothing but whole weights\nleave out init_from.{asked[0]}')
    seed, recipe = run.config.seed, run.recipe
    if start.partial:
        state = init_state(recipe, seed)
        state = state._replace(weights=_fitting_weights(start.path, run, state.weights, say))
    else:
        state = init_state(recipe, seed, start_weights(start.path, run, say))
    fields = (['optimizer'] if start.optimizer else []) + (['step', 'batch'] if start.step else [])
    if fields:
        directory, step = find_checkpoint(pathlib.Path(start.path))
        like = run.like._asdict()
        state = state._replace(**restore(directory, step, {field: like[field] for field in fields}))
        if int(state.step) >= run.config.steps:
            raise UserError(
                f'init_from.step: {start.path} is at step {int(state.step)}, and steps is {run.config.steps}, of the whole\n'
                'give more steps, or leave init_from.step out'
            )
    told = 'goes on from theirs' if start.optimizer else 'starts afresh'
    say(f'init_from: the weights of {start.path}; the optimizer {told}; the next step is {int(state.step) + 1}')
    return state


def start_weights(place: str, run: Run, say: Callable[[str], None]) -> Any:
    """All weights of a run, out of a checkpoint. Raises UserError as `start_state` does."""
    like = run.like.weights
    start = _hugging_face(place, run, like, say) if place.startswith(HF) else _own(place)
    _check_tokenizer(start, getattr(run.source, 'tokenizer', None), say)
    weights = _Fitted(start, like, getattr(getattr(run.recipe.model, 'arch', None), 'vocab_size', None), say)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _place(weights.pieces(jax.tree_util.keystr(path, simple=True, separator='.')), leaf), like
    )


def _fitting_weights(place: str, run: Run, drawn: Any, say: Callable[[str], None]) -> Any:
    """Weights that are drawn, but for those that a checkpoint has under the same name and in the same shape."""
    start = _own(place)
    _check_tokenizer(start, getattr(run.source, 'tokenizer', None), say)
    theirs = start.pieces.shapes
    like = jax.tree_util.tree_leaves_with_path(drawn)
    ours = {jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape for path, leaf in like}
    fits = [name for name, shape in ours.items() if theirs.get(name) == shape]
    if not fits:
        raise UserError(f'init_from: no weight of {place} has the name and the shape of one of the model')
    count, whole = (sum(math.prod(ours[name]) for name in names) for names in (fits, ours))
    say(f'init_from: {len(fits)} of {len(ours)} weights, {count:,} of {whole:,} numbers, are those of {place}')
    for name in ours.keys() - fits:
        there = f'{list(theirs[name])} there' if name in theirs else 'not there'
        say(f'init_from: {name} is drawn: {list(ours[name])} here, {there}')
    for name in theirs.keys() - ours:
        say(f'init_from: {name} of {place} is not used: the model has none')

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        return _place(start.pieces.pieces(name), leaf) if name in fits else leaf

    return jax.tree_util.tree_map_with_path(one, drawn)


def _hugging_face(place: str, run: Run, like: Any, say: Callable[[str], None]) -> Start:
    model = open_model(place.removeprefix(HF))
    if not isinstance(run.recipe.model, Transformer):
        raise UserError(f'init_from: {place} is a {model.table.model_type}, and model.name is {run.config.model.name}')
    for note in model.notes:
        say(f'init_from: {note}')
    theirs, ours = model.arch, run.recipe.model.arch
    differences = compare(theirs, ours, f'in {place}', 'in the configuration')
    resized = ours.vocab_size > theirs.vocab_size
    allowed = {'vocab_size', 'padded_vocab_size'} if resized else set()
    allowed |= {'max_sequence_length'} if ours.positions != 'learned' else set()
    if theirs.tied and not ours.tied:
        allowed |= {'tied'}
        like = dataclasses.replace(like, unembed=None)
    # What the weights are made for. With these the same, any other choice can be computed with them.
    shaping = [name for name in differences if name not in allowed and _shapes_weights(name)]
    if shaping:
        raise UserError(
            f'init_from: model.{shaping[0]} differs: {differences[shaping[0]]}\n'
            'leave the sizes out of model: and they are taken from there'
        )
    for name, what in differences.items():
        if name not in allowed:
            say(f'init_from: model.{name} differs: {what}')
    file = model.directory / TOKENIZER
    content = file.read_bytes() if file.is_file() else None
    return Start(place, model.weights(like), theirs.vocab_size, content, None)


def _shapes_weights(name: str) -> bool:
    """Whether a choice decides which weights there are, or their sizes. The others can be changed on purpose."""
    return not any(word in name for word in ('rope', 'softcap', 'window', 'every', 'eps', 'query', 'scale', 'offset'))


def _own(place: str) -> Start:
    directory, step = find_checkpoint(pathlib.Path(place))
    description = read_description(directory, step)
    content = tokenizer_of(directory.parent, description)
    weights = CheckpointWeights(directory, step)
    return Start(place, weights, description.get('vocab_size'), content, description.get('tokenizer'))


def _check_tokenizer(start: Start, ours: Any, say: Callable[[str], None]) -> None:
    """Tokens have to mean what they meant: the ids that both tokenizers have stand for the same tokens."""
    content = getattr(ours, 'content', None)
    if content is None or (start.tokenizer is None and start.tokenizer_sha256 is None):
        say(
            f'init_from: whether the tokenizer is the one of {start.place} is not known: one of them has no tokenizer.json'
        )
        return
    if ours.sha256 == (start.tokenizer_sha256 or hashlib.sha256(start.tokenizer or b'').hexdigest()):
        return
    if start.tokenizer is None:
        raise UserError(
            f'init_from: {start.place} was trained with another tokenizer (sha256 {start.tokenizer_sha256}), '
            f'and the data has one of {ours.sha256}\ngive its tokenizer.json: data.tokenizer=PATH'
        )
    before, now = (_by_id(tokenizers.Tokenizer.from_buffer(c)) for c in (start.tokenizer, content))
    differ = sorted(number for number in before.keys() & now.keys() if before[number] != now[number])
    if differ:
        raise UserError(
            f'init_from: {start.place} was trained with another tokenizer: {len(differ):,} tokens mean something else,\n'
            f'token {differ[0]} was {before[differ[0]]!r} and is {now[differ[0]]!r} in the data\n'
            'give its tokenizer.json: data.tokenizer=PATH'
        )
    say(
        f'init_from: the tokenizer of {start.place} is another file; the {len(before.keys() & now.keys()):,} tokens agree'
    )


def _by_id(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


class _Fitted:
    """The pieces of a start, checked against the weights of the run; a smaller vocabulary is filled up."""

    def __init__(self, start: Start, like: Any, vocab_size: int | None, say: Callable[[str], None]):
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
            said = [f'{start.place} has {more[0]}, and the model does not'] * bool(more)
            said += [f'the model has {missing[0]}, and {start.place} does not'] * bool(missing)
            raise UserError(f'init_from: {"; ".join(said)}\nthe model in the configuration is another one')
        for path, ours in self.shapes.items():
            found = theirs.get(path, theirs.get('embed'))
            grows = path in SIZED_BY_VOCABULARY and found and ours[0] >= found[0] and ours[1:] == found[1:]
            if found != ours and not grows:
                raise UserError(
                    f'init_from: {path} is {list(found or ())} in {start.place}, and the model makes it {list(ours)}\n'
                    'give model: the sizes of the checkpoint, or leave them out'
                )
        if self.unties:
            say(f'init_from: the head of {start.place} is its embedding; here it begins as a copy of it')
        if vocab_size is not None and start.vocab_size is not None and vocab_size > start.vocab_size:
            say(
                f'init_from: the vocabulary grows from {start.vocab_size:,} to {vocab_size:,}; '
                'new tokens begin as the mean of the old ones'
            )

    def pieces(self, path: str) -> Iterator[Piece]:
        source = 'embed' if path == 'unembed' and self.unties else path
        for at, piece in self.start.pieces.pieces(source):
            yield at, self._filled(piece, self.shapes[path]) if path in SIZED_BY_VOCABULARY else piece

    def _filled(self, table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Rows of new tokens are the mean of the old ones, so that none is likelier than an old one. Hewitt 2021,
        nlp.stanford.edu/~johnhew/vocab-expansion.html. Rows that pad the vocabulary are 0."""
        old = self.start.vocab_size or len(table)
        new = self.vocab_size or old
        if table.shape == shape and new <= old:
            return table
        filled = np.zeros(shape, table.dtype)
        filled[: min(len(table), len(filled))] = table[: len(filled)]
        filled[old:new] = table[:old].mean(axis=0)
        return filled


def _place(pieces: Iterator[Piece], like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of pieces, of which each device gets its own slice."""
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
