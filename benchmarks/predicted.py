"""Published speeds beside what `pretrax plan` predicts for the same sizes, and the error. No device is needed.

    uv run python benchmarks/predicted.py

Sources: MaxText's READMEs of its v5e and v5p configurations and its scripts of the same names (full recomputation,
sequences of 2,048). Sequences a device are those of its scripts for 16b, 32b and 64b on v5e; 1 for 128b, and those on
v5p, are assumed.
"""

from pretrax.scale.roofline import Sizes, predict
from pretrax.scale.topology import parse_topology

DECODERS = {  # layers, width, heads of 128, feed-forward (gated)
    '16b': (32, 4096, 64, 28672),
    '32b': (32, 8192, 64, 28672),
    '64b': (64, 8192, 64, 28672),
    '128b': (64, 8192, 128, 57344),
}
PUBLISHED = (  # decoder, topology, slices, sequences a device, tensor parallel, MFU in percent
    ('16b', 'v5e-256', 1, 6, 1, 61.10),
    ('16b', 'v5e-256', 2, 6, 1, 59.37),
    ('16b', 'v5e-256', 8, 6, 1, 58.27),
    ('16b', 'v5e-256', 32, 6, 1, 54.65),
    ('32b', 'v5e-256', 1, 4, 1, 66.86),
    ('32b', 'v5e-256', 32, 4, 1, 60.40),
    ('64b', 'v5e-256', 1, 2, 1, 59.90),
    ('64b', 'v5e-256', 32, 2, 1, 50.18),
    ('128b', 'v5e-256', 1, 1, 1, 56.06),
    ('128b', 'v5e-256', 32, 1, 1, 46.25),
    ('32b', 'v5p-128', 1, 8, 1, 71.47),
    ('64b', 'v5p-128', 1, 4, 1, 70.31),
)
LENGTH, VOCABULARY = 2048, 32000


def main() -> None:
    print('| decoder | hardware | published MFU | predicted | error | limited by |\n|---|---|---|---|---|---|')
    for name, hardware, slices, sequences, t, published in PUBLISHED:
        layers, width, heads, inner = DECODERS[name]
        matmul = layers * (4 * width * heads * 128 + 3 * width * inner)
        sizes = Sizes(
            layers, width, heads, heads, 128, inner, VOCABULARY, matmul, matmul + 2 * VOCABULARY * width, LENGTH / 2
        )
        topology = parse_topology(hardware, slices)
        n = topology.n_devices
        mesh = {'r': slices, 'd': n // slices // t, 't': t}
        found = predict(sizes, topology.device, mesh, n * sequences * LENGTH, 1, recompute=True)
        assert found is not None
        predicted = 100 * found.mfu
        print(
            f'| {name} | {slices} x {hardware} | {published:.1f} % | {predicted:.1f} % '
            f'| {predicted - published:+.1f} | {found.bound} |'
        )


if __name__ == '__main__':
    main()
