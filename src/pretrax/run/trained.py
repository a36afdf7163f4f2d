"""A run that was trained or imported before, opened again: to write text, to export it, to train on from it."""

import dataclasses
import hashlib
import pathlib
from typing import Any

import jax

from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description, restore
from pretrax.config import from_values
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.errors import UserError
from pretrax.huggingface.model import TOKENIZER
from pretrax.run.setup import Run, prepare


@dataclasses.dataclass(frozen=True)
class Trained:
    """One checkpoint of a run, and the run on the devices that are here."""

    run: Run
    directory: pathlib.Path  # `checkpoints`
    step: int
    description: dict[str, Any]

    @property
    def pieces(self) -> CheckpointWeights:
        """The weights, to be read a piece at a time."""
        return CheckpointWeights(self.directory, self.step)

    def weights(self) -> Any:
        """The weights on the devices."""
        with jax.set_mesh(self.run.mesh):
            return restore(self.directory, self.step, {'weights': self.run.like.weights})['weights']


def open_trained(path: str) -> Trained:
    """Opens `runs/<name>`, its `checkpoints`, or one of them, on any devices: what it was spread over does not matter.

    Raises:
        UserError: nothing of the kind is there, or its data or tokenizer is gone.
    """
    directory, step = find_checkpoint(pathlib.Path(path))
    description = read_description(directory, step)
    values = description['config'] | {'run_dir': str(directory.parent)}
    values['data'] = _tokens_of_the_run(values['data'], directory.parent / 'data', description)
    n = len(jax.devices())
    values['mesh'] = {('r' if jax.default_backend() == 'cpu' else 'd'): n}
    values['batch'] = values['batch'] | {'tokens': n * values['batch']['sequence_length'], 'micro': None}
    run = prepare(from_values(values), lambda text: None)
    wrote, reads = description.get('tokenizer'), getattr(getattr(run.source, 'tokenizer', None), 'sha256', None)
    if wrote and reads and wrote != reads:
        raise UserError(
            f'{directory.parent} was trained with another tokenizer than its data has now: the text has changed since\n'
            'bring the text back, or train a run on the new one'
        )
    return Trained(run, directory, step, description)


def _tokens_of_the_run(data: dict[str, Any], prepared: pathlib.Path, description: dict[str, Any]) -> dict[str, Any]:
    """The section `data`, with the tokens that the run was trained on in the place of the text they were made of.

    The text may have changed since, or be somewhere else; tokenised again it would give another tokenizer.
    """
    if data.get('text') is not None:
        for place in sorted(prepared.glob('tokens-*')):
            if open_split(place, 'train').fingerprint == description.get('data'):
                return {'name': data['name'], 'tokens': str(place)}
    return data


def tokenizer_of(run_dir: pathlib.Path, description: dict[str, Any]) -> bytes | None:
    """The content of the tokenizer.json that a run was trained with, where it has one."""
    sha256 = description.get('tokenizer')
    found = [run_dir / 'data' / TOKENIZER, *sorted((run_dir / 'data').glob(f'*/{TOKENIZER}'))]
    contents = [path.read_bytes() for path in found if path.is_file()]
    return next((c for c in contents if sha256 in (None, hashlib.sha256(c).hexdigest())), None)
