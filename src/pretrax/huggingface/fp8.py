"""Weights in FP8: numbers in E4M3, and a scale for each block of rows and columns (DeepSeek V3, Kimi K2, MiniMax M2).

DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2; Micikevicius et al. 2022, arXiv:2209.05433 (E4M3). The scale of a block is in
`NAME_scale_inv`, the inverse of what the numbers were multiplied by.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretrax.errors import UserError
from pretrax.huggingface.files import HuggingFaceCheckpoint, Tensor

SCALES = '_scale_inv'  # of names


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in E4M3 with one scale for each block of `block` rows and columns. Blocks at the ends may be smaller."""

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]
    why_not: str = ''

    @property
    def file(self) -> Any:
        return self.numbers.file

    @property
    def dtype(self) -> str:
        return 'BF16'  # in which the published conversion writes it

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def read(self, index: int | None = None) -> np.ndarray:
        """The matrix, or a row of it, in f32: numbers times scales."""
        rows, columns = self.block
        values, scales = self.numbers.read(index).astype(np.float32), self.scales.read().astype(np.float32)
        if index is not None:
            return values * np.repeat(scales[index // rows], columns)[: len(values)]
        for i, of_rows in enumerate(scales):
            values[i * rows : (i + 1) * rows] *= np.repeat(of_rows, columns)[: values.shape[1]]
        return values


def with_fp8(checkpoint: HuggingFaceCheckpoint) -> HuggingFaceCheckpoint:
    """The checkpoint with each matrix in E4M3 and its scales as one tensor, or a tensor that says why it cannot be read.

    Raises:
        UserError: config.json says nothing about blocks.
    """
    tensors: dict[str, Any] = dict(checkpoint.tensors)
    block = checkpoint.config['quantization_config'].get('weight_block_size')
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise UserError(
            f'config.json: quantization_config.weight_block_size is {str(block)[:40]}; expected two sizes, such as [128, 128]\n'
            'FP8 weights with another kind of scales are not read: use the checkpoint that they were made from'
        )
    rows, columns = block
    for name in [name for name, tensor in tensors.items() if tensor.dtype == 'F8_E4M3']:
        numbers, scales = tensors[name], tensors.pop(name + SCALES, None)
        wanted = tuple(-(-n // size) for n, size in zip(numbers.shape, (rows, columns), strict=False))
        fits = scales is not None and len(numbers.shape) == 2 and scales.shape == wanted and not scales.why_not
        if scales is None or not fits:
            why_not = (
                f'{checkpoint.directory}: {name} {list(numbers.shape)} in blocks of {rows} x {columns} does not fit {name}{SCALES} '
                f'{"(missing)" if scales is None else f"{scales.dtype}{list(scales.shape)}"}\ncopy or download the checkpoint again'
            )
            tensors[name] = replace(numbers, why_not=why_not)
            continue
        tensors[name] = Fp8Tensor(numbers, scales, (rows, columns))
    return HuggingFaceCheckpoint(checkpoint.directory, checkpoint.config, tensors)
