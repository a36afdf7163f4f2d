"""Checks of what only a GPU runs, each against something else: plain JAX, the CPU, or the same run without a stop.

    python tests/on_gpu.py --out results      # on a machine with a GPU, in about four minutes
    python tests/on_gpu.py --on-cpu           # the same checks without the kernels, to see that they run

The test suite runs on CPUs, where these kernels are interpreted or absent. The result of each check is one line, and
all of them are in `on-gpu.json`. The exit code is the number of checks that failed.
"""

import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ['PYTHONPATH'] = os.pathsep.join(
    [str(HERE.parent / 'src'), str(HERE), *filter(None, [os.environ.get('PYTHONPATH')])]
)
os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'  # checks run side by side
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'

FAMILIES = {
    'gpt2': {'family': 'gpt2', 'n_layers': 2, 'd_model': 128, 'n_heads': 2},
    'llama': {'family': 'llama', 'n_layers': 2, 'd_model': 128, 'n_heads': 2, 'n_kv_heads': 1, 'd_ff': 256},
    'gemma3': {'family': 'gemma3', 'n_layers': 3, 'd_model': 128, 'n_heads': 2, 'd_ff': 256, 'window': 40},
    'experts': {
        'family': 'llama', 'n_layers': 2, 'd_model': 128, 'n_heads': 2, 'd_ff': 64, 'n_experts': 4,
        'experts_per_token': 2, 'd_shared': 64,
    },
    'latent': {
        'family': 'llama', 'n_layers': 2, 'd_model': 128, 'n_heads': 2, 'd_ff': 256, 'd_head': 64, 'kv_rank': 64,
        'q_rank': 64, 'd_rope': 32, 'd_nope': 32,
    },
    'mamba2': {'family': 'mamba2', 'n_layers': 2, 'd_model': 128, 'linear_d_head': 64, 'linear_d_key': 64},
    'mixed': {
        'family': 'llama', 'n_layers': 4, 'd_model': 128, 'n_heads': 2, 'd_ff': 256, 'window': 40,
        'layer_types': ('mamba', 'delta', 'window', 'full'), 'linear_heads': 2, 'linear_d_head': 64, 'linear_d_key': 64,
    },
}  # fmt: skip
RUN = [
    'model.d_model=256', 'mesh.d=1', 'checkpoint.every=20', 'eval.every=0', 'log.every=1', 'sample.every=1000',
    'seed=3', 'schedule.warmup=5',
]  # fmt: skip


def relative(actual, expected):
    import numpy as np

    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def the_device():
    import importlib.metadata as metadata

    import jax

    device = jax.devices()[0]
    names = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'nvidia-cudnn-cu13', 'optax', 'numpy')
    installed = {one.metadata['Name'] for one in metadata.distributions()}
    versions = {name: metadata.version(name) for name in names if name in installed}
    return {'device': device.device_kind, 'memory': (device.memory_stats() or {}).get('bytes_limit'), **versions}


