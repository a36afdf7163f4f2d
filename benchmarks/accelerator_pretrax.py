"""The JAX side of accelerator.py: runs one part in a process of its own, with JSON as input and output.

    python benchmarks/accelerator_pretrax.py '{"kind": "device"}'

It trains with the step of `pretrax train` on one device, built from its parts and not from a configuration. So it needs
only JAX, Optax, pydantic and PyYAML of all that pretrax installs.

Letters: B batch, L length, M d_model, H heads, D head, N and K the sizes of a product.
"""

import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from laps import laps

import pretrax
from pretrax.cost.memory import temporaries_of
from pretrax.data.batches.source import pack_rows
from pretrax.hlo.compiler_options import Situation, choose_options, hardware_of
from pretrax.infer.generate import generate
from pretrax.model import loss as loss_module
from pretrax.model import matmul as matmul_module
from pretrax.model.attention import attend
from pretrax.model.attention_kernels import Kernel
from pretrax.model.axes import AXES
from pretrax.model.choices import TransformerOptions
from pretrax.model.loss import Batch
from pretrax.model.option_names import nest
from pretrax.model.request import ModelRequest
from pretrax.model.scores import Scores
from pretrax.model.transformer import Transformer
from pretrax.shardlib import make_shardings, psum
from pretrax.train import optimizer
from pretrax.train import step as step_module
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.state import init_state
from pretrax.train.step import Recipe

make_step: Callable[[Recipe], Any] = step_module.make_step  # a switch replaces it

