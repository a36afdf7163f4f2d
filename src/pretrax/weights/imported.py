"""A Hugging Face checkpoint written as a run of pretrax. One tensor at a time is in memory."""

import contextlib
import functools
import itertools
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from pretrax import __version__
from pretrax.checkpoint import StreamedArray, steps_in, write_streamed
from pretrax.config import from_values, resolved_yaml, written_values
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import contradiction, end_tokens
from pretrax.errors import UserError
from pretrax.huggingface.files import not_finite_text
from pretrax.huggingface.model import GENERATION, KEPT, SETTINGS, SPECIAL, TOKENIZER, HuggingFaceModel, open_model
from pretrax.model.option_names import nest
from pretrax.run.devices import available_devices
from pretrax.run.setup import prepare
from pretrax.storage import AnyPath, locate, locate_run
from pretrax.storage.staging import written_directory
from pretrax.system.trusted import copy_file
from pretrax.weights.origin import shapes_of
from pretrax.weights.saved import HF

LONGEST = 1024  # tokens of a sequence of a run that continues, unless the model allows fewer


def import_checkpoint(
    place: str, out: str | None, begin_of_text: bool | str | None = None, allow_not_finite: bool = False
) -> tuple[AnyPath, int]:
    """Writes the run and prints notes on its files. Returns its directory and its number of parameters.

    Args:
        place: a directory, or org/name[@revision] on the hub.
        out: directory of the run; None: runs/NAME.
        begin_of_text: as in `Tokenizer.begin_with`.
        allow_not_finite: import weights with numbers that are NaN or infinite, which are then only reported.

    Raises:
        UserError: there is no checkpoint, its model is not supported, its files are damaged, or numbers are not finite;
            or there is no such token.
    """
    model = open_model(place)
    directory = locate(out or f'runs/{_name(place)}')
    if steps_in(directory / 'checkpoints'):
        raise UserError(f'{directory} already has checkpoints\ngive another --out, or remove it')
    for note in model.notes:
        print(note)
    with written_directory(directory) as local:
        new = not local.exists()
        try:
            count = _write(model, place, local, directory, begin_of_text, allow_not_finite)
        except BaseException:
            if new:  # so that the next attempt finds no partial run
                shutil.rmtree(local, ignore_errors=True)
            raise
    return directory, count


@contextlib.contextmanager
def run_of(place: str) -> Iterator[str]:
    """The run of a path: itself, or of a Hugging Face checkpoint (a directory, or hf:DIR_OR_ID) a temporary run."""
    if not place.startswith(HF):
        directory = locate_run(place)
        if not (directory / 'config.json').is_file() or (directory / 'checkpoints').exists():
            yield place
            return
        place = str(directory)
    place = place.removeprefix(HF)
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = f'{temporary}/{_name(place)}'
        with contextlib.redirect_stdout(sys.stderr):
            import_checkpoint(place, run_dir)
        yield run_dir


def _write(
    model: HuggingFaceModel,
    place: str,
    directory: pathlib.Path,
    run_dir: AnyPath,
    begin_of_text: bool | str | None,
    allow_not_finite: bool,
) -> int:
    """Writes the run, which will be at `run_dir`. Returns the number of parameters of its model."""
    found = model.weights(shapes_of(model.arch))  # raises at once if tensors are missing or have other shapes
    for note in found.notes:
        print(note)
    model.copy_files(directory / KEPT)
    (directory / 'data').mkdir(exist_ok=True)
    if (directory / KEPT / TOKENIZER).is_file():
        for name in (TOKENIZER, SETTINGS, SPECIAL, GENERATION):
            if (directory / KEPT / name).is_file():
                copy_file(name, directory / KEPT, directory / 'data')
    elif begin_of_text is not None:
        raise UserError(f'{place}: there is no {TOKENIZER}, so no token begins a text\nleave out --begin-of-text')
    else:
        print(f'there is no {TOKENIZER}: the weights can be trained and exported, but cannot generate text')
    values = _values(model, directory, begin_of_text)
    config = from_values(values)
    run = prepare(config, print)
    if (tokenizer := run.source.tokenizer) is not None:
        is_chosen = begin_of_text is not None
        says = '--begin-of-text says' if is_chosen else f'{TOKENIZER} says{contradiction(directory / KEPT, tokenizer)}'
        print(f'tokenizer: {tokenizer.shown_begin} begins a text, as {says}')
    config = from_values(values | {'run_dir': str(run_dir)})
    like = run.like.weights
    weights = model.weights(like)
    description = {
        'pretrax': __version__,
        'jax': jax.__version__,
        'config': written_values(config),
        'tokens': 0,
        'data': None,
        'tokenizer': run.source.tokenizer_sha256,
        'begin_of_text': run.source.tokenizer_begin,
        'vocab_size': model.arch.vocab_size,
        'imported': {'from': place, 'model_type': model.table.model_type, 'dtype': found.dtype},
    }
    streamed = {
        path: StreamedArray(shape, weights.counted(path), functools.partial(weights.pieces, path))
        for path, shape in weights.shapes.items()
    }
    write_streamed(directory / 'checkpoints', 0, streamed, description)
    if said := not_finite_text(weights.not_finite):
        if not allow_not_finite:
            shutil.rmtree(directory / 'checkpoints')
            raise UserError(
                f'{place}: {said}\nthe checkpoint may be damaged; to import it all the same: --allow-not-finite'
            )
        print(said)
    (directory / 'config.yaml').write_text(resolved_yaml(config))
    return run.n_params


def _values(model: HuggingFaceModel, directory: pathlib.Path, begin_of_text: bool | str | None) -> dict:
    """A configuration with the model and its tokenizer, but no text."""
    length = min(model.options.get('max_sequence_length') or LONGEST, LONGEST)
    has_tokenizer = (directory / 'data' / TOKENIZER).is_file()
    n = len(available_devices())
    data: dict[str, Any] = {'name': 'tokenizer'}
    if not has_tokenizer:
        data['vocab_size'] = model.options['vocab_size']
    elif ends := _end_tokens(directory, model.options['vocab_size']):
        data['end_of_text'] = ends[0]
    if begin_of_text is not None:
        data['begin_of_text'] = begin_of_text
    return {
        'name': _name(directory.name),
        'run_dir': str(directory),
        'steps': 1,
        'model': nest(model.options),
        'data': data,
        'batch': {'tokens': n * length, 'sequence_length': length},
        'optimizer': {'learning_rate': 1e-5},
    }


def _end_tokens(directory: pathlib.Path, n_tokens: int) -> tuple[int, ...]:
    """The tokens that end a text, according to the files of the checkpoint, which its tokenizer and its model have."""
    tokenizer = Tokenizer((directory / KEPT / TOKENIZER).read_bytes(), str(directory / KEPT / TOKENIZER), end_of_text=0)
    return tuple(
        token
        for token in end_tokens(directory / KEPT, tokenizer.token_id)
        if token < min(n_tokens, tokenizer.vocab_size)
    )


def _name(place: str) -> str:
    last = list(itertools.chain([''], filter(None, re.split(r'[/\\]', place.split('@')[0]))))[-1]
    return re.sub(r'[^A-Za-z0-9._-]+', '-', last).strip('.-')[:100] or 'imported'
