"""The equivalence matrix: training on every axis, pair and triple of axes against training on one device, as a table.

    uv run python tests/parallel/matrix.py [part of a model's name] [part of a mesh, such as p=2]

It takes about ten minutes on two cores, and ends with code 1 if a difference is larger than is allowed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: F401  eight devices
from parallel.cases import ALLOWED, MODELS, alone, differences, meshes, trained


def main() -> int:
    wanted, axes = [*sys.argv[1:], '', ''][:2]
    print('| model | mesh | ' + ' | '.join(ALLOWED) + ' |\n|' + '---|' * (2 + len(ALLOWED)))
    print('| allowed | | ' + ' | '.join(f'{value:.0e}' for value in ALLOWED.values()) + ' |')
    wrong = 0
    for name in MODELS:
        for mesh in meshes(name) if wanted in name else ():
            said = ' '.join(f'{axis}={n}' for axis, n in mesh.items())
            if axes not in said:
                continue
            found = differences(trained(name, mesh), alone(name))
            bad = [key for key, value in found.items() if not value <= ALLOWED[key]]
            wrong += bool(bad)
            cells = [f'**{value:.1e}**' if key in bad else f'{value:.1e}' for key, value in found.items()]
            print(f'| {name} | {said} | ' + ' | '.join(cells) + ' |', flush=True)
    return int(wrong > 0)


if __name__ == '__main__':
    sys.exit(main())
