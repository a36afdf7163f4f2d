"""`pretrax generate RUN_OR_CHECKPOINT --prompt ...`: text from a checkpoint of a run."""

import dataclasses
import pathlib

import jax

from ..checkpoint import Checkpoints, read_description, steps_in
from ..config import from_values
from ..errors import UserError
from ..infer.sample import check_can_sample, sample
from ..train.setup import prepare
from ..train.step import abstract_state


@dataclasses.dataclass(frozen=True)
class _Choices:
    prompts: tuple[str, ...]
    tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


def generate(
    path: str, prompts: list[str], tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """Prints each prompt with its continuation."""
    if top_p is not None and top_p <= 0:
        raise UserError(f'--top-p is {top_p}; expected more than 0 and at most 1')
    directory, step = find_checkpoint(pathlib.Path(path))
    values = read_description(directory, step)['config'] | {'run_dir': str(directory.parent)}
    # Any devices will do to write text: what the training was spread over does not matter.
    n = len(jax.devices())
    values['mesh'] = {'r': 1, 'd': 1, 't': 1, ('r' if jax.default_backend() == 'cpu' else 'd'): n}
    values['batch'] = values['batch'] | {'tokens': n * values['batch']['sequence_length'], 'micro': None}
    run = prepare(from_values(values), say=lambda text: None)
    check_can_sample(run.recipe.model, run.source)
    checkpoints = Checkpoints(directory)
    with jax.set_mesh(run.mesh):
        state = checkpoints.restore(step, abstract_state(run.recipe))
        checkpoints.close()
        choices = _Choices(tuple(prompts or ['']), tokens, temperature, top_k, top_p)
        for text in sample(run.recipe.model, state.weights, run.source.tokenizer, choices, seed):
            print(text)


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
