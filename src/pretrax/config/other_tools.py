"""Keys as users of other tools type them: `lr`, `batch_size`, `optimizer=lion`; and what to write instead."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pretrax.tables import read_table


class OtherTools(NamedTuple):
    names: dict[str, str]  # {name in another tool: key of pretrax}
    values: dict[str, str]  # {section: its key that a plain value is meant for}
    spellings: dict[str, dict[str, Any]]  # {key: {value in another tool, in lower case: value of pretrax}}
    advice: dict[str, str]  # {name in another tool: what to do instead}
    verbs: dict[str, str]  # {verb of another tool: what to write instead}


@functools.cache
def other_tools() -> OtherTools:
    """The table `other_tools.yaml`."""
    table = read_table(Path(__file__).with_suffix('.yaml'))
    names = {name: key for key, names in table['names'].items() for name in names}
    spellings = {
        key: {theirs: ours for ours, values in pairs.items() for theirs in values}
        for key, pairs in table['spellings'].items()
    }
    return OtherTools(names, table['values'], spellings, table['advice'], table['verbs'])


def advice_for(key: str, value: Any, given: Mapping[str, Any], known: Mapping[str, str], is_shown: bool = True) -> str:
    """Returns the correction of a key that pretrax does not have; '' if no other tool has this name.

    Args:
        key: the key, without its section.
        value: its value; of a section such as `training: {lr: 1e-3}`, the first key that is known counts.
        given: the whole configuration.
        known: {last part of a key: the key}.
        is_shown: whether the value may be repeated in a message.
    """
    table = other_tools()
    if isinstance(value, Mapping):
        return next(filter(None, (advice_for(str(name), of, given, known, is_shown) for name, of in value.items())), '')
    name = key.lower().replace('-', '_')
    if meant := table.names.get(name) or known.get(name):
        if inner := table.values.get(meant.rpartition('.')[2]):
            meant = f'{meant}.{inner}'
        return f'write {assignment(meant, value)}' if is_shown else f'write {meant}'
    advice = table.advice.get(name, '')
    batch = given.get('batch')
    length = batch.get('sequence_length') if isinstance(batch, Mapping) else None
    are_counts = all(type(each) is int and each > 0 for each in (value, length))
    if name.endswith('batch_size') and advice and is_shown and are_counts:
        return f'write batch.tokens={value * length} ({value} x {length}): {advice}'
    return advice


def spelled(key: str, value: Any) -> Any:
    """The value as pretrax spells it, if it is one of another tool: 'bf16' for 'bfloat16'."""
    return other_tools().spellings.get(key, {}).get(str(value).lower(), value)


def assignment(key: str, value: Any) -> str:
    """`optimizer.learning_rate=0.001`, as on a command line, with the value as pretrax spells it."""
    value = spelled(key, value)
    text = value if isinstance(value, str) else json.dumps(value)
    return f'{key}={text}' if len(text) <= 60 else f'{key}=...'