BATCHES = 8  # distinct, on the device before timing starts, on both sides
DTYPES = {'bf16': jnp.bfloat16, 'f32': jnp.float32}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Runs the part `kind`; its function documents the other keys."""
    return {
        'device': device, 'ceilings': ceilings, 'kernels': kernels, 'check': check, 'train': train, 'decode': decode,
    }[spec['kind']](spec)  # fmt: skip


def device(spec: dict[str, Any]) -> dict[str, Any]:
    """The device and the versions."""
    one = jax.devices()[0]
    names = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'optax', 'numpy')
    installed = {d.metadata['Name'] for d in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in names if name in installed}
    return {
        'platform': one.platform, 'kind': one.device_kind, 'memory': (one.memory_stats() or {}).get('bytes_limit', 0),
        'versions': {'python': sys.version.split()[0], 'pretrax': pretrax.__version__, **versions},
    }  # fmt: skip


def ceilings(spec: dict[str, Any]) -> dict[str, Any]:
    """The two limiting rates: a large bf16 product and a large copy (bytes read and written)."""
    size, values = spec['size'], spec['values']
    a, b = (_random((size, size), seed) for seed in (0, 1))
    big = _random((values,), 2)
    product = _seconds(lambda a, b: a @ b, a, b)
    copy = _seconds(lambda x: -x, big)  # changes the sign, because XLA may remove a copy
    return {'matmul': 2 * size**3 / product, 'copy': 2 * big.nbytes / copy}


def kernels(spec: dict[str, Any]) -> dict[str, Any]:
    """FLOP/s of the products of a block and of attention, each alone, at the shapes of a model."""
    tokens, rates = spec['tokens'], {}
    for name, (k, n) in spec['products'].items():
        x, w, dy = _random((tokens, k), 0), _random((k, n), 1), _random((tokens, n), 2)
        for form, function, operands in (
            ('y', lambda x, w: x @ w, (x, w)),
            ('dx', lambda dy, w: jnp.einsum('tn,kn->tk', dy, w), (dy, w)),
            ('dw', lambda x, dy: jnp.einsum('tk,tn->kn', x, dy, preferred_element_type=jnp.float32), (x, dy)),
        ):
            rates[f'{name} {k} x {n}, {form}'] = 2 * tokens * k * n / _seconds(function, *operands)
    B, L, H, D = spec['attention']
    one = jax.devices()[0]
    kernel = Kernel('cudnn' if one.platform in ('cuda', 'gpu') else 'blockwise', 'as benchmarked', 1)
    q, k, v = (_random((B, L, H, D), seed) for seed in range(3))
    segments = jnp.ones((B, L), jnp.int32)
    scores = Scores(D**0.5, 0.0, 0)
    flops = 4 * B * H * D * L * L / 2  # the causal half

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attend.__wrapped__(q, k, v, segments, kernel, scores)  # type: ignore[attr-defined]  # no mesh here

    both = jax.grad(lambda q, k, v: jnp.sum(forward(q, k, v).astype(jnp.float32)), (0, 1, 2))
    first = _seconds(forward, q, k, v)
    rates[f'attention {B} x {L} x {H} x {D}, forward'] = flops / first
    rates[f'attention {B} x {L} x {H} x {D}, backward'] = 2.5 * flops / max(_seconds(both, q, k, v) - first, 1e-9)
    return {'rates': rates}


def check(spec: dict[str, Any]) -> dict[str, Any]:
    """Losses of the first steps. Writes weights and batches to a file, from which the other side starts."""
    if spec['compute'] == 'f32':
        jax.config.update('jax_default_matmul_precision', 'highest')  # otherwise NVIDIA GPUs use TF32
    mesh, recipe = build(spec)
    batches = _batches(spec)
    with jax.set_mesh(mesh):
        state = init_state(recipe, 0)
        if path := spec.get('inputs'):
            weights = {}
            for at, w in jax.tree_util.tree_leaves_with_path(jax.device_get(state.weights)):
                weights['weights.' + jax.tree_util.keystr(at, simple=True, separator='.')] = np.asarray(w)
            tokens = {name: np.stack([getattr(batch, name) for batch in batches]) for name in ('tokens', 'targets')}
            np.savez(path, allow_pickle=False, **weights, **tokens)
        step, losses = make_step(recipe), []
        for batch in batches[: spec['steps']]:
            state, metrics = step(state, _on_device(batch))
            losses.append(float(metrics['loss']))
    return {'losses': losses}


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s, compilation time and memory of the step."""
    off = spec.get('off')
    if off:
        SWITCHES[off]()
    mesh, recipe = build(spec)
    model: Any = recipe.model
    with jax.set_mesh(mesh):
        batches = [_on_device(batch) for batch in _batches(spec)]
        state = init_state(recipe, 0)
        start = time.perf_counter()
        options = compiler_options(spec, mesh)
        step = make_step(recipe).lower(state, batches[0]).compile(compiler_options=options)
        compiling = time.perf_counter() - start
        box, losses = [state], []
        del state

        def steps(count: int) -> None:
            for number in range(count):
                box[0], metrics = step(box[0], batches[number % BATCHES])
                losses.append(metrics['loss'])
            losses[-1].block_until_ready()
            jax.block_until_ready(box[0].step)

        found = laps(steps, spec['seconds'])
        last = float(losses[-1])
    memory: Any = step.memory_analysis()
    one = jax.devices()[0]
    return _speed(found, spec) | {
        'compile_seconds': compiling, 'first_loss': float(losses[0]), 'last_loss': last,
        'temporary_bytes': temporaries_of(step), 'argument_bytes': memory.argument_size_in_bytes,
        'peak_bytes': (one.memory_stats() or {}).get('peak_bytes_in_use', 0),
        'chose': {key: model.choices[key] for key in ('attention', 'layers', 'activations')},
    }  # fmt: skip


