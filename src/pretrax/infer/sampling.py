"""How the next token of every slot is chosen, on the device. What the slots ask for are arrays: nothing is recompiled.

Letters: S slots, V columns of the logits (the vocabulary and its padding), N biased tokens.
These are global arrays under `jit`, sharded over the slots. A part that no slot asks for is skipped.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.infer.request import MAX_BIASED, MAX_LOGPROBS
from pretrax.infer.sampling_settings import Sampling
from pretrax.shardlib import bool_, f32, i32, pytree_dataclass, u32

_NO_TOKEN = np.iinfo(np.int32).max  # outside every vocabulary: dropped


@pytree_dataclass
class SlotSampling:
    """`request.Sampling` of every slot. `unused_slots` makes one, `slot_row` a row of it."""

    temperature: f32['S/r/d/e']
    top_k: i32['S/r/d/e']  # 0: all
    top_p: f32['S/r/d/e']
    min_p: f32['S/r/d/e']
    repetition_penalty: f32['S/r/d/e']
    presence_penalty: f32['S/r/d/e']
    frequency_penalty: f32['S/r/d/e']
    bias_ids: i32['S/r/d/e N']
    bias_values: f32['S/r/d/e N']
    seed: u32['S/r/d/e 2']  # the high and the low word
    choice: i32['S/r/d/e']


@pytree_dataclass
class Seen:
    """The tokens in the prompt and in the answer of every slot, for the penalties."""

    prompt: bool_['S/r/d/e V']
    answer: i32['S/r/d/e V']  # how often


def slot_row(how: Sampling, choice: int) -> SlotSampling:
    """A slot's row, in numpy."""
    ids, values = np.full(MAX_BIASED, _NO_TOKEN, np.int32), np.zeros(MAX_BIASED, np.float32)
    ids[: len(how.logit_bias)] = list(how.logit_bias.keys())
    values[: len(how.logit_bias)] = list(how.logit_bias.values())
    seed = how.seed % 2**64
    return SlotSampling(
        temperature=np.float32(how.temperature),
        top_k=np.int32(min(how.top_k or 0, _NO_TOKEN)),
        top_p=np.float32(1 if how.top_p is None else how.top_p),
        min_p=np.float32(how.min_p),
        repetition_penalty=np.float32(how.repetition_penalty),
        presence_penalty=np.float32(how.presence_penalty),
        frequency_penalty=np.float32(how.frequency_penalty),
        bias_ids=ids,
        bias_values=values,
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        choice=np.int32(choice),
    )


def unused_slots(slots: int) -> SlotSampling:
    """The rows of slots without a request, in numpy: greedy, for which the least is computed."""
    row = slot_row(Sampling(temperature=0), choice=0)
    return jax.tree.map(lambda x: np.tile(x, (slots, *[1] * np.ndim(x))), row)


def see_answer(seen: Seen, token: i32['S'], real: bool_['S']) -> Seen:
    """Counts a token of the answer of every slot for which it is real."""
    slot = jnp.arange(token.shape[0])
    answer = seen.answer.at[slot, jnp.where(real, token, _NO_TOKEN)].add(1, mode='drop')
    return dataclasses.replace(seen, answer=answer)


def is_penalized(how: SlotSampling) -> bool_['S']:
    """Whether the choice in a slot depends on the tokens before it."""
    return (how.repetition_penalty != 1) | (how.presence_penalty != 0) | (how.frequency_penalty != 0)


def choose(logits: f32['S V'], how: SlotSampling, seen: Seen, position: i32['S'], vocab_size: int) -> i32['S']:
    """Chooses a token in every slot.

    The randomness is a function of the slot's seed and choice and of `position`, never of the slot or of other slots.

    Args:
        logits: f32[S, V]. Columns from `vocab_size` on are padding and are never chosen.
        seen: tokens that the penalties apply to.
        position: position of the token that is chosen, in the prompt and its answer.
    """
    logits = _in_vocabulary(logits, vocab_size)
    logits = _if_any(how.bias_ids != _NO_TOKEN, functools.partial(_bias, how), logits)
    logits = _if_any(is_penalized(how), functools.partial(_penalize, how, seen), logits)
    likeliest = _likeliest(logits)
    random = how.temperature > 0
    draw = functools.partial(_draw, logits, how, position)
    token = _if_any(random, lambda greedy: jnp.where(random, draw(), greedy), likeliest)
    return jnp.minimum(token, vocab_size - 1)  # even of logits that are NaN


