"""Write the weights as safetensors, with pretrax's own names.

`pretrax export` writes them in Hugging Face format.
"""

import json

from pretrax.cli._arguments import RunOrCheckpoint
from pretrax.cli.export import DTYPES
from pretrax.errors import UserError
from pretrax.option import argument, option


def export_weights(
    path: RunOrCheckpoint,
    out: str = argument('A new directory.', metavar='DIR'),
    dtype: str = option('f32, bf16 or f16.', default='f32', metavar='DTYPE'),
) -> None:
    if dtype not in DTYPES:
        raise UserError(f'--dtype is {dtype}; expected one of {", ".join(DTYPES)}')
    from pretrax.amounts import size
    from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description
    from pretrax.huggingface.tensor_files import TensorFiles, new_directory
    from pretrax.model.weights import BUFFERS
    from pretrax.storage import locate, locate_run

    directory, step = find_checkpoint(locate_run(path))
    description = read_description(directory, step)
    weights = CheckpointWeights(directory, step)
    stored = DTYPES[dtype]
    metadata = {'format': 'pretrax-weights', 'step': str(step), 'description': json.dumps(description)}
    with new_directory(locate(out)) as partial:
        with TensorFiles(partial, weights.shapes, stored, metadata, exact=BUFFERS) as files:
            for name in weights.shapes:
                for rows, values in weights.rows(name):
                    files.write(name, (rows,), values)
            for note in files.notes():
                print(note)
        written = sorted(partial.iterdir())
        total = sum(file.stat().st_size for file in written)
    print(f'step {step} of {path}: {len(weights.shapes)} weights, {stored}, {size(total)} in {out}')
    print(f'  {", ".join(file.name for file in written)}')