def fused_attention():
    """cuDNN's attention in bf16 against blockwise attention in f32, in value and gradient."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pretrax.model.attention import attend
    from pretrax.model.attention_kernels import Kernel
    from pretrax.model.scores import Scores
    from small import mesh_of

    def case(d_head, kv_heads, documents, window, has_sinks):
        random = np.random.default_rng(0)
        q = random.normal(size=(2, length, 4, d_head)).astype(np.float32)
        k, v = random.normal(size=(2, 2, length, kv_heads, d_head)).astype(np.float32)
        sinks = random.normal(size=4).astype(np.float32) if has_sinks else None
        segments = np.sort(random.integers(1, documents + 1, (2, length)), axis=1).astype(np.int32)
        weigh = random.normal(size=q.shape).astype(np.float32)

        def outcome(kernel, dtype):
            def loss(q, k, v):
                scores, chosen = Scores(d_head**0.5, 0.0, window), Kernel(kernel, 'checked', documents)
                out = attend(*(x.astype(dtype) for x in (q, k, v)), segments, chosen, scores, sinks)
                return jnp.sum(out.astype(jnp.float32) * weigh), out

            with jax.set_mesh(mesh_of()):
                (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
            return out, *gradients

        return max(map(relative, outcome(fused, jnp.bfloat16), outcome('blockwise', jnp.float32)))

    fused, length = ('blockwise', 64) if jax.devices()[0].platform == 'cpu' else ('cudnn', 512)
    cases = {
        'causal': (4, 1, 0, False), 'grouped': (2, 1, 0, False), 'documents': (4, 4, 0, False),
        'window': (2, 1, 100, False), 'window and documents': (2, 4, 100, False), 'sinks': (2, 1, 0, True),
    }  # fmt: skip
    return errors(
        {f'{name}, {d_head}': (case, d_head, *rest) for d_head in (64, 128, 256) for name, rest in cases.items()}, 0.015
    )


def attention_to_the_cache():
    """The compiled kernel of decoding against plain JAX: pages of bf16 and int8, rows of all lengths."""
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np

    from pretrax.infer.cache import Pages
    from pretrax.infer.kernels import Kernel, attention
    from pretrax.model.scores import Scores

    def case(heads, kv_heads, d_head, stored):
        random = np.random.default_rng(1)
        positions = np.array([[0], [37], [143], [15], [16]], np.int32)
        q = random.normal(size=(5, 1, heads, d_head)).astype(jnp.bfloat16)
        table = random.integers(1, 30, (5, 9)).astype(np.int32)
        if stored == 'bf16':
            pages = Pages(*random.normal(size=(2, kv_heads, 30, 16, d_head)).astype(jnp.bfloat16), None, None)
        else:
            scales = random.uniform(0.01, 0.1, (2, kv_heads, 30, 16)).astype(np.float32)
            pages = Pages(*random.integers(-127, 128, (2, kv_heads, 30, 16, d_head)).astype(np.int8), *scales)
        scores = Scores(d_head**0.5, 0.0, 0)
        runs = [
            jax.jit(functools.partial(attention, Kernel(name, 'checked'), scores=scores)) for name in (fused, 'plain')
        ]
        return relative(*(run(q, pages, table, positions) for run in runs))

    fused = 'plain' if jax.devices()[0].platform == 'cpu' else 'pallas-gpu'
    shapes = [(4, 2, 128, 'bf16'), (8, 1, 64, 'bf16'), (16, 16, 128, 'bf16'), (4, 2, 256, 'bf16'), (4, 2, 128, 'int8')]
    return errors(
        {f'{h} heads, {k} of keys, {d}, {stored}': (case, h, k, d, stored) for h, k, d, stored in shapes}, 0.01
    )


def errors(cases, bound):
    """The error of each case, which is at most the bound; a kernel that fails is an error too."""
    found = {}
    for name, (case, *arguments) in cases.items():
        try:
            found[name] = case(*arguments)
        except Exception as error:
            found[name] = f'{type(error).__name__}: {str(error)[:300]}'
    assert all(isinstance(one, float) and one < bound for one in found.values()), found
    return found


def one_family(name):
    """Loss and gradient on the GPU, in f32 and in bf16, against plain `jax.numpy` on the CPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import reference
    from decoders import decoder_options
    from pretrax.model.axes import AXES
    from pretrax.model.request import ModelRequest
    from pretrax.model.transformer import Transformer
    from pretrax.train.step import make_gradients
    from small import mesh_of, random_batch, random_weights

    batch = random_batch(4, length=64)

    def case(dtype):
        request = ModelRequest(100, 64, 4, dtype, jax.devices()[0].platform, dict.fromkeys(AXES, 1), 1)
        model = Transformer(request, options=decoder_options(**FAMILIES[name]))
        weights = jax.tree.map(lambda w: np.float32(w * 0.3 if w.ndim > 2 else w), random_weights(model))
        with jax.set_mesh(mesh_of()), jax.default_matmul_precision('highest'):
            gradient = jax.jit(lambda weights: make_gradients(model, 1)(weights, batch)[0])(weights)

        def plain(weights):
            routers = reference.router_losses(weights, batch, model.arch) if model.arch.experts.n_experts else {}
            return reference.nll(weights, batch, model.arch) + sum(routers.values())

        with jax.default_device(jax.devices('cpu')[0]):
            expected = jax.jit(jax.grad(plain))(weights)
        pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True)
        return max(relative(a, b) for a, b in pairs if np.linalg.norm(b) > 1e-6)

    return errors({f'{name}, f32': (case, jnp.float32)}, 1e-4) | errors({f'{name}, bf16': (case, jnp.bfloat16)}, 0.2)


def families(_):
    """Each family in a process of its own."""
    found = {}
    with concurrent.futures.ThreadPoolExecutor(len(FAMILIES)) as pool:
        for one in pool.map(lambda name: in_process('one_family', name), FAMILIES):
            found |= one
    return found


