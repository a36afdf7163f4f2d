"""The devices of a process: their number and memory, a product whose result is known, and the speed of products."""

import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.amounts import size
from pretrax.config import resolve_mesh
from pretrax.config.batch import check_batch
from pretrax.cost.devices import lookup
from pretrax.doctor.barrier import wait_for_all
from pretrax.doctor.comparison import outliers, share_of
from pretrax.doctor.findings import Context, Finding, failure, warning
from pretrax.errors import UserError
from pretrax.run.devices import device_memory, simulate_cpus
from pretrax.run.placement import n_slices

_SIDE = 512
_DEFECT = 'take this node out: a device that computes wrong numbers spoils the run. Then test or replace it'


def start(context: Context) -> None:
    """Chooses the number of simulated CPU devices as training does. Call it before JAX starts its backends."""
    if context.config is not None and not context.config.mesh.is_planned:
        from pretrax.config.batch import common_sequences

        simulate_cpus(context.config.mesh, common_sequences(context.config.batch))


def present(context: Context) -> Iterator[Finding]:
    """Kind and number, which must be the same on all nodes, and memory."""
    devices = jax.local_devices()
    kind = 'CPU device' if devices[0].platform == 'cpu' else devices[0].device_kind
    fix = 'nvidia-smi or /dev/accel*: is one lost? else the same resources and CUDA_VISIBLE_DEVICES for all nodes'
    text = f'{len(devices)} x {kind}'
    yield Finding('devices', text, fix=fix, same=text)
    free = [(device_memory(device) or 0) - _in_use(device) for device in devices]
    if min(free) > 0:
        yield Finding('device memory', f'{size(min(free))} free per device', amount=min(free))


def mesh(context: Context) -> Iterator[Finding]:
    """Whether the mesh and the batch of the configuration fit all devices together."""
    if context.config is None or context.config.mesh.is_planned or context.index:
        return
    devices = jax.devices()
    try:
        sizes = resolve_mesh(context.config.mesh, len(devices), devices[0].platform, n_slices(devices))
        check_batch(context.config.batch, sizes)
    except UserError as error:
        lines = str(error).splitlines()
        fix = lines[-1].strip() if len(lines) > 1 else 'change mesh:, or use another number of nodes'
        yield failure('mesh', lines[0], fix)
    else:
        shown = ', '.join(f'{axis}={n}' for axis, n in sizes.items() if n > 1 or axis in 'rdt')
        yield Finding('mesh', f'{shown} of {len(devices)} devices')


def products(context: Context) -> Iterator[Finding]:
    """A product of small integers, which is exact in f32 and bf16: another result is a defect of the device."""
    rows, columns = np.indices((_SIDE, _SIDE))
    a, b = (rows * 7 + columns * 3) % 13 - 6, (rows * 5 + columns * 11) % 9 - 4
    expected = a @ b  # |sums| < 2**24, so f32 represents them
    wrong = []
    for device in jax.local_devices():
        for dtype in (jnp.float32, jnp.bfloat16):
            x, y = (jax.device_put(jnp.asarray(part, dtype), device) for part in (a, b))
            found = jnp.matmul(x, y, preferred_element_type=jnp.float32)
            if not np.array_equal(np.asarray(found), expected):
                wrong.append(f'device {device.id} in {jnp.dtype(dtype).name}')
    if wrong:
        yield failure('known product', f'wrong: {", ".join(wrong[:4])}', _DEFECT)
    else:
        yield Finding('known product', f'exact on {len(jax.local_devices())} devices, f32 and bf16')


def memory_in_use(context: Context) -> Iterator[Finding]:
    """Memory that another program holds on a device, if the device reports it."""
    for device in jax.local_devices():
        limit, used = device_memory(device), _in_use(device)
        if limit and used > 0.1 * limit:
            text = f'{size(used)} of {size(limit)} on device {device.id} are in use'
            yield warning('device memory', text, 'end what uses it: nvidia-smi, or fuser -v /dev/accel*')


def _in_use(device: jax.Device) -> int:
    return (device.memory_stats() or {}).get('bytes_in_use', 0) if device.platform != 'cpu' else 0


_SECONDS = 1.0  # of the measurement: long enough for clocks to settle under load
_SIDES = {'cpu': 512, 'gpu': 8192, 'tpu': 8192}
_LOW = 0.5  # of the peak in the table; large products reach 0.7 to 0.9 of it


def rates(context: Context) -> Iterator[Finding]:
    """FLOP/s of each device. All nodes measure at the same time, so that shared power and cooling count."""
    devices = jax.local_devices()
    platform = devices[0].platform
    side = _SIDES.get(platform, 4096)
    dtype = jnp.float32 if platform == 'cpu' else jnp.bfloat16
    values = np.random.default_rng(0).standard_normal((side, side), np.float32)
    operands = [jax.device_put(jnp.asarray(values, dtype), device) for device in devices]
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32).astype(dtype))
    first = [product(x) for x in operands]
    jax.block_until_ready(first)  # compiled
    wait_for_all('products', context)
    counts, changed = _repeat(product, operands, first)
    found = [2 * side**3 * count / _SECONDS for count in counts]
    if changed:
        text = f'the same product gave other bits on device {", ".join(str(devices[i].id) for i in changed)}'
        yield failure('products', text, _DEFECT)
    known = lookup(devices[0].device_kind) if platform != 'cpu' else None
    share = f', at least {share_of(min(found), known.bf16, f"the peak of {known.name}")}' if known else ''
    text = f'{sum(found) / 1e12:.3g} TFLOP/s of {jnp.dtype(dtype).name} per node{share}'
    yield Finding('products', text, amount=sum(found), compare=True, fix=SLOW)
    if platform != 'cpu':  # simulated devices share the cores
        slow = outliers(dict(enumerate(found)))
        for i, below in slow.items():
            text = f'device {devices[i].id}: {found[i] / 1e12:.3g} TFLOP/s, {below:.0%} below the median of this node'
            yield warning('products', text, SLOW)
        if known and not slow and min(found) < _LOW * known.bf16:
            text = f'{min(found) / 1e12:.3g} TFLOP/s, {share_of(min(found), known.bf16, f"the peak of {known.name}")}'
            yield warning('products', text, SLOW)


SLOW = 'every step waits for it: look for other programs, heat and power (top, nvidia-smi -q -d PERFORMANCE)'


def _repeat(
    product: jax.stages.Wrapped, operands: Sequence[jax.Array], first: Sequence[jax.Array]
) -> tuple[list[float], list[int]]:
    """How often each device computed its product in `_SECONDS`, and the devices whose result changed."""
    counts, last = [0.0] * len(operands), list(first)

    def work(i: int) -> None:
        began = time.monotonic()
        while (now := time.monotonic()) < began + _SECONDS:
            for _ in range(4):  # queued: a device does not wait for Python
                last[i] = product(operands[i])
            last[i].block_until_ready()
            counts[i] += 4
        counts[i] *= _SECONDS / (time.monotonic() - began)
        del now

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(operands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, [i for i, (a, b) in enumerate(zip(first, last, strict=True)) if not bool(jnp.array_equal(a, b))]
