"""Model FLOPs and MFU.

L length, H heads, D head. A product of [a, b] and [b, c] takes 2 a b c FLOPs. The backward pass has two such products for each
product of the forward pass, so training costs three times the forward pass. Per token:

    weights     6 * (parameters that multiply an activation)
    attention   12 * layers * H * D * L    'full': every query sees every key, as in Chowdhery et al. 2022
                                           (PaLM, arXiv:2204.02311, appendix B), nanoGPT and most papers
                 6 * layers * H * D * L    'causal': the half that a causal mask leaves, as in llm.c

Published tables mix the two; pretrax prints the causal one and records both. An unembedding that is tied to the embedding
counts once. Not counted: the embedding lookup, norms, softmax, biases and recomputation, since MFU is about the model and
not about how it is run. Grouped key-value heads change the weights, not the attention, in which every query head still sees
L keys. Packed documents attend to fewer keys than counted here, so their MFU is too high.

In a layer with a window of W < L tokens, W replaces L in 'full'. The causal count is what the mask leaves: W - W^2 / 2L keys on
average, which is L / 2 for W = L.
"""

import dataclasses
from collections.abc import Sequence

from pretrax.model.architecture import Architecture

FORMULA_VERSION = 1  # recorded with every MFU; increased if any number here changes


@dataclasses.dataclass(frozen=True)
class Flops:
    """Training FLOPs, forward and backward, by the two conventions for attention."""

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
    """Keys that a query sees on average in a causal layer with a window of `window` tokens; 0: no window."""
    seen = min(window or sequence_length, sequence_length)
    return seen - seen**2 / (2 * sequence_length) if seen else 0


def mfu(tokens_per_second: float, per_token: float, peak: float, n_devices: int) -> float:
    """Model FLOPs utilization, as a fraction of 1: FLOPs of the model over the peak of the devices.

    Args:
        tokens_per_second: of all devices together.
        per_token: `Flops.causal` or `Flops.full`.
        peak: FLOP/s of one device in the compute dtype, `Device.peak`.
    """
    return tokens_per_second * per_token / (peak * n_devices)
