"""`pretrax generate RUN_OR_CHECKPOINT --prompt ...`: text from a checkpoint of a run."""

import dataclasses
import math

import jax

from pretrax.errors import UserError
from pretrax.infer.sample import check_can_sample, sample
from pretrax.run.trained import open_trained


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
    if not math.isfinite(temperature):
        raise UserError(f'--temperature is {temperature}; expected a finite number, 0 or more')
    trained = open_trained(path)
    model, source = trained.run.recipe.model, trained.run.source
    check_can_sample(model, source)
    weights = trained.weights()
    choices = _Choices(tuple(prompts or ['']), tokens, temperature, top_k, top_p)
    with jax.set_mesh(trained.run.mesh):
        for text in sample(model, weights, source.tokenizer, choices, seed):
            print(text)
