"""Print the configuration, arrays and sizes of a checkpoint."""

import math

from pretrax.cli._arguments import RunOrCheckpoint
from pretrax.option import option

_BYTES = {'bfloat16': 2, 'float16': 2, 'bool': 1}


def inspect(
    path: RunOrCheckpoint,
    files: bool = option('List each file with its size and digest.', default=False),
) -> None:
    import yaml

    from pretrax.amounts import size
    from pretrax.checkpoint import find_checkpoint, read_manifest
    from pretrax.checkpoint.manifest import shape_text
    from pretrax.storage import locate_run

    directory, step = find_checkpoint(locate_run(path))
    manifest = read_manifest(directory, step)
    description = dict(manifest.description)
    config = description.pop('config', None)
    print(f'{directory / str(step)}')
    for key, value in {'step': manifest.step, **description}.items():
        print(f'  {key}: {"none" if value is None else value}')
    if config is not None:
        print('configuration')
        text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
        print('\n'.join(f'  {line}' for line in text.splitlines()))
    print('arrays')
    sums: dict[str, list[int]] = {}
    width = max(map(len, manifest.arrays), default=0)
    for name, array in manifest.arrays.items():
        count = math.prod(array.shape)
        n_bytes = count * _BYTES.get(array.dtype, int(''.join(c for c in array.dtype if c.isdigit()) or 8) // 8)
        print(f'  {name:{width}}  {array.dtype:8}  {size(n_bytes):>8}  {shape_text(array.shape)}')
        numbers = sums.setdefault(name.partition('.')[0], [0, 0, 0])
        numbers[:] = numbers[0] + 1, numbers[1] + count, numbers[2] + n_bytes
    print('sums')
    for field, (arrays, count, n_bytes) in sums.items():
        print(f'  {field}: {arrays} arrays, {count:,} numbers, {size(n_bytes)}')
    total = sum(file.size for file in manifest.files.values())
    print(f'  {len(manifest.sizes)} files, {size(total)}; `pretrax checkpoint verify` compares them with their digests')
    if files:
        for name, file in manifest.files.items():
            print(f'  {file.xxh3}  {file.size:>14,}  {name}')
