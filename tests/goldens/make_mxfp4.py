"""Writes what `transformers` makes of random blocks and scales in MXFP4, for tests/huggingface/test_mxfp4.py.

Run by hand, in the environment of make_goldens.py:

    ENV/bin/python tests/goldens/make_mxfp4.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.manual_seed(0)
blocks = torch.randint(
    0, 256, (2, 5, 3, 16), dtype=torch.uint8
)  # experts, outputs, blocks of 32 inputs, two numbers in each byte
scales = torch.randint(115, 140, (2, 5, 3), dtype=torch.uint8)
scales[0, 0] = torch.tensor([0, 1, 250])  # the smallest numbers, and large ones
found = {
    dtype: convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype)) for dtype in ('bfloat16', 'float32')
}
assert torch.equal(found['bfloat16'].float(), found['float32']), 'the numbers are exact in both'
save_file({'blocks': blocks, 'scales': scales, 'values': found['float32']}, Path(__file__).parent / 'mxfp4.safetensors')