def log_probabilities(
    logits: f32['S V'], chosen: i32['S'], wanted: bool_['S'], vocab_size: int
) -> tuple[f32['S'], i32['S top'], f32['S top']]:
    """The log probability of the chosen tokens, and the `MAX_LOGPROBS` likeliest tokens with theirs, likeliest first.

    Args:
        logits: f32[S, V] of the model, without anything that a slot's sampling does to them.
        wanted: which slots ask for it. If none does, the results are zeros.
    """
    top = min(MAX_LOGPROBS, vocab_size)

    def compute(_: object) -> tuple[jax.Array, jax.Array, jax.Array]:
        found = jax.nn.log_softmax(_in_vocabulary(logits, vocab_size))
        values, ids = jax.lax.top_k(found, top)
        return jnp.take_along_axis(found, chosen[:, None], axis=-1)[:, 0], ids, values

    slots = len(chosen)
    zeros = jnp.zeros(slots), jnp.zeros((slots, top), jnp.int32), jnp.zeros((slots, top))
    return _if_any(wanted, compute, zeros)


def _if_any[T](wanted: jax.Array, compute: Callable[[T], T], otherwise: T) -> T:
    return jax.lax.cond(jnp.any(wanted), compute, lambda x: x, otherwise)


def _in_vocabulary(logits: f32['S V'], vocab_size: int) -> f32['S V']:
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def _bias(how: SlotSampling, logits: f32['S V']) -> f32['S V']:
    slot = jnp.arange(len(logits))[:, None]
    return logits.at[slot, how.bias_ids].add(how.bias_values, mode='drop')


def _penalize(how: SlotSampling, seen: Seen, logits: f32['S V']) -> f32['S V']:
    """Keskar et al. 2019, arXiv:1909.05858, section 4.1, for logits of both signs, then OpenAI's two penalties."""
    penalty = how.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen.prompt | (seen.answer > 0), repeated, logits)
    logits -= jnp.where(seen.answer > 0, how.presence_penalty[:, None], 0)
    return logits - how.frequency_penalty[:, None] * seen.answer


def _draw(logits: f32['S V'], how: SlotSampling, position: i32['S']) -> i32['S']:
    """Draws from the tokens that pass the filters, by the Gumbel-max trick."""
    # A temperature of 0 is not drawn from, and the smallest ones must not divide to NaN.
    temperature = jnp.maximum(how.temperature, np.finfo(np.float32).tiny)[:, None]
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    probability = jnp.exp(logits)  # in units of the likeliest token's
    order = _order(logits)

    def top_k(cut: u32['S']) -> u32['S']:
        ones = jnp.ones_like(logits)
        return jnp.where(how.top_k > 0, _cut(order, ones, how.top_k.astype(jnp.float32)), cut)

    def top_p(cut: u32['S']) -> u32['S']:
        """Holtzman et al. 2020, arXiv:1904.09751, of what top-k has left."""
        left = jnp.where(order >= cut[:, None], probability, 0)
        return jnp.where(how.top_p < 1, _cut(order, left, how.top_p * jnp.sum(left, axis=-1)), cut)

    cut = _if_any(how.top_k > 0, top_k, jnp.zeros(len(logits), jnp.uint32))
    cut = _if_any(how.top_p < 1, top_p, cut)
    cut = jnp.minimum(cut, jnp.max(order, axis=-1))  # the likeliest token always passes
    # Minh et al. 2024, arXiv:2407.01082
    kept = (order >= cut[:, None]) & (probability >= how.min_p[:, None])
    logits = jnp.where(kept, logits, -jnp.inf)
    return _likeliest(logits + jax.vmap(functools.partial(_gumbel, logits.shape[-1]))(how.seed, how.choice, position))


def _gumbel(columns: int, seed: u32['2'], choice: i32[''], position: i32['']) -> f32['V']:
    """A token's noise depends on its id, but not on the number of columns."""
    key = jax.random.wrap_key_data(seed, impl='threefry2x32')  # equal to `jax.random.key(seed)`
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, choice), position), (columns,))


def _likeliest(logits: f32['S V']) -> i32['S']:
    """The first of the likeliest tokens. On CPUs XLA runs these two reductions six times as fast as one of `argmax`."""
    columns = logits.shape[-1]
    found = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(found, jnp.arange(columns), columns - 1), axis=-1).astype(jnp.int32)


def _order(x: f32['S V']) -> u32['S V']:
    """Integers in the order of the numbers. Equal numbers have equal integers."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)  # -0 equals 0
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _cut(order: u32['S V'], mass: f32['S V'], wanted: f32['S']) -> u32['S']:
    """The largest integer such that the tokens from it up have at least the wanted mass together; 0 if all have less.

    It is found bit by bit, which takes 32 sums and no sorting.
    """

    def try_bit(step: jax.Array, cut: jax.Array) -> jax.Array:
        higher = cut | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(order >= higher[:, None], mass, 0), axis=-1) >= wanted
        return jnp.where(reached, higher, cut)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(len(order), jnp.uint32))
