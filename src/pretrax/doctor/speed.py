"""The rate of matrix products of each device, while all devices of all nodes work."""

import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.cost.devices import lookup
from pretrax.doctor.barrier import wait_for_all
from pretrax.doctor.comparison import outliers, share_of
from pretrax.doctor.context import Context
from pretrax.doctor.findings import Finding, failure, warning

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
        fix = 'take this node out: a device that computes wrong numbers spoils the run. Then test or replace it'
        text = f'the same product gave other bits on device {", ".join(str(devices[i].id) for i in changed)}'
        yield failure('products', text, fix)
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
    """How often each device computed its product in `_SECONDS`,
    and the devices whose last result differs from the first.
    """
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
