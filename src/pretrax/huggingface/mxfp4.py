"""Weights in MXFP4: four-bit numbers in blocks of 32 that share a scale (gpt-oss). They are read without rounding.

Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretrax.huggingface.files import HuggingFaceCheckpoint, Tensor

BLOCKS, SCALES = '_blocks', '_scales'  # of names
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by their four bits


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor [experts, inputs, outputs] that files have as bytes [experts, outputs, blocks, 16] and scales [experts, outputs, blocks]."""

    blocks: Tensor
    scales: Tensor
    why_not: str = ''

    @property
    def file(self) -> Any:
        return self.blocks.file

    @property
    def dtype(self) -> str:
        return 'BF16'  # exact: numbers have two significant bits, and BF16 has the exponents of F32

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, width = self.blocks.shape
        return experts, blocks * width * 2, outputs

    def read(self, index: int | None = None) -> np.ndarray:
        """The numbers of all experts, or of one, in f32: each is exact."""
        return dequantized(self.blocks.read(index), self.scales.read(index)).swapaxes(-2, -1)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """u8 [..., blocks, 16] and u8 [..., blocks] -> f32 [..., blocks * 32]. The lower four bits of a byte come first."""
    pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], -1)
    np.ldexp(pairs, scales[..., None].astype(np.int32) - 127, out=pairs)
    return pairs.reshape(*blocks.shape[:-2], -1)


def with_mxfp4(checkpoint: HuggingFaceCheckpoint) -> HuggingFaceCheckpoint:
    """The checkpoint with each pair of blocks and scales as one tensor, or a tensor that says why it cannot be read."""
    tensors: dict[str, Any] = dict(checkpoint.tensors)
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        blocks, scales = tensors.pop(name + BLOCKS), tensors.pop(name + SCALES, None)
        fits = scales is not None and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if scales is not None and fits and blocks.dtype == scales.dtype == 'U8':
            tensors[name] = Mxfp4Tensor(blocks, scales)
            continue
        why_not = (
            f'{checkpoint.directory}: {name}{BLOCKS} {blocks.dtype}{list(blocks.shape)} does not fit {name}{SCALES} '
            f'{"(missing)" if scales is None else f"{scales.dtype}{list(scales.shape)}"}\ncopy or download the checkpoint again'
        )
        tensors[name] = replace(blocks, why_not=why_not)
    return HuggingFaceCheckpoint(checkpoint.directory, checkpoint.config, tensors)
