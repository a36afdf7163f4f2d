"""Measures the host memory of `pretrax import` and `pretrax export`, relative to the largest tensor of a checkpoint.

    python benchmarks/import.py --gigabytes 2 --directory /scratch

Writes a Llama of random bf16 weights in shards, imports it, exports it, and compares every tensor with the original.
Prints the peak resident memory of each command, minus that of the same command on a model of a few kilobytes. The limit
is twice the largest tensor in f32, plus one gigabyte.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from pretrax.huggingface.files import open_checkpoint

SHARD = 500_000_000


def config(d_model: int, n_layers: int, vocab_size: int) -> dict:
    return {
        'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'hidden_size': d_model,
        'intermediate_size': 11 * d_model // 4, 'num_hidden_layers': n_layers, 'num_attention_heads': d_model // 128,
        'num_key_value_heads': d_model // 128, 'vocab_size': vocab_size, 'max_position_embeddings': 1024,
        'rms_norm_eps': 1e-5, 'hidden_act': 'silu', 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16',
    }  # fmt: skip


def write(directory: Path, values: dict) -> int:
    """Writes the checkpoint, one shard at a time. Returns the f32 size of its largest tensor in bytes."""
    from safetensors.numpy import save_file

    M, F, V = values['hidden_size'], values['intermediate_size'], values['vocab_size']
    shapes = {'model.embed_tokens.weight': (V, M), 'model.norm.weight': (M,), 'lm_head.weight': (V, M)}
    for i in range(values['num_hidden_layers']):
        at = f'model.layers.{i}.'
        shapes |= {f'{at}self_attn.{x}_proj.weight': (M, M) for x in 'qkvo'}
        shapes |= {f'{at}mlp.{x}_proj.weight': (F, M) for x in ('gate', 'up')} | {f'{at}mlp.down_proj.weight': (M, F)}
        shapes |= {f'{at}{x}_layernorm.weight': (M,) for x in ('input', 'post_attention')}
    directory.mkdir(parents=True)
    (directory / 'config.json').write_text(json.dumps(values))
    rng, shard, weight_map, number = np.random.default_rng(0), {}, {}, 0
    for name, shape in shapes.items():
        shard[name] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        weight_map[name] = f'model-{number:05}.safetensors'
        if sum(x.nbytes for x in shard.values()) > SHARD or name == list(shapes)[-1]:
            save_file(shard, directory / weight_map[name])
            shard, number = {}, number + 1
    (directory / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    return 4 * max(map(math.prod, shapes.values()))


def peak(*arguments: str) -> int:
    """Peak resident bytes of a pretrax command."""
    program = 'import sys; from pretrax.cli import main; main(sys.argv[1:])'
    command = [sys.executable, '-c', f'{MEASURE}\n{program}', *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stderr.rsplit('peak ', 1)[1])


MEASURE = """
import atexit, resource, sys
scale = 1 if sys.platform == 'darwin' else 1024
atexit.register(lambda: print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale, file=sys.stderr))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description='Measure the host memory of import and export')
    parser.add_argument('--gigabytes', type=float, default=2.0, help='size of the bf16 checkpoint')
    parser.add_argument(
        '--directory', help='where to write; takes five times the size (default: a temporary directory)'
    )
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        ok = measure(place, arguments.gigabytes)
    finally:
        shutil.rmtree(place)
    sys.exit(0 if ok else 1)


def measure(place: Path, gigabytes: float) -> bool:
    d_model, vocab_size = (2048, 32000) if gigabytes >= 0.5 else (256, 1000)
    a_layer = 2 * (4 + 3 * 11 / 4) * d_model**2
    n_layers = max(1, math.ceil((gigabytes * 1e9 - 4 * vocab_size * d_model) / a_layer))
    largest = write(place / 'large', config(d_model, n_layers, vocab_size))
    write(place / 'small', config(128, 1, 256))
    size = sum(path.stat().st_size for path in (place / 'large').glob('*.safetensors'))
    print(f'{size / 1e9:.2f} GB in bf16, {n_layers} layers; largest tensor {largest / 1e9:.3f} GB in f32')
    limit, ok = 2 * largest + 1_000_000_000, True
    verbs = {
        'import': lambda name: ('import', str(place / name), '--out', str(place / f'run-{name}')),
        'export': lambda name: ('export', str(place / f'run-{name}'), str(place / f'out-{name}')),
    }
    for verb, words in verbs.items():
        base, full = peak(*words('small')), peak(*words('large'))
        ok &= full - base <= limit
        print(
            f'{verb}: {full / 1e9:.2f} GB peak, {(full - base) / 1e9:.2f} GB more than a tiny model; limit '
            f'{limit / 1e9:.2f}'
        )
    before, after = open_checkpoint(place / 'large'), open_checkpoint(place / 'out-large')
    same = before.tensors.keys() == after.tensors.keys() and all(
        np.array_equal(before.tensors[name].read().view(np.uint16), after.tensors[name].read().view(np.uint16))
        for name in before.tensors
    )
    print('every tensor is equal bit for bit' if same else 'TENSORS DIFFER')
    return ok and same


if __name__ == '__main__':
    main()
