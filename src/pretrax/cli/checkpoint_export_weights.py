"""`pretrax checkpoint export-weights RUN_OR_CHECKPOINT DIR`: the weights alone, as safetensors of our own names."""

import json
from pathlib import Path

from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description
from pretrax.errors import UserError
from pretrax.huggingface.files import DTYPES
from pretrax.huggingface.tensor_files import TensorFiles, new_directory
from pretrax.scale.memory import size

NAMES = {'f32': 'F32', 'bf16': 'BF16', 'f16': 'F16'}


def export_weights(path: str, out: str, dtype: str) -> None:
    """Writes the directory, a part of a weight at a time, and says what is in it."""
    if dtype not in NAMES:
        raise UserError(f'--dtype is {dtype}; expected one of {", ".join(NAMES)}')
    directory, step = find_checkpoint(Path(path))
    description = read_description(directory, step)
    weights = CheckpointWeights(directory, step)
    stored = NAMES[dtype]
    metadata = {'format': 'pretrax-weights', 'step': str(step), 'description': json.dumps(description)}
    with new_directory(Path(out)) as partial, TensorFiles(partial, weights.shapes, stored, metadata) as files:
        for name in weights.shapes:
            for rows, values in weights.rows(name):
                files.write(name, (rows,), values.astype(DTYPES[stored]))
    written = sorted(Path(out).iterdir())
    total = sum(file.stat().st_size for file in written)
    print(f'step {step} of {path}: {len(weights.shapes)} weights, {stored}, {size(total)} in {out}')
    print(f'  {", ".join(file.name for file in written)}')
