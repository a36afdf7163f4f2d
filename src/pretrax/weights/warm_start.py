"""`init_from:` starts a run from the weights of another checkpoint: of Hugging Face (hf:DIR_OR_ID), or of a run.

Weights are read piece by piece and copied to the devices that the mesh assigns them to. No device and no host ever
holds all of them.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import tokenizers

from pretrax.checkpoint import is_stacked, restore
from pretrax.checkpoint.chunks import bounds
from pretrax.checkpoint.manifest import named_leaves
from pretrax.checkpoint.pieces import Piece
from pretrax.config import InitFrom
from pretrax.errors import Report, UserError
from pretrax.huggingface.files import not_finite_text
from pretrax.huggingface.model import KEPT, SETTINGS, TOKENIZER, kept_names
from pretrax.model.weights import MODULES, layers_with
from pretrax.run.directory import local_directory
from pretrax.run.processes import is_first_process
from pretrax.run.setup import Run
from pretrax.storage.staging import read_directory
from pretrax.system.json_file import read_settings
from pretrax.system.trusted import copy_file
from pretrax.train.state import at_owners, by_weight, init_state, initial_key
from pretrax.train.step import TrainState
from pretrax.weights.origin import Origin, check_same_model, open_origin, with_layers
from pretrax.weights.saved import HF

SIZED_BY_VOCABULARY = ('embed', 'unembed', 'unembed_bias')


def warm_state(start: str | InitFrom, run: Run, report: Report) -> TrainState:
    """The state that a run starts from, on its devices: a checkpoint's weights; optimizer and step if configured.

    Raises UserError if there is no checkpoint, its model or its sizes differ, its tokenizer is not that of the data, or
    numbers of a Hugging Face checkpoint are not finite.
    """
    start = InitFrom(path=start) if isinstance(start, str) else start
    asked = [key for key in ('optimizer', 'step') if getattr(start, key)]
    if asked and start.path.startswith(HF):
        raise UserError(f'init_from: {start.path} has only weights\nleave out init_from.{asked[0]}')
    arch = run.recipe.model.arch
    origin = open_origin(start.path, arch.multi_token.n_layers if arch else 0)
    if start.layers is not None:
        origin = with_layers(origin, start.layers)
        report(f'init_from: layers {list(start.layers)} of {start.path}')
    seed, recipe = run.recipe.seed, run.recipe
    if start.partial:
        drawn = init_state(recipe, seed).weights
        state = init_state(recipe, seed, partial_weights(origin, run, drawn, report))
    else:
        state = init_state(recipe, seed, start_weights(origin, run, report))
    fields = (['optimizer'] if start.optimizer else []) + (['step', 'batch'] if start.step else [])
    if fields:
        assert origin.saved is not None
        wanted = {field: like for field, like in run.like._asdict().items() if field in fields}
        restored = restore(origin.saved.directory, origin.saved.step, by_weight(wanted))
        state = state._replace(**at_owners(restored, wanted))
        if int(state.step) >= run.steps:
            raise UserError(
                f'init_from.step: {start.path} is at step {int(state.step)}, and steps = {run.steps} counts its steps '
                'too\n'
                'use a larger steps=, or leave out init_from.step'
            )
    if is_first_process():
        _keep_files(origin, run, report)
    optimizer = 'is restored' if start.optimizer else 'starts fresh'
    report(f'init_from: the weights of {start.path}; the optimizer {optimizer}; the next step is {int(state.step) + 1}')
    return state


def start_weights(origin: Origin, run: Run, report: Report) -> Any:
    """All weights of a run, from a checkpoint. Raises UserError as `warm_state` does.

    Weights that no checkpoint has for this model (`Model.uninherited`) are drawn.
    """
    model = run.recipe.model
    like: Any = run.like.weights
    check_tokenizer(origin, run.source.tokenizer, report)
    check_same_model(origin, run, False, report)
    drawn = {name: getattr(like, name) for name in model.uninherited}
    if drawn:
        like = dataclasses.replace(like, **dict.fromkeys(drawn))
    placed = placed_weights(origin, like, like, model.vocab_size, report)
    check_finite(origin, report)
    if not drawn:
        return placed

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        weights = model.init(key)
        return {name: getattr(weights, name) for name in drawn}

    shardings = {name: leaf.sharding for name, leaf in drawn.items()}
    return dataclasses.replace(placed, **jax.jit(draw, out_shardings=shardings)(initial_key(run.recipe.seed)))


def placed_weights(origin: Origin, weights: Any, like: Any, vocab_size: int | None, report: Report) -> Any:
    """All weights of a checkpoint on the devices.

    Args:
        weights: their shapes.
        like: their dtypes and shardings.
        vocab_size: rows of the vocabulary that are tokens, which may be more than in the checkpoint; None: as many.
        report: receives what was decided.

    Raises:
        UserError: the checkpoint has other weights, or other shapes.
    """
    fitted = _FittedPieces(origin, weights, vocab_size, report)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _place(fitted.pieces(_name(path)), leaf), like)


def partial_weights(origin: Origin, run: Run, drawn: Any, report: Report) -> Any:
    """Drawn weights, except those that a checkpoint has with the same name and shape.

    The first layers of a stacked weight may come from a checkpoint that has fewer or more layers.

    Raises UserError if no weight fits, or as `warm_state`.
    """
    differences: list[str] = []
    check_same_model(origin, run, True, differences.append)
    ours = {name: leaf.shape for name, leaf in named_leaves(drawn)}
    fits = {name: layers for name, shape in ours.items() if (layers := _fitting(name, shape, origin, run))}
    if not fits:
        raise UserError(f'init_from: no weight of {origin.place} has the name and shape of a weight of the model')
    if set(SIZED_BY_VOCABULARY) & fits.keys():
        check_tokenizer(origin, run.source.tokenizer, report)
    _report_partial(origin, ours, fits, report)

    def choose(path: Any, leaf: Any) -> Any:
        name = _name(path)
        if name not in fits:
            return leaf
        layers = fits[name]
        found = (
            ((layers[at[0]], *at[1:]) if at else at, piece)
            for at, piece in origin.pieces.pieces(name)
            if not at or at[0] in layers
        )
        return _place(found, leaf, leaf if is_stacked(name, leaf.shape) else None)

    placed = jax.tree_util.tree_map_with_path(choose, drawn)
    check_finite(origin, report)
    for line in differences:  # last, behind a line for each weight
        report(line)
    return placed


def _fitting(name: str, shape: tuple[int, ...], origin: Origin, run: Run) -> dict[int, int]:
    """Which rows of a weight are which in the model, by their numbers; {} if the weight does not fit.

    A row of a weight that is stacked is a layer that has it; one that is not stacked is one row.
    """
    there = origin.pieces.shapes.get(name)
    if there is None or not is_stacked(name, shape):
        rows = range(shape[0] if name.startswith(MODULES) else 1)
        return {row: row for row in rows} if there == shape else {}
    if there[1:] != shape[1:]:
        return {}
    arch = getattr(run.recipe.model, 'arch', None)
    theirs, ours = (
        range(rows) if one is None else layers_with(one, name.removeprefix('layers.'))
        for one, rows in ((origin.arch if arch else None, there[0]), (arch if origin.arch else None, shape[0]))
    )
    return {theirs.index(layer): row for row, layer in enumerate(ours) if layer in theirs}


def _report_partial(
    origin: Origin, ours: dict[str, tuple[int, ...]], fits: dict[str, dict[int, int]], report: Report
) -> None:
    theirs, place = origin.pieces.shapes, origin.place
    stacked = [name for name in fits if is_stacked(name, ours[name])]
    taken = sum(
        math.prod(ours[name]) // (ours[name][0] if name in stacked else 1) * len(rows) for name, rows in fits.items()
    )
    whole = sum(map(math.prod, ours.values()))
    report(f'init_from: {len(fits)} of {len(ours)} weights, {taken:,} of {whole:,} numbers, are from {place}')
    for count, layers in sorted({(len(fits[name]), ours[name][0]) for name in stacked}):
        if count < layers:
            report(f'init_from: {count} of {layers} layers are from {place}, and the others are drawn')
    for count, layers in sorted({(len(fits[name]), theirs[name][0]) for name in stacked}):
        if count < layers:
            report(f'init_from: {count} of the {layers} layers of {place} are used')
    for name in ours.keys() - fits.keys():
        there = f'{list(theirs[name])} there' if name in theirs else 'missing there'
        report(f'init_from: {name} is drawn: {list(ours[name])} here, {there}')
    for name in theirs.keys() - ours.keys():
        report(f'init_from: {name} of {place} is not used: the model has no such weight')


def check_finite(origin: Origin, report: Report) -> None:
    """Reports numbers that are NaN or infinite. From Hugging Face they are refused: no run of this user made them."""
    if said := not_finite_text(origin.pieces.not_finite):
        if origin.is_hugging_face:
            raise UserError(
                f'{origin.key}: {origin.place}: {said}\n'
                'if they are on purpose: pretrax import --allow-not-finite, and use that run'
            )
        report(f'{origin.key}: {origin.place}: {said}')


def _keep_files(origin: Origin, run: Run, report: Report) -> None:
    """Copies what belongs to the tokenizer, such as chat templates, into the run, for generation and for an export.

    If the tokenizer differs from that of the run, only the chat templates and the settings of generation are kept.
    """
    with read_directory(origin.files) as files:
        names = kept_names(files) if files.is_dir() else []
        if not names:
            return
        kept = local_directory(run.run_dir) / KEPT
        content = getattr(run.source.tokenizer, 'content', None)
        same = content is not None and (files / TOKENIZER).is_file() and (files / TOKENIZER).read_bytes() == content
        kept_now = names if same else kept_names(files, of_any_tokenizer=True)
        settings = read_settings(files / SETTINGS) if not same else {}
        if isinstance(settings.get('chat_template'), str) and 'chat_template.jinja' not in kept_now:
            kept.mkdir(parents=True, exist_ok=True)
            (kept / 'chat_template.jinja').write_text(settings['chat_template'])
        for name in kept_now:
            copy_file(name, files, kept)
        report(f'init_from: kept for generation and export: {", ".join(kept_now)}')


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='.')


def check_tokenizer(start: Origin, ours: Any, report: Report) -> None:
    """Raises UserError if an id is another token in each tokenizer. Reports if texts begin differently."""
    content = getattr(ours, 'content', None)
    if content is not None and start.tokenizer is not None and ours.begin_of_text != start.begin_of_text:
        report(
            f'{start.key}: texts begin with {ours.shown(start.begin_of_text) or "nothing"} in {start.place}, and with '
            f'{ours.shown_begin} in the data, which the weights then learn; data.begin_of_text chooses'
        )
    if content is None or (start.tokenizer is None and start.tokenizer_sha256 is None):
        report(
            f'{start.key}: cannot compare the tokenizer with that of {start.place}: one of them has no tokenizer.json'
        )
        return
    if ours.sha256 == (start.tokenizer_sha256 or hashlib.sha256(start.tokenizer or b'').hexdigest()):
        return
    if start.tokenizer is None:
        raise UserError(
            f'{start.key}: {start.place} was trained with another tokenizer (sha256 {start.tokenizer_sha256}), '
            f'and the data with {ours.sha256}\nuse its tokenizer.json: data.tokenizer=PATH'
        )
    readers = map(tokenizers.Tokenizer.from_buffer, (start.tokenizer, content))
    before, now = ({number: token for token, number in r.get_vocab(with_added_tokens=True).items()} for r in readers)
    differ = sorted(number for number in before.keys() & now.keys() if before[number] != now[number])
    if differ:
        raise UserError(
            f'{start.key}: {start.place} was trained with another tokenizer: {len(differ):,} ids are other tokens,\n'
            f'for example id {differ[0]}: {before[differ[0]]!r} there, {now[differ[0]]!r} in the data\n'
            'use its tokenizer.json: data.tokenizer=PATH'
        )
    report(
        f'{start.key}: the tokenizer of {start.place} is another file, but the {len(before.keys() & now.keys()):,} '
        'tokens agree'
    )


class _FittedPieces:
    """The pieces of a start, with shapes checked against the weights of the run. A smaller vocabulary is extended."""

    def __init__(self, start: Origin, like: Any, vocab_size: int | None, report: Report):
        self.start, self.vocab_size = start, vocab_size
        self.shapes = {name: leaf.shape for name, leaf in named_leaves(like)}
        theirs = start.pieces.shapes
        self.unties = 'unembed' in self.shapes and 'unembed' not in theirs and 'embed' in theirs
        left_out = [name for name in theirs if name.startswith(MODULES) and name not in self.shapes]
        if left_out:
            report(
                f'{start.key}: multi-token prediction of {start.place} is not used, because of '
                'model.multi_token.n_layers'
            )
        more = sorted(set(theirs) - set(self.shapes) - set(left_out))
        missing = sorted(set(self.shapes) - set(theirs) - ({'unembed'} if self.unties else set()))
        if more or missing:
            problems = [f'{start.place} has {name}, and the model does not' for name in more[:1]]
            problems += [f'the model has {name}, and {start.place} does not' for name in missing[:1]]
            drawn = missing and not more and all(name.startswith(MODULES) for name in missing)
            other = ', or init_from.partial, which draws what is missing' if drawn else ''
            raise UserError(f'{start.key}: {"; ".join(problems)}\nuse the model: section of that checkpoint{other}')
        for path, ours in self.shapes.items():
            shape = theirs.get(path, theirs.get('embed'))
            grows = path in SIZED_BY_VOCABULARY and shape and ours[0] >= shape[0] and ours[1:] == shape[1:]
            if shape != ours and not grows:
                raise UserError(
                    f'{start.key}: {path} is {list(shape or ())} in {start.place}, but {list(ours)} in the model\n'
                    'use the sizes of the checkpoint in model:, or leave them out'
                )
        if self.unties:
            report(
                f'{start.key}: {start.place} shares its embedding with its unembedding; here the unembedding starts '
                'as a copy'
            )
        if vocab_size is not None and start.vocab_size is not None and vocab_size > start.vocab_size:
            report(
                f'{start.key}: the vocabulary grows from {start.vocab_size:,} to {vocab_size:,}; '
                'new tokens start as the mean of the old ones'
            )

    def pieces(self, path: str) -> Iterator[Piece]:
        source = 'embed' if path == 'unembed' and self.unties else path
        for at, piece in self.start.pieces.pieces(source):
            yield at, self._filled(piece, self.shapes[path]) if path in SIZED_BY_VOCABULARY else piece

    def _filled(self, table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A table with rows for new tokens: the mean of the old rows, so that none is likelier than an old one.

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


def _place(pieces: Iterator[Piece], like: Any, drawn: jax.Array | None = None) -> jax.Array:
    """An array from its pieces, and from `drawn` where there are none; each device gets its own slice."""
    sharding: Any = like.sharding
    indices = {bounds(index, like.shape) for index in sharding.addressable_devices_indices_map(like.shape).values()}
    held = {key: np.empty([stop - start for start, stop in key], like.dtype) for key in indices}
    for shard in drawn.addressable_shards if drawn is not None else ():
        held[bounds(shard.index, like.shape)][...] = shard.data
    for at, piece in pieces:
        for key, slices in held.items():
            inside = all(start <= number < stop for number, (start, stop) in zip(at, key, strict=False))
            if inside:
                own = tuple(number - start for number, (start, _) in zip(at, key, strict=False))
                slices[own] = piece[tuple(slice(*part) for part in key[len(at) :])]
    return jax.make_array_from_callback(like.shape, sharding, lambda index: held[bounds(index or (), like.shape)])
