"""Print the keys whose values differ between two configurations."""

import json

from pretrax.option import argument


def diff(
    old: str = argument('A YAML file.', metavar='A'),
    new: str = argument('Another YAML file.', metavar='B'),
) -> None:
    from pretrax.config import ABSENT, load
    from pretrax.config import diff as differences

    def shown(value: object) -> str:
        return str(value) if value is ABSENT else json.dumps(value, ensure_ascii=False)

    changes = differences(load(old), load(new))
    for key, before, after in changes:
        print(f'{key}: {shown(before)} -> {shown(after)}')
    if not changes:
        print('no differences')
