"""Generate text with a trained model."""

import dataclasses
import math
from typing import Annotated

import typer

from pretrax.cli._arguments import RunOrCheckpoint
from pretrax.errors import UserError


@dataclasses.dataclass(frozen=True)
class _Choices:
    prompts: tuple[str, ...]
    tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


def generate(
    path: RunOrCheckpoint,
    prompt: Annotated[list[str] | None, typer.Option(help='Text to continue; may be repeated.')] = None,
    tokens: Annotated[int, typer.Option(min=1, help='Number of tokens to generate.')] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help='0: always the most likely token.')] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help='Sample from the k most likely tokens.')] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help='Sample from the most likely tokens of this total probability.'),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help='Seed of the sampling.')] = 0,
) -> None:
    if top_p is not None and top_p <= 0:
        raise UserError(f'--top-p is {top_p}; expected more than 0 and at most 1')
    if not math.isfinite(temperature):
        raise UserError(f'--temperature is {temperature}; expected a finite number, 0 or more')
    import jax

    from pretrax.infer.sample import check_can_sample, sample
    from pretrax.run.trained import open_trained

    trained = open_trained(path)
    model, source = trained.run.recipe.model, trained.run.source
    check_can_sample(model, source)
    weights = trained.weights()
    choices = _Choices(tuple(prompt or ['']), tokens, temperature, top_k, top_p)
    with jax.set_mesh(trained.run.mesh):
        for text in sample(model, weights, source.tokenizer, choices, seed):
            print(text)
