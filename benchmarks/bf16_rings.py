"""The error of a sum over a ring of devices that rounds to bf16 at each hop (`precision.reduction=bf16_r_d`).

    python benchmarks/bf16_rings.py

Each device has a gradient with the same mean in all devices, and noise of its own: of the size of the mean, or ten
times that. The error is that of the summed array, relative to the sum in f64; bias is the part of it that points along
the mean.
"""

import jax.numpy as jnp
import numpy as np

VALUES = 1 << 14


def error_of(n: int, noise: float) -> tuple[float, float]:
    """Error and bias of a sum over n devices."""
    rng = np.random.default_rng(0)
    mean = rng.standard_normal(VALUES).astype(np.float32)
    parts = [mean + noise * rng.standard_normal(VALUES).astype(np.float32) for _ in range(n)]
    exact = np.sum(np.array(parts, np.float64), axis=0)
    total = parts[0].astype(jnp.bfloat16)
    for part in parts[1:]:
        total = total + part.astype(jnp.bfloat16)  # rounded to bf16
    difference = total.astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact)), float(difference @ mean / (exact @ mean))


def main() -> None:
    print('| devices in the ring | error, noise 1 | bias | error, noise 10 | bias |\n|---|---|---|---|---|')
    for n in (2, 8, 16, 64, 256, 1024):
        cells = [f'{100 * value:.2f} %' for noise in (1.0, 10.0) for value in error_of(n, noise)]
        print(f'| {n} | {" | ".join(cells)} |')


if __name__ == '__main__':
    main()
