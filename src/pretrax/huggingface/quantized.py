"""Quantized weights, which an import converts to numbers: training has no quantized weights.

- FP8: numbers in E4M3, and a scale for each block of rows and columns (DeepSeek V3, Kimi K2, MiniMax M2). DeepSeek-AI
  2024, arXiv:2412.19437, section 3.3.2; Micikevicius et al. 2022, arXiv:2209.05433 (E4M3). The scale of a block is in
  `NAME_scale_inv`, the inverse of what the numbers were multiplied by.
- MXFP4: four-bit numbers in blocks of 32 that share a scale (gpt-oss). They are read without rounding. Open Compute
  Project 2023, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretrax.errors import UserError
from pretrax.huggingface.files import HuggingFaceCheckpoint, Tensor

_FP8_SCALES = '_scale_inv'  # of names
_MXFP4_BLOCKS, _MXFP4_SCALES = '_blocks', '_scales'  # of names
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by their four bits


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
    """The checkpoint with each matrix in E4M3 and its scales as one tensor, or one that says why it is unreadable.

    Raises:
        UserError: config.json says nothing about blocks.
    """
    tensors: dict[str, Any] = dict(checkpoint.tensors)
    block = checkpoint.config['quantization_config'].get('weight_block_size')
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise UserError(
            f'config.json: quantization_config.weight_block_size is {str(block)[:40]}; expected two sizes, such as '
            '[128, 128]\n'
            'FP8 weights with another kind of scales are not read: use the checkpoint that they were made from'
        )
    rows, columns = block
    for name in [name for name, tensor in tensors.items() if tensor.dtype == 'F8_E4M3']:
        numbers, scales = tensors[name], tensors.pop(name + _FP8_SCALES, None)
        wanted = tuple(-(-n // size) for n, size in zip(numbers.shape, (rows, columns), strict=False))
        fits = scales is not None and len(numbers.shape) == 2 and scales.shape == wanted and not scales.why_not
        if scales is None or not fits:
            why_not = (
                f'{checkpoint.directory}: {name} {list(numbers.shape)} in blocks of {rows} x {columns} does not fit '
                f'{name}{_FP8_SCALES} {"(missing)" if scales is None else f"{scales.dtype}{list(scales.shape)}"}\n'
                'copy or download the checkpoint again'
            )
            tensors[name] = replace(numbers, why_not=why_not)
            continue
        tensors[name] = Fp8Tensor(numbers, scales, (rows, columns))
    return HuggingFaceCheckpoint(checkpoint.directory, checkpoint.config, tensors)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor [experts, inputs, outputs]; in files bytes [experts, outputs, blocks, 16], scales [..., blocks]."""

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
    pairs = np.stack([_E2M1[blocks & 15], _E2M1[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], -1)
    np.ldexp(pairs, scales[..., None].astype(np.int32) - 127, out=pairs)
    return pairs.reshape(*blocks.shape[:-2], -1)


def with_mxfp4(checkpoint: HuggingFaceCheckpoint) -> HuggingFaceCheckpoint:
    """The checkpoint with each pair of blocks and scales as one tensor, or a tensor that says why it cannot be read."""
    tensors: dict[str, Any] = dict(checkpoint.tensors)
    for name in [name.removesuffix(_MXFP4_BLOCKS) for name in tensors if name.endswith(_MXFP4_BLOCKS)]:
        blocks, scales = tensors.pop(name + _MXFP4_BLOCKS), tensors.pop(name + _MXFP4_SCALES, None)
        fits = scales is not None and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if scales is not None and fits and blocks.dtype == scales.dtype == 'U8':
            tensors[name] = Mxfp4Tensor(blocks, scales)
            continue
        why_not = (
            f'{checkpoint.directory}: {name}{_MXFP4_BLOCKS} {blocks.dtype}{list(blocks.shape)} does not fit '
            f'{name}{_MXFP4_SCALES} {"(missing)" if scales is None else f"{scales.dtype}{list(scales.shape)}"}\n'
            'copy or download the checkpoint again'
        )
        tensors[name] = replace(blocks, why_not=why_not)
    return HuggingFaceCheckpoint(checkpoint.directory, checkpoint.config, tensors)


_READ: dict[str, Callable[[HuggingFaceCheckpoint], HuggingFaceCheckpoint]] = {'mxfp4': with_mxfp4, 'fp8': with_fp8}


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises UserError if config.json says that weights are quantized by a method that is not read."""
    said = config.get('quantization_config')
    if said is not None and _method(config) is None:
        method = f' ({str(said["quant_method"])[:40]})' if isinstance(said, dict) and 'quant_method' in said else ''
        raise UserError(
            f'config.json: quantization_config is set{method}, but quantized weights cannot be trained\n'
            f'use the checkpoint that they were made from (read as numbers: {", ".join(_READ)})'
        )


def with_whole_tensors(checkpoint: HuggingFaceCheckpoint) -> HuggingFaceCheckpoint:
    """The checkpoint with quantized numbers and their scales as one tensor. Others are returned as they are."""
    method = _method(checkpoint.config)
    return checkpoint if method is None else _READ[method](checkpoint)


def _method(config: Mapping[str, Any]) -> str | None:
    said = config.get('quantization_config')
    method = said.get('quant_method') if isinstance(said, dict) else None
    return method if isinstance(method, str) and method in _READ else None