def in_process(*check):
    """The result of a check in a process of its own."""
    command = [sys.executable, __file__, *check, '--in-this-process', *['--on-cpu'] * ON_CPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def pretrax(*arguments, seconds=240, **options):
    """Runs a command. Its output; the process, if it may be stopped."""
    command = [sys.executable, '-m', 'pretrax', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, **options)
    said = f'{arguments}: exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-2500:]}'
    assert done.returncode == 0, said
    return done.stdout


def losses(run):
    rows = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    return {row['step']: row['loss'] for row in rows if 'loss' in row}


def a_run_that_is_stopped(place):
    """A run that is stopped and resumed has the losses of one that is not; then text, scores, an export, a trace."""
    config = str(HERE.parent / 'configs' / 'quickstart.yaml')
    whole, stopped = place / 'whole', place / 'stopped'
    output = pretrax('train', config, *RUN, 'steps=60', f'run_dir={whole}')
    chosen = [line.strip() for line in output.splitlines() if re.search('attention|compute|devices|tokens/s', line)]
    process = subprocess.Popen(
        [sys.executable, '-m', 'pretrax', 'train', config, *RUN, 'steps=60', f'run_dir={stopped}'],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    began = time.monotonic()
    while not (stopped / 'metrics.jsonl').exists() or not losses(stopped):
        assert process.poll() is None, 'the run ended'
        assert time.monotonic() < began + 200, 'no step'
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=100)
    at = max(losses(stopped))
    pretrax('train', config, *RUN, 'steps=60', f'run_dir={stopped}')
    ours, expected = losses(stopped), losses(whole)
    different = [step for step in expected if ours.get(step) != expected[step]]
    found = {
        'exit code': code, 'stopped after': at, 'last loss': expected[max(expected)], 'chosen': chosen[:12],
        'different steps': len(different), 'first different': min(different, default=None),
        'largest difference': max(abs(ours[step] - expected[step]) for step in expected),
    }  # fmt: skip
    found['text'] = pretrax('generate', str(whole), '--prompt', 'def ', '--tokens', '20', '--temperature', '0')[-200:]
    text = place / 'text.txt'
    text.write_text('def f(x):\n    return x + 1\n' * 20)
    found['scores'] = pretrax('eval', str(whole), '--text', f't={text}')[-300:]
    pretrax('export', str(whole), str(place / 'exported'))
    found['scores of the export'] = pretrax('eval', str(place / 'exported'), '--text', f't={text}')[-300:]
    assert not different, found
    assert expected[60] < 5, found
    return found


def a_profile(place):
    """The phases of a traced step."""
    config = str(HERE.parent / 'configs' / 'quickstart.yaml')
    pretrax('train', config, *RUN, 'steps=12', 'log.profile=8', f'run_dir={place}')
    return {'trace': pretrax('trace', str(place))[-3000:]}


def variants(place):
    """Forms of the step that depend on the hardware run, and their losses are near those of the usual step."""
    config = str(HERE.parent / 'configs' / 'quickstart.yaml')
    changes = {
        'usual': [], 'fp8': ['precision.matmul=fp8'], 'f32': ['precision.compute=f32'],
        'optimizer on the host': ['memory.offload=[optimizer]'], 'recomputed': ['model.save=none'],
        'activations on the host': ['model.save={q: offload, up: offload}'], 'scan': ['model.layers=scan'],
        'two passes': ['batch.micro=8'], 'muon': ['optimizer.name=muon'], 'fp16': ['precision.compute=fp16'],
    }  # fmt: skip

    def last(name):
        run = place / name.replace(' ', '-')
        try:
            pretrax('train', config, *RUN, 'steps=12', *changes[name], f'run_dir={run}')
        except AssertionError as error:
            return str(error)[-1500:]
        return losses(run)[12]

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        found = dict(zip(changes, pool.map(last, changes), strict=True))
    assert all(isinstance(loss, float) for loss in found.values()), found
    assert all(abs(loss - found['usual']) < 0.05 for name, loss in found.items() if name != 'muon'), found
    return found


def doctor(_):
    return {'output': pretrax('doctor', '--json')[-2500:]}


IN_PROCESS = [the_device, fused_attention, attention_to_the_cache]
COMMANDS = [families, variants, a_profile, a_run_that_is_stopped, doctor]
ON_CPU = '--on-cpu' in sys.argv


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('checks', nargs='*', help='checks by name (default: all)')
    parser.add_argument('--out', type=Path, default=Path(), help='directory of on-gpu.json')
    parser.add_argument('--on-cpu', action='store_true', help='run the checks on a CPU, without the kernels')
    parser.add_argument('--in-this-process', action='store_true', help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ['JAX_PLATFORMS'] = 'cpu' if given.on_cpu else 'cuda,cpu'
    if given.on_cpu:
        os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
    if given.in_this_process:
        sys.path[:0] = os.environ['PYTHONPATH'].split(os.pathsep)
        check = {one.__name__: one for one in (*IN_PROCESS, one_family)}[given.checks[0]]
        print('\n' + json.dumps(check(*given.checks[1:])))
        return 0

    def outcome(check):
        began = time.monotonic()
        try:
            if check in COMMANDS:
                with tempfile.TemporaryDirectory() as place:
                    found = check(Path(place))
            else:
                found = in_process(check.__name__)
            passed = True
        except Exception:
            passed, found = False, traceback.format_exc()[-4500:]
        print(f'{"passed" if passed else "FAILED"}  {check.__name__}, {time.monotonic() - began:.0f} s', flush=True)
        print(json.dumps(found, indent=1) if passed else found, flush=True)
        return {'passed': passed, 'found': found}

    checks = [one for one in (*IN_PROCESS, *COMMANDS) if not given.checks or one.__name__ in given.checks]
    with concurrent.futures.ThreadPoolExecutor(len(checks)) as pool:
        results = dict(zip((one.__name__ for one in checks), pool.map(outcome, checks), strict=True))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / 'on-gpu.json').write_text(json.dumps(results, indent=1) + '\n')
    return sum(not one['passed'] for one in results.values())


if __name__ == '__main__':
    sys.exit(main())
