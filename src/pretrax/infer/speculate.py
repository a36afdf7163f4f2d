"""Proposals for the next tokens, which the model checks in one pass, and how many of them it accepts.

The model chooses a token at every position with that position's own randomness, whatever was proposed. A proposal is
accepted if it is the chosen token, so the text is the same without proposals. Daliri et al. 2024, arXiv:2408.07978.

Letters: S slots, L longest sequence, P proposed tokens.
"""

import jax.numpy as jnp

from pretrax.shardlib import i32


def look_up(history: i32['S L'], length: i32['S'], proposed: int, ngram: int) -> i32['S P']:
    """Proposes what followed the last tokens when they occurred before. Saxena 2023, "Prompt Lookup Decoding".

    Takes the latest of the longest matches of up to `ngram` tokens. Where the text ends, its continuation repeats.

    Args:
        history: i32[S, L], the tokens of each slot so far.
        length: i32[S], how many they are.
        proposed: P.
        ngram: the longest match that is looked for.

    Returns:
        i32[S, P]; -1 for slots whose last token did not occur before.
    """
    at = jnp.arange(history.shape[1])
    last = length[:, None] - 1
    matches = jnp.zeros_like(history)  # how many tokens up to here equal the last ones
    matching = (at >= 0) & (at < last)
    for back in range(ngram):
        there = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, : history.shape[1]]
        matching &= there == jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
        matches += matching
    longest = jnp.max(matches, axis=1, keepdims=True)
    match = jnp.max(jnp.where(matches == longest, at, -1), axis=1, keepdims=True)
    following = match + 1 + jnp.arange(proposed) % jnp.maximum(last - match, 1)
    found = jnp.take_along_axis(history, jnp.minimum(following, history.shape[1] - 1), axis=1)
    return jnp.where(longest > 0, found, -1)


def accepted(proposals: i32['S P'], chosen: i32['S columns']) -> i32['S']:
    """How many of the first proposals equal the chosen tokens. `chosen` may have more columns than `proposals`."""
    same = proposals == chosen[:, : proposals.shape[1]]
    return jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1)
