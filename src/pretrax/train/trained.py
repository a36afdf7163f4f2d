"""A run that was trained or imported before, opened again: to write text, to export it, to train on from it."""

import dataclasses
import pathlib
from typing import Any

import jax

from ..checkpoint import Checkpoints, CheckpointWeights, read_description, steps_in
from ..config import from_values
from ..data.flat_tokens import open_split
from ..errors import UserError
from .setup import Run, prepare


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
        checkpoints = Checkpoints(self.directory)
        with jax.set_mesh(self.run.mesh):
            try:
                return checkpoints.restore(self.step, {'weights': self.like()})['weights']
            finally:
                checkpoints.close()

    def like(self) -> Any:
        """Shapes and shardings of the weights."""
        return abstract_weights(self.run)


def abstract_weights(run: Run) -> Any:
    """Shapes and shardings of the weights of a run."""
    from .step import abstract_state

    with jax.set_mesh(run.mesh):
        return abstract_state(run.recipe).weights


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
    run = prepare(from_values(values), say=lambda text: None)
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


def find_checkpoint(path: pathlib.Path) -> tuple[pathlib.Path, int]:
    """The `checkpoints` directory and the step that a path means: a run, its checkpoints, or one of them.

    Raises:
        UserError: nothing of the kind is there.
    """
    if not path.is_dir():
        near = (
            sorted(sibling.name for sibling in path.parent.iterdir() if sibling.is_dir())
            if path.parent.is_dir()
            else []
        )
        raise UserError(f'{path}: no such run or checkpoint' + (f'\nthere are: {", ".join(near[:8])}' if near else ''))
    if path.name.isdigit() and path.parent.name == 'checkpoints':
        return path.parent, int(path.name)
    directory = path if path.name == 'checkpoints' else path / 'checkpoints'
    steps = steps_in(directory)
    if not steps:
        raise UserError(f'{path} has no checkpoint yet\ntrain it first, or give a run such as runs/quickstart')
    return directory, steps[-1]
