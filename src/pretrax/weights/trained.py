"""Opens a run that was trained or imported before: to generate text, to export it, or to start another run from it."""

import dataclasses
import hashlib
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pretrax.checkpoint import read_description, restore, steps_in
from pretrax.config import from_manifest
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import end_tokens
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.errors import Report, UserError, first_line
from pretrax.huggingface.model import TOKENIZER
from pretrax.run.devices import available_devices
from pretrax.run.setup import Run, prepare
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.atomic import write_file
from pretrax.system.cache import cache_directory
from pretrax.weights.saved import SavedModel, open_saved


@dataclasses.dataclass(frozen=True)
class Trained(SavedModel):
    """One checkpoint of a run, and the run on the devices that are here."""

    run: Run

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text: that of the tokenizer, and those of the files that an import kept."""
        tokenizer = getattr(self.run.source, 'tokenizer', None)
        if tokenizer is None:
            return ()
        own = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
        kept = end_tokens(self.kept, tokenizer.token_id)
        n_tokens = min(tokenizer.vocab_size, self.run.recipe.model.vocab_size or tokenizer.vocab_size)
        return tuple(dict.fromkeys(token for token in (*own, *kept) if token < n_tokens))

    @property
    def length(self) -> int:
        """The tokens that the model reads: of an import its own length, otherwise a sequence in training."""
        if 'imported' in self.description and (arch := getattr(self.run.recipe.model, 'arch', None)) is not None:
            return arch.max_sequence_length
        return self.run.size.sequence_length

    def at(self, step: int) -> 'Trained':
        """Another checkpoint of the run."""
        return dataclasses.replace(self, step=step, description=read_description(self.directory, step))

    def weights(self) -> Any:
        """The weights on the devices."""
        with jax.set_mesh(self.run.mesh):
            return restore(self.directory, self.step, {'weights': self.run.like.weights})['weights']


def open_trained(path: str, mesh: Mapping[str, int] | None = None, dtype: str | None = None) -> Trained:
    """Opens `runs/<name>`, its `checkpoints`, or one of them, on the devices of this machine.

    Args:
        mesh: sizes of mesh axes; None: all devices shard the weights, but on CPUs each has all of them.
        dtype: of activations and matrix products, as `precision.compute`; None: that of the run, but f32 on CPUs. They
            multiply a matrix by a vector in f32 faster than in bf16, and scores are then exact.

    Raises:
        UserError: there is no checkpoint, or the data or the tokenizer of the run is gone.
    """
    saved = open_saved(path)
    description, run_dir = saved.description, saved.run_dir
    values = description['config'] | {'run_dir': str(run_dir)}
    if isinstance(run_dir, BucketPath):
        values |= _tokenizer_of_the_run(values['data'], saved)
    else:
        values['data'] = _tokens_of_the_run(values['data'], run_dir / 'data', description)
    devices = available_devices()
    on_cpus = devices[0].platform == 'cpu'
    if mesh is None:
        mesh = {('r' if on_cpus else 'd'): len(devices)}
    values['mesh'] = dict(mesh)
    if dtype := dtype or ('f32' if on_cpus else None):
        values['precision'] = (values.get('precision') or {}) | {'compute': dtype}
    values['distill'] = None  # only training needs the teacher, which may be gone
    rows = math.prod(mesh.values())
    length = from_manifest(values).batch.largest.sequence_length
    values['batch'] = {'tokens': rows * length, 'sequence_length': length}
    run = prepare(from_manifest(values), lambda text: None)
    trained_with = description.get('tokenizer')
    current = run.source.tokenizer_sha256
    if trained_with and current and trained_with != current:
        raise UserError(
            f'{run_dir} was trained with another tokenizer than its data has now: the text has changed since\n'
            'restore the text, or train a run on the new text'
        )
    if isinstance(run.source.tokenizer, Tokenizer):
        run.source.tokenizer.begin_of_text = saved.begin_of_text(run.source.tokenizer.content)
    return Trained(**vars(saved), run=run)


def _tokens_of_the_run(data: dict[str, Any], prepared: pathlib.Path, description: dict[str, Any]) -> dict[str, Any]:
    """The section `data`, with the tokens that the run was trained on instead of the text.

    The text may have changed or moved since; tokenizing it again would train another tokenizer.
    """
    if data.get('text') is not None:
        for path in sorted(prepared.glob('tokens-*')):
            if open_split(path, 'train').fingerprint == description.get('data'):
                return {'name': data['name'], 'tokens': str(path)}
    return data


def _tokenizer_of_the_run(data: dict[str, Any], saved: SavedModel) -> dict[str, Any]:
    """`run_dir` and `data` with the tokenizer of a run in a bucket. Its text may be on another machine."""
    is_tokenizer = data['name'] == 'tokenizer'
    content = saved.tokenizer() if is_tokenizer or data.get('text') is not None else None
    if content is None:
        return {}
    local = cache_directory() / 'tokenizers' / hashlib.sha256(content).hexdigest()
    (local / 'data').mkdir(parents=True, exist_ok=True)
    write_file(local / 'data' / TOKENIZER, content)
    return {'run_dir': str(local), 'data': data if is_tokenizer else {'name': 'tokenizer'}}


POLL_SECONDS, POLL_BUCKET_SECONDS = 1.0, 15.0


def follow(trained: Trained, use: Callable[[Any, int], None], report: Report, stop: threading.Event) -> None:
    """Calls `use` with the weights and the step of each checkpoint that is the newest of its run, until it is stopped.

    A checkpoint that cannot be read, for example since it has just been removed, is reported once; the weights in use
    stay, and the next checkpoint is tried. The same holds for one with another model or tokenizer, which another run
    has written.

    Args:
        use: takes the weights, on the devices.
        stop: ends it, also between two looks.
    """
    failed, held = None, trained.step  # held: the step of the weights in use, if its run still has it
    seconds = POLL_BUCKET_SECONDS if isinstance(trained.directory, BucketPath) else POLL_SECONDS
    while not stop.wait(seconds):
        try:
            steps = steps_in(trained.directory)
            if held not in steps:
                held = None  # removed; a checkpoint of the same step is another one
            if not steps:
                raise FileNotFoundError(f'it has no checkpoint now; the weights of step {trained.step} stay in use')
            if steps[-1] == held:
                continue
            newest = trained.at(steps[-1])
            _check_same(trained, newest)
            use(newest.weights(), newest.step)
            trained, held, failed = newest, newest.step, None
        except Exception as error:  # files of another process: anything can be wrong with them for a moment
            reason = first_line(error) or repr(error)
            problem = f'{trained.directory}: cannot follow: {reason}'
            if problem != failed:
                report(problem)
            failed = problem


def _check_same(trained: Trained, newest: Trained) -> None:
    """Raises UserError if the programs or the tokenizer in use do not fit a checkpoint, for example of another run."""
    old, new = trained.description, newest.description
    parts = {
        'model': (old['config']['model'], new['config']['model']),
        'tokenizer': (old.get('tokenizer'), new.get('tokenizer')),
    }
    for part, (one, other) in parts.items():
        if one != other:
            raise UserError(f'step {newest.step} has another {part}; the weights of step {trained.step} stay in use')


def written_at(directory: AnyPath, step: int) -> int:
    """When a checkpoint was written, in seconds since 1970; in a bucket, now."""
    place = directory / str(step)
    return int(time.time() if isinstance(place, BucketPath) else place.stat().st_mtime)
