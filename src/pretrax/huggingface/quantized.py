"""The methods of quantization that an import reads. It converts weights to numbers, since training has no quantized weights."""

from collections.abc import Callable, Mapping
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.files import HuggingFaceCheckpoint
from pretrax.huggingface.fp8 import with_fp8
from pretrax.huggingface.mxfp4 import with_mxfp4

READ: dict[str, Callable[[HuggingFaceCheckpoint], HuggingFaceCheckpoint]] = {'mxfp4': with_mxfp4, 'fp8': with_fp8}


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises UserError if config.json says that weights are quantized by a method that is not read."""
    said = config.get('quantization_config')
    if said is not None and _method(config) is None:
        method = f' ({str(said["quant_method"])[:40]})' if isinstance(said, dict) and 'quant_method' in said else ''
        raise UserError(
            f'config.json: quantization_config is set{method}, but quantized weights cannot be trained\n'
            f'use the checkpoint that they were made from (read as numbers: {", ".join(READ)})'
        )


def with_whole_tensors(checkpoint: HuggingFaceCheckpoint) -> HuggingFaceCheckpoint:
    """The checkpoint with quantized numbers and their scales as one tensor. Others are returned as they are."""
    method = _method(checkpoint.config)
    return checkpoint if method is None else READ[method](checkpoint)


def _method(config: Mapping[str, Any]) -> str | None:
    said = config.get('quantization_config')
    method = said.get('quant_method') if isinstance(said, dict) else None
    return method if isinstance(method, str) and method in READ else None
