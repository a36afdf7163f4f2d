"""Token ids from token ids: one call for a list of prompts, when no server is needed."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from pretrax.errors import UserError
from pretrax.infer.engine import Engine
from pretrax.infer.programs import EngineOptions, programs_of
from pretrax.infer.request import Request, check_positions
from pretrax.infer.sampling_settings import Sampling
from pretrax.model.base import Model

_SLOTS = 8
_MULTIPLE = 64  # few different lengths, few compilations


def generate(
    model: Model,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Continues each prompt by up to `tokens` token ids. The same seed gives the same text on any mesh.

    The decoder caches keys and values; for every other model the whole sequence is computed again for each token.

    Args:
        model: any model that gives logits.
        weights: its weights, on any mesh.
        prompts: token ids, at least one in each.
        tokens: how many to add at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: choose among the k likeliest.
        top_p: choose among the likeliest that together have probability p. Holtzman et al. 2020, arXiv:1904.09751.
        seed: seed of the choices.
        stop_ids: tokens that end a text.

    Raises:
        UserError: an empty prompt, a sequence longer than the model can read, or a model without logits.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError('a prompt is empty\ngive at least one token to continue')
    longest = max(map(len, prompts))
    check_positions(longest, tokens, model.max_length)
    slots = min(1 << (len(prompts) - 1).bit_length(), _SLOTS)
    engine = open_engine(model, weights, max_length=longest + tokens, slots=slots)
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    texts: dict[int, list[int]] = {}
    for choice, prompt in enumerate(prompts):
        request = Request(
            prompt=tuple(prompt), max_tokens=tokens, sampling=how, choice=choice, stop_ids=tuple(stop_ids)
        )
        texts[engine.add(request)] = []
    while not engine.idle:
        for update in engine.step():
            texts[update.number] += [token.id for token in update.tokens]
    return list(texts.values())


def open_engine(model: Model, weights: Any, *, max_length: int, slots: int, weights_step: int | None = None) -> Engine:
    """An engine whose programs are compiled when they are first needed.

    Args:
        model: any model that gives logits.
        weights: its weights, on any mesh.
        max_length: the most tokens of a prompt and its answer; rounded up if the model can read more.
        slots: how many answers are written at once.
        weights_step: training step of the weights.
    """
    length = min(_MULTIPLE * math.ceil(max_length / _MULTIPLE), model.max_length or math.inf)
    mesh = jax.tree.leaves(weights)[0].sharding.mesh
    programs = programs_of(model, mesh, EngineOptions(max_length=int(length), slots=slots))
    return Engine(programs, weights, weights_step, warm_up=False)
