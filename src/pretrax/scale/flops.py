"""Model FLOPs and MFU: the one place where pretrax counts them.

B batch, L length, H heads, D head. A product of [a, b] with [b, c] is 2 a b c FLOPs; the backward pass has two such
products for each one forward, so training costs three times the forward pass. For one token and all layers:

    weights     6 * (parameters that multiply an activation)
    attention   12 * layers * H * D * L    'full': every query meets every key, as Chowdhery et al. 2022
                                           (PaLM, arXiv:2204.02311, appendix B), nanoGPT and most papers count
                 6 * layers * H * D * L    'causal': the half that a causal mask leaves, as llm.c counts

Published tables mix the two; pretrax prints the causal one and records both. Counted once: a head tied to the
embedding (as the head). Not counted: the embedding lookup, norms, softmax, biases, and recomputation (MFU is about
the model, not about the way it is run). Grouped key and value heads change the weights, not the attention, in which
every query head still meets L keys. Packed documents attend to less than this says; MFU then reads high.

In a layer with a window of W < L tokens, W takes the place of L in 'full': every query meets every key of a window. The
causal count has what the mask leaves there, W - W^2 / 2L keys on average, which is L / 2 at W = L.
"""

import dataclasses
from collections.abc import Sequence

from pretrax.model.architecture import Architecture

FORMULA_VERSION = 1  # written beside every recorded MFU; goes up when any number here would change


@dataclasses.dataclass(frozen=True)
class Flops:
    """Training FLOPs (forward and backward) by the two conventions for attention."""

    causal: float
    full: float

    def __mul__(self, times: float) -> 'Flops':
        return Flops(self.causal * times, self.full * times)


def flops_per_token(arch: Architecture, sequence_length: int) -> Flops:
    """Training FLOPs per token of a decoder; times the global batch in tokens, those of a step."""
    return count_flops(
        n_matmul_params=arch.n_matmul_params,
        n_layers=arch.n_layers,
        n_heads=arch.n_heads,
        d_head=arch.d_head,
        sequence_length=sequence_length,
        windows=arch.windows,
    )


def count_flops(
    *,
    n_matmul_params: int,
    n_layers: int,
    n_heads: int,
    d_head: int,
    sequence_length: int,
    windows: Sequence[int] | None = None,
) -> Flops:
    """Training FLOPs per token, from sizes.

    Args:
        n_matmul_params: parameters that multiply an activation: attention and feed-forward matrices and the unembedding,
            which counts once if it is tied. Only experts that a token visits. No embedding table, no norms.
        n_heads: query heads.
        windows: for each layer, the number of tokens that a token sees, including itself; 0: all. None: all in all layers.
    """
    weights = 6 * n_matmul_params
    keys = [min(window or sequence_length, sequence_length) for window in windows or [0] * n_layers]
    left = sum(causal_keys(window, sequence_length) for window in keys)
    return Flops(causal=weights + 12 * n_heads * d_head * left, full=weights + 12 * n_heads * d_head * sum(keys))


def causal_keys(window: int, sequence_length: int) -> float:
    """How many keys a query of a layer meets on average, with a window of that many tokens; 0 is all."""
    seen = min(window or sequence_length, sequence_length)
    return seen - seen**2 / (2 * sequence_length) if seen else 0


def mfu(tokens_per_second: float, per_token: float, peak: float, n_devices: int) -> float:
    """Model FLOPs utilisation as a fraction of one: what the model needs over what the devices could do.

    Args:
        tokens_per_second: of all devices together.
        per_token: `Flops.causal` or `Flops.full`.
        peak: FLOP/s of one device in the compute dtype, `Device.peak`.
    """
    return tokens_per_second * per_token / (peak * n_devices)