def decode(spec: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s of `generate` from random weights, without the prompt and compilation."""
    mesh, recipe = build(spec)
    model: Any = recipe.model
    with jax.set_mesh(mesh):
        weights = jax.jit(model.init, out_shardings=make_shardings(model.Weights))(jax.random.key(0))
    prompts = [[1, 2, 3]] * spec['rows']
    times: dict[int, list[float]] = {spec['new']: [], 2 * spec['new']: []}
    for turn in range(4):
        for tokens, found in times.items():
            start = time.perf_counter()
            generate(model, weights, prompts, tokens=tokens, temperature=0)
            found.extend([time.perf_counter() - start] * (turn > 0))  # the first turn compiles
    short, long = (statistics.median(found) for found in times.values())
    return {'tokens_per_second': spec['rows'] * spec['new'] / max(long - short, 1e-9)}


def compiler_options(spec: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Options of XLA that `pretrax train` sets, and those of the part, which win."""
    one = mesh.devices.flat[0]
    situation = Situation(hardware_of(one.platform, one.device_kind), mesh.shape)
    return {row.name: row.value for row in choose_options(situation)} | (spec.get('compiler_options') or {})


def build(spec: dict[str, Any]) -> tuple[Any, Recipe]:
    """A mesh of one device, and the recipe of the step."""
    one = jax.devices()[0]
    mesh = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=[one])
    request = ModelRequest(
        vocab_size=spec['vocab_size'], sequence_length=spec['length'], documents_per_row=1,
        dtype=DTYPES[spec['compute']], platform=one.platform, mesh=dict(mesh.shape), device_kind=one.device_kind,
        matmul=spec.get('matmul', 'compute'), exempt=tuple(spec.get('exempt', ('head', 'first.*', 'last.*'))),
        host_memory=True,
    )  # fmt: skip
    training = spec.get('training', {})
    return mesh, Recipe(
        model=Transformer(request, options=TransformerOptions(**nest(spec['model'] | spec.get('options', {})))),
        optimizer=optimizer.adamw(b1=training.get('b1', 0.9), b2=training.get('b2', 0.95), eps=training.get('eps',
        1e-8)),
        rate=lambda step: jnp.asarray(training.get('learning_rate', 1e-3)), weight_decay=training.get('weight_decay',
        0.1),
        no_decay=DEFAULT_NO_DECAY, clip_norm=training.get('clip_norm', 1.0), accumulation=spec.get('passes', 1),
    )  # fmt: skip


def _plain_products() -> None:
    """Uses the common form of products with weights: JAX differentiates an einsum that accumulates in f32."""
    matmul_module._dot = lambda equation, x, w: jnp.einsum(
        equation, x, w.astype(x.dtype), preferred_element_type=jnp.float32
    ).astype(x.dtype)  # type: ignore[assignment]


def _plain_loss() -> None:
    """Uses the common form of cross-entropy: log-softmax of f32 logits, and a gather of the target's."""

    def cross_entropy(logits: Any, targets: Any, vocab_size: int) -> tuple[Any, Any]:
        real = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits.astype(jnp.float32), -jnp.inf)
        log_z = jax.nn.logsumexp(real, axis=-1)
        target_logit = jnp.take_along_axis(real, targets[..., None], axis=-1)[..., 0]
        return psum('t', log_z - target_logit), psum('t', log_z)  # one device: no sum, but shardlib requires it

    loss_module.cross_entropy = cross_entropy


def _without_donation() -> None:
    """Uses a step that does not donate its state."""
    global make_step
    donating = make_step

    def keeping(recipe: Recipe) -> Any:
        return jax.jit(donating(recipe).__wrapped__)

    make_step = keeping


SWITCHES: dict[str, Callable[[], None]] = {
    'own products': _plain_products, 'own loss': _plain_loss, 'donation': _without_donation,
}  # fmt: skip


def _batches(spec: dict[str, Any]) -> list[Any]:
    """Random tokens: speed does not depend on what is learned."""
    rng = np.random.default_rng(0)
    shape = (spec['rows'], spec['length'] + 1)
    every = [rng.integers(0, spec['vocab_size'], shape) for _ in range(BATCHES)]
    return [pack_rows(tokens, np.zeros(shape, bool)) for tokens in every]


def _on_device(batch: Any) -> Batch:
    """The batch on the device, sharded for the current mesh."""
    return jax.device_put(Batch(*batch), make_shardings(Batch))


def _random(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Random bf16 values: zeros would multiply faster than the values in training."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _seconds(function: Callable[..., Any], *operands: Any) -> float:
    """The median over several runs; each run makes enough calls to take some milliseconds."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*operands))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*operands))
    calls = int(min(50, max(1, 0.02 / max(time.perf_counter() - start, 1e-6))))
    runs = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*operands) for _ in range(calls)][-1])
        runs.append((time.perf_counter() - start) / calls)
    return statistics.median(runs)


def _speed(found: list[float], spec: dict[str, Any]) -> dict[str, Any]:
    median = statistics.median(found)
    return {
        'tokens_per_second': spec['rows'] * spec['length'] / median, 'step_seconds': median,
        'spread': (max(found) - min(found)) / median, 'laps': len(found),
    }  # fmt: skip


if __name__ == '__main__':
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text() if sys.argv[1].endswith('.json') else sys.argv[1]))))
