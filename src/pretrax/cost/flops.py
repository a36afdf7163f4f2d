"""Model FLOPs and MFU.

L length, H heads, D head. A product of [a, b] and [b, c] takes 2 a b c FLOPs. The backward pass has two such products
for each product of the forward pass, so training costs three times the forward pass. Per token:

    weights     6 * (parameters that multiply an activation)
    attention   12 * layers * H * D * L    'full': every query sees every key, as in Chowdhery et al. 2022
                                           (PaLM, arXiv:2204.02311, appendix B), nanoGPT and most papers
                 6 * layers * H * D * L    'causal': the half that a causal mask leaves, as in llm.c

    states       6 * N * S * W * (2 or 3)  layers with a state [S, W] in each of N heads: a token writes to it and reads
                 it; a
                                           delta net also reads what it holds under the token's key. Chunks, which
                                           compute the same in products of tokens, do more.

Published tables mix the two conventions for attention; pretrax prints the causal one and records both. An unembedding
that is tied to the embedding counts once. Not counted: the embedding lookup, norms, softmax, biases and recomputation,
since MFU is about the model and not about how it is run. Grouped key-value heads change the weights, not the attention,
in which every query head still sees L keys. Packed documents attend to fewer keys than counted here, so their MFU is
too high.

In distillation, the forward pass of the teacher counts too, 2 of the 6 above: what the student learns is of no use
without it.

In a layer with a window of W < L tokens, W replaces L in 'full'. The causal count is what the mask leaves: W - W^2 / 2L
keys on average, which is L / 2 for W = L. In chunks of W tokens it is W / 2, if W divides L.
"""

import dataclasses
from collections.abc import Sequence

from pretrax.model.architecture import Architecture

FORMULA_VERSION = 2  # recorded with every MFU; increased if any number here changes. 2 counts a teacher


@dataclasses.dataclass(frozen=True)
class Flops:
    """Training FLOPs, forward and backward, by the two conventions for attention."""

    causal: float
    full: float

    def __mul__(self, times: float) -> 'Flops':
        return Flops(self.causal * times, self.full * times)

    def __add__(self, other: 'Flops') -> 'Flops':
        return Flops(self.causal + other.causal, self.full + other.full)


def flops_per_token(arch: Architecture, sequence_length: int) -> Flops:
    """Training FLOPs per token of a decoder; times the global batch in tokens, those of a step."""
    kinds = arch.kinds + arch.kinds[-1:] * arch.multi_token.n_layers
    attention = [kind for kind in kinds if kind.mixer == 'attention']
    return count_flops(
        n_matmul_params=arch.n_matmul_params + arch.n_state_products,
        n_layers=arch.n_layers,
        n_heads=arch.attention.n_heads,
        d_head=[arch.heads(kind).mean_width for kind in attention],
        sequence_length=sequence_length,
        windows=[kind.window for kind in attention],
        chunked=arch.attention.window_type == 'chunked',
    )


def forward_flops_per_token(arch: Architecture, sequence_length: int) -> Flops:
    """FLOPs per token of a decoder that runs forward only, such as a teacher: a third of those of training."""
    return flops_per_token(arch, sequence_length) * (1 / 3)


def count_flops(
    *,
    n_matmul_params: int,
    n_layers: int,
    n_heads: int,
    d_head: float | Sequence[float],
    sequence_length: int,
    windows: Sequence[int] | None = None,
    chunked: bool = False,
) -> Flops:
    """Training FLOPs per token, from sizes.

    Args:
        n_matmul_params: parameters that multiply an activation: attention and feed-forward matrices and the
            unembedding, which counts once if it is tied. Only experts that a token visits. No embedding table, no
            norms.
        n_heads: query heads.
        d_head: width of a head, of each layer with attention or of all; the mean of that of queries and of values, if
            they differ.
        windows: for each layer with attention, the number of tokens that a token sees, including itself; 0: all. None:
            all in all layers.
        chunked: whether windows are chunks. A token then sees only its own chunk.
    """
    weights = 6 * n_matmul_params
    keys = [
        min(window or sequence_length, sequence_length) for window in ([0] * n_layers if windows is None else windows)
    ]
    widths = d_head if isinstance(d_head, Sequence) else [d_head] * len(keys)
    left = [causal_keys(window, sequence_length, chunked) for window in keys]
    causal, full = (sum(width * n for width, n in zip(widths, seen, strict=True)) for seen in (left, keys))
    return Flops(causal=weights + 12 * n_heads * causal, full=weights + 12 * n_heads * full)


def causal_keys(window: int, sequence_length: int, chunked: bool = False) -> float:
    """Keys that a query sees on average in a causal layer with a window or chunks of `window` tokens; 0: all."""
    seen = min(window or sequence_length, sequence_length)
    if not seen:
        return 0
    if chunked:
        chunks, rest = divmod(sequence_length, seen)
        return (chunks * seen**2 + rest**2) / (2 * sequence_length)
    return seen - seen**2 / (2 * sequence_length)


def mfu(tokens_per_second: float, per_token: float, peak: float, n_devices: int) -> float:
    """Model FLOPs utilization, as a fraction of 1: FLOPs of the model over the peak of the devices.

    Args:
        tokens_per_second: of all devices together.
        per_token: `Flops.causal` or `Flops.full`.
        peak: FLOP/s of one device in the compute dtype, `Device.peak`.
    """
    return tokens_per_second * per_token / (peak * n_devices)
