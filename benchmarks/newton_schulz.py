"""The rounding error of f32 and bf16 products in Muon's Newton-Schulz iterations (`optimizer.precision`).

    python benchmarks/newton_schulz.py

The matrices have singular values in proportion to k^-power for k = 1, 2, ..., as momenta have, or independent normal
entries. Their singular vectors are random. The table has the least and the largest singular value of the result, and
the distance of the result from the same iterations in f64 with NumPy, relative to it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.train.muon import Polynomials, coefficients, orthogonalize

SHAPES = ((512, 512), (256, 1024), (512, 2048))
SPECTRA = {'normal entries': None, 'k^-0.5': 0.5, 'k^-1': 1.0}
ITERATIONS = 5


def matrix(shape: tuple[int, int], power: float | None) -> np.ndarray:
    """An f64 matrix with this spectrum."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    if power is None:
        return x
    left, _, right = np.linalg.svd(x, full_matrices=False)
    return left * np.arange(1, len(left) + 1.0) ** -power @ right


def reference(x: np.ndarray, polynomials: Polynomials) -> np.ndarray:
    """The iterations in f64, on the singular values: the result of exact arithmetic."""
    left, s, right = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s)
    for a, b, c in coefficients(polynomials, ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    return left * s @ right


def row(shape: tuple[int, int], spectrum: str, polynomials: Polynomials) -> str:
    x = matrix(shape, SPECTRA[spectrum])
    exact = reference(x, polynomials)
    cells = [_range(exact)]
    for dtype in (jnp.float32, jnp.bfloat16):
        run = jax.jit(lambda x: orthogonalize(x, coefficients(polynomials, ITERATIONS), 1e-8))
        result = np.asarray(run(jnp.asarray(x[None], dtype))[0], np.float64)
        error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
        cells += [_range(result), f'{error:.1e}']
    return f'| {shape[0]} x {shape[1]} | {spectrum} | `{polynomials}` | {" | ".join(cells)} |'


def _range(x: np.ndarray) -> str:
    s = np.linalg.svd(x, compute_uv=False)
    return f'{s[-1]:.3f} to {s[0]:.3f}'


def main() -> None:
    print('| matrix | singular values | polynomials | result in f64 | in f32 | error | in bf16 | error |')
    print('|---' * 8 + '|')
    for shape in SHAPES:
        for spectrum in SPECTRA:
            for polynomials in ('jordan', 'polar_express'):
                print(row(shape, spectrum, polynomials), flush=True)


if __name__ == '__main__':
    main()
