"""Checks whether a run would start on other machines, for `pretrax launch`, which imports no JAX.

`python -m pretrax.doctor.start_check TARGET ALLOW_CHANGES CONFIG [KEY=VALUE ...]` prints a line of JSON.
"""

import json
import sys

from pretrax.config import load
from pretrax.errors import UserError
from pretrax.run.start_check import check_start
from pretrax.system.target import Target


def main(words: list[str]) -> None:
    target, allow_changes, config, *overrides = words
    warnings: list[str] = []
    problem = None
    try:
        there = Target(**json.loads(target))
        check_start(load(config, overrides), warnings.append, json.loads(allow_changes), there)
    except UserError as error:
        problem = error.short_text()
    print(json.dumps({'warnings': warnings, 'problem': problem}))


if __name__ == '__main__':
    main(sys.argv[1:])
