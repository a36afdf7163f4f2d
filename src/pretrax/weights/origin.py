"""Where `init_from:` takes weights from: a checkpoint of Hugging Face or of a run, read piece by piece."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from pretrax.checkpoint import is_stacked
from pretrax.checkpoint.pieces import Piece
from pretrax.data.tokenizers.tokenizer import tokens_before
from pretrax.errors import Report, UserError
from pretrax.huggingface.configs import compare
from pretrax.huggingface.model import TOKENIZER, open_model
from pretrax.model.architecture import Architecture, keys_that_change, resolve
from pretrax.model.axes import AXES
from pretrax.model.transformer import Transformer
from pretrax.model.weights import abstract_weights, layers_with
from pretrax.run.setup import Run
from pretrax.storage import AnyPath
from pretrax.weights.saved import HF, SavedModel, open_saved

# Options of the architecture that may change between a checkpoint and the run that starts from it: any value of them
# works with the same weights, and a difference is reported. So may those that only training uses
# (`configs.NOT_COMPUTED`).
FREE = keys_that_change('forward')
# The others decide which weights there are, their sizes or their meaning, and must be equal. layer_types must if it
# changes what mixes the tokens of a layer, and not if it changes only its window.


class Pieces(Protocol):
    """Weights that can be read piece by piece.

    Attributes:
        shapes: of each weight, by path.
        not_finite: how many numbers of what has been read so far are NaN or infinite, by name.
    """

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def not_finite(self) -> dict[str, int]: ...

    def pieces(self, path: str) -> Iterator[Piece]: ...


@dataclasses.dataclass(frozen=True)
class Origin:
    """Weights to start from."""

    place: str  # as configured
    pieces: Pieces  # the weights
    arch: Architecture | None  # the architecture of the decoder; None: the model is another one
    model: Mapping[str, Any]  # the section `model` that the checkpoint was trained with; {} for one of Hugging Face
    vocab_size: int | None  # rows of the vocabulary that are tokens
    tokenizer: bytes | None  # content of tokenizer.json
    tokenizer_sha256: str | None  # of a tokenizer whose content is gone
    begin_of_text: tuple[int, ...]  # the ids that began the texts of its training
    files: AnyPath  # directory with the other files of the tokenizer and of generation; it may not exist
    notes: tuple[str, ...] = ()  # what was not taken over
    key: str = 'init_from'  # of the configuration, that names it
    saved: SavedModel | None = None  # the checkpoint of a run; None: it is one of Hugging Face

    @property
    def is_hugging_face(self) -> bool:
        return self.place.startswith(HF)


def open_origin(place: str, mtp_layers: int = 0, key: str = 'init_from') -> Origin:
    """Opens hf:DIR_OR_ID, with up to `mtp_layers` modules of multi-token prediction, or a run. Reads no weight.

    Raises UserError if there is no checkpoint, or its model is unknown.
    """
    origin = _hugging_face(place, mtp_layers) if place.startswith(HF) else _own(place, key)
    return dataclasses.replace(origin, key=key)


def with_layers(origin: Origin, layers: Sequence[int]) -> Origin:
    """The weights of a decoder that has only these layers of another one, in this order.

    Raises UserError if there is no such layer, or the layers are of other kinds than those of a decoder with this
    number of layers.
    """
    key, arch = f'{origin.key}.layers', origin.arch
    if arch is None:
        raise UserError(f'{key}: {origin.place} is not a decoder of pretrax\nleave it out')
    if beyond := [layer for layer in layers if layer >= arch.n_layers]:
        raise UserError(
            f'{key}: {origin.place} has no layer {beyond[0]}; its layers are 0 to {arch.n_layers - 1}\n'
            f'choose some of these'
        )
    fewer = arch.replace({'n_layers': len(layers)})
    wrong = [i for i, layer in enumerate(layers) if arch.kinds[layer] != fewer.kinds[i]]
    if wrong:
        raise UserError(
            f'{key}: layer {layers[wrong[0]]} of {origin.place} is of another kind than layer {wrong[0]} of the model '
            'has to be\n'
            'choose layers that repeat the pattern of its kinds'
        )
    return dataclasses.replace(origin, arch=fewer, pieces=_ChosenLayers(origin.pieces, arch, layers))


class _ChosenLayers:
    """Weights with some of the layers."""

    def __init__(self, pieces: Pieces, arch: Architecture, layers: Sequence[int]):
        self._pieces, self._rows = pieces, {}
        self.shapes = dict(pieces.shapes)
        for path, shape in pieces.shapes.items():
            if is_stacked(path, shape):
                known = layers_with(arch, path.removeprefix('layers.'))
                self._rows[path] = [known.index(layer) for layer in layers if layer in known]
                self.shapes[path] = (len(self._rows[path]), *shape[1:])

    @property
    def not_finite(self) -> dict[str, int]:
        return self._pieces.not_finite

    def pieces(self, path: str) -> Iterator[Piece]:
        for at, piece in self._pieces.pieces(path):
            if path not in self._rows:
                yield at, piece
                continue
            for row, there in enumerate(self._rows[path]):
                if there == at[0]:
                    yield (row, *at[1:]), piece


def _hugging_face(place: str, mtp_layers: int) -> Origin:
    model = open_model(place.removeprefix(HF)).with_modules(mtp_layers)
    file = model.directory / TOKENIZER
    content = file.read_bytes() if file.is_file() else None
    weights = model.weights(shapes_of(model.arch))
    return Origin(
        place=place,
        pieces=weights,
        arch=model.arch,
        model={},
        vocab_size=model.arch.vocab_size,
        tokenizer=content,
        tokenizer_sha256=None,
        begin_of_text=() if content is None else tokens_before(content, str(file)),
        files=model.directory,
        notes=(*model.notes, *weights.notes),
    )


def shapes_of(arch: Architecture) -> Any:
    """Arrays with the shapes of the weights. The mesh of the run may not divide them, so they are on one device."""
    one = Mesh(np.array(jax.local_devices()[:1]).reshape((1,) * len(AXES)), AXES)
    with jax.set_mesh(one):
        return abstract_weights(arch)


def _own(place: str, key: str) -> Origin:
    saved = open_saved(place)
    weights, content = saved.pieces, saved.tokenizer()
    arch = None
    if saved.is_decoder and 'embed' in weights.shapes:
        options = saved.options(f'{key}: {place}')
        arch = resolve(options, weights.shapes['embed'][0], 1)  # sizes that the options lack
    return Origin(
        place=place,
        pieces=weights,
        arch=arch,
        model=saved.section or {},
        vocab_size=saved.description.get('vocab_size'),
        tokenizer=content,
        tokenizer_sha256=saved.description.get('tokenizer'),
        begin_of_text=saved.begin_of_text(content),
        files=saved.kept,
        saved=saved,
    )


def check_same_model(origin: Origin, run: Run, partial: bool, report: Report) -> None:
    """Compares the model of a run with the one that the weights were trained in.

    What changes the sizes or the meaning of weights is refused, unless only the weights that fit are taken. What else
    differs is reported: any value of it works with the same weights. Raises UserError if they are other models.
    """
    for note in origin.notes:
        report(f'init_from: {note}')
    name = run.config.model.name
    ours = run.recipe.model.arch if isinstance(run.recipe.model, Transformer) else None
    if origin.arch is None or ours is None:
        if origin.is_hugging_face:
            raise UserError(f'init_from: {origin.place} is a decoder of pretrax, but model.name is {name}')
        _report_options(origin, run, report)
        return
    differences = compare(origin.arch, ours, f'in {origin.place}', 'in the configuration')
    allowed = {'vocab_size', 'padded_vocab_size'} if ours.vocab_size > origin.arch.vocab_size else set()
    allowed |= {'max_sequence_length'} if ours.positions != 'learned' else set()
    allowed |= {'embedding.tied'} if origin.arch.embedding.tied and not ours.embedding.tied else set()
    same_mixers = [kind.mixer for kind in origin.arch.kinds] == [kind.mixer for kind in ours.kinds]
    same_heads = [kind.own_heads for kind in origin.arch.kinds] == [kind.own_heads for kind in ours.kinds]
    free = FREE | ({'layer_types'} if same_mixers and same_heads else set())
    if len(origin.arch.kinds) == len(ours.kinds) and not same_heads:  # they say which layers have which weights
        free -= {'attention.window', 'attention.global_every'}
    shaping = [name for name in differences if name not in allowed | free]
    if shaping and not partial:
        options: Any = run.config.model.options
        given = options.dotted()
        left_out = f'model.{shaping[0]}' if shaping[0] in given else 'the keys of model:'
        raise UserError(
            f'init_from: model.{shaping[0]} differs: {differences[shaping[0]]}\n'
            f'leave out {left_out}, to use what the checkpoint has; or take only the weights that fit: '
            'init_from.partial'
        )
    for name, what in differences.items():
        if name not in allowed:
            report(f'init_from: model.{name} differs: {what}')


def _report_options(origin: Origin, run: Run, report: Report) -> None:
    """Reports the options of `model:` that differ, of a model that is not the decoder."""
    section = run.config.model.model_dump(mode='json')
    ours = {key: value for key, value in section.items() if value is not None}
    for key in sorted(ours.keys() | origin.model.keys()):
        there, here = origin.model.get(key), ours.get(key)
        if there != here:
            report(f'init_from: model.{key} differs: {there} in {origin.place}, {here} in the configuration')
