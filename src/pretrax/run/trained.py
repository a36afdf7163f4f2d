"""Opens a run that was trained or imported before: to generate text, to export it, or to start another run from it."""

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description, restore
from pretrax.config import from_manifest
from pretrax.data.tokenizers.tokenizer import Tokenizer, tokens_before
from pretrax.data.tokenizers.tokenizer_files import end_tokens
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.errors import UserError
from pretrax.huggingface.model import KEPT, TOKENIZER
from pretrax.machine.atomic import write_file
from pretrax.machine.cache import cache_directory
from pretrax.run.devices import available_devices
from pretrax.run.setup import Run, prepare
from pretrax.storage import AnyPath, BucketPath, locate


@dataclasses.dataclass(frozen=True)
class Trained:
    """One checkpoint of a run, and the run on the devices that are here."""

    run: Run
    directory: AnyPath  # `checkpoints`
    step: int
    description: dict[str, Any]

    @property
    def pieces(self) -> CheckpointWeights:
        """The weights, read piece by piece."""
        return CheckpointWeights(self.directory, self.step)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text: that of the tokenizer, and those of the files that an import kept."""
        tokenizer = getattr(self.run.source, 'tokenizer', None)
        if tokenizer is None:
            return ()
        own = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
        kept = end_tokens(self.directory.parent / KEPT, tokenizer.token_id)
        n_tokens = min(tokenizer.vocab_size, self.run.recipe.model.vocab_size or tokenizer.vocab_size)
        return tuple(dict.fromkeys(token for token in (*own, *kept) if token < n_tokens))

    @property
    def length(self) -> int:
        """The tokens that the model reads: of an import its own length, of another run that of a sequence in training."""
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
        path: of the run or the checkpoint.
        mesh: sizes of mesh axes; None: all devices shard the weights, but on CPUs each has all of them.
        dtype: of activations and matrix products, as `precision.compute`; None: that of the run, but f32 on CPUs. They
            multiply a matrix by a vector in f32 faster than in bf16, and scores are then exact.

    Raises:
        UserError: there is no checkpoint, or the data or the tokenizer of the run is gone.
    """
    directory, step = find_checkpoint(locate(path))
    description = read_description(directory, step)
    values = description['config'] | {'run_dir': str(directory.parent)}
    if isinstance(directory, BucketPath):
        values |= _tokenizer_of_the_run(values['data'], directory.parent, description)
    else:
        values['data'] = _tokens_of_the_run(values['data'], directory.parent / 'data', description)
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
            f'{directory.parent} was trained with another tokenizer than its data has now: the text has changed since\n'
            'restore the text, or train a run on the new text'
        )
    if isinstance(run.source.tokenizer, Tokenizer):
        run.source.tokenizer.begin_of_text = begin_of_text(description, run.source.tokenizer.content)
    return Trained(run, directory, step, description)


def begin_of_text(description: dict[str, Any], tokenizer: bytes | None) -> tuple[int, ...]:
    """The ids that began the texts that a model was trained on.

    An older pretrax recorded none: texts began with what tokenizer.json adds if the model was imported, otherwise with nothing.

    Args:
        description: of a checkpoint.
        tokenizer: the content of its tokenizer.json.
    """
    if (recorded := description.get('begin_of_text')) is not None:
        return tuple(recorded)
    data = description['config'].get('data') or {}
    is_import = data.get('name') == 'tokenizer'
    return tokens_before(tokenizer, 'tokenizer.json') if is_import and tokenizer is not None else ()


def _tokens_of_the_run(data: dict[str, Any], prepared: pathlib.Path, description: dict[str, Any]) -> dict[str, Any]:
    """The section `data`, with the tokens that the run was trained on instead of the text.

    The text may have changed or moved since; tokenizing it again would train another tokenizer.
    """
    if data.get('text') is not None:
        for path in sorted(prepared.glob('tokens-*')):
            if open_split(path, 'train').fingerprint == description.get('data'):
                return {'name': data['name'], 'tokens': str(path)}
    return data


def _tokenizer_of_the_run(data: dict[str, Any], run_dir: BucketPath, description: dict[str, Any]) -> dict[str, Any]:
    """`run_dir` and `data` with the tokenizer of a run in a bucket. Its text may be on another machine."""
    is_tokenizer = data['name'] == 'tokenizer'
    content = tokenizer_of(run_dir, description) if is_tokenizer or data.get('text') is not None else None
    if content is None:
        return {}
    local = cache_directory() / 'tokenizers' / hashlib.sha256(content).hexdigest()
    (local / 'data').mkdir(parents=True, exist_ok=True)
    write_file(local / 'data' / TOKENIZER, content)
    return {'run_dir': str(local), 'data': data if is_tokenizer else {'name': 'tokenizer'}}


def tokenizer_of(run_dir: AnyPath, description: dict[str, Any]) -> bytes | None:
    """The content of the tokenizer.json that a run was trained with; None: it has none."""
    sha256 = description.get('tokenizer')
    data = run_dir / 'data'
    if isinstance(data, BucketPath):
        paths = [data / name for name in data.files() if name.rpartition('/')[2] == TOKENIZER]
    else:
        paths = [data / TOKENIZER, *sorted(data.glob(f'*/{TOKENIZER}'))]
    contents = [path.read_bytes() for path in paths if path.is_file()]
    return next((c for c in contents if sha256 in (None, hashlib.sha256(c).hexdigest())), None)
