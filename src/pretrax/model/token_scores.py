"""How likely each target token is, over a vocabulary sharded over `t`, without a second copy of the logits in f32.

Letters: B batch, L length, V vocabulary.
"""

import jax.numpy as jnp

from pretrax.model.loss import cross_entropy, vocabulary_columns
from pretrax.shardlib import axis_size, bool_, f32, i32, num, pmax, pytree_dataclass, typechecked


@pytree_dataclass
class TokenScores:
    """The log probabilities of tokens in nats, and whether each is the likeliest token, of equal ones the first."""

    log_probs: f32['B/r/d/e L/c']
    are_likeliest: bool_['B/r/d/e L/c']


@typechecked
def token_scores(
    logits: num['B/r/d/e L/c V/t'], targets: i32['B/r/d/e L/c'], vocab_size: int | None = None
) -> TokenScores:
    """log softmax(logits)[target], and argmax(logits) == target. Runs per device.

    Args:
        logits: of any floating dtype; sums are in f32.
        targets: token ids below vocab_size.
        vocab_size: columns past it do not count; None: all of them do.
    """
    columns_of_all = logits.shape[-1] * axis_size('t')
    vocab_size = columns_of_all if vocab_size is None else vocab_size
    nll, _ = cross_entropy(logits, targets, vocab_size)
    columns = vocabulary_columns(logits)
    is_real = columns < vocab_size
    largest = pmax('t', jnp.max(jnp.where(is_real, logits, -jnp.inf), axis=-1))
    is_largest = is_real & (logits == largest[..., None])
    first = -pmax('t', jnp.max(jnp.where(is_largest, -columns, -columns_of_all), axis=-1))
    return TokenScores(-nll, first == targets)
