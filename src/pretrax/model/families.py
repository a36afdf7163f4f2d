"""Model families and presets: the rows of families.yaml and presets.yaml. No JAX here.

Every option can be overridden: `model: {preset: gpt2-124m, n_layers: 6}`. docs/models.md has the table of families.
"""

import functools
import re
from pathlib import Path
from typing import Any

from pretrax.tables import read_table

FAMILIES, PRESETS = (Path(__file__).with_name(name) for name in ('families.yaml', 'presets.yaml'))
# The names of the rows, without reading the rest of the tables
FAMILY_NAMES, PRESET_NAMES = (
    tuple(re.findall(r'^([a-z][\w.-]*):', table.read_text(), re.MULTILINE)) for table in (FAMILIES, PRESETS)
)


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """The options of each family, by dotted key."""
    rows = {name: row for name, row in read_table(FAMILIES).items() if name in FAMILY_NAMES}
    return {name: {key: tuple(x) if isinstance(x, list) else x for key, x in row.items()} for name, row in rows.items()}


# Named activations of a layer, in the order in which they are computed. All of them can be recomputed from 'input',
# which is always kept, on the device or in host memory.
SAVED_NAMES = ('q', 'k', 'v', 'attention', 'attention_out', 'up', 'gate', 'mlp_out')
SAVE_PRESETS: dict[str, tuple[str, ...]] = {
    'none': (),
    'attention': ('q', 'k', 'v', 'attention'),  # the inputs of its backward pass, so that it is not computed twice
    'dots': ('q', 'k', 'v', 'attention_out', 'up', 'gate', 'mlp_out'),  # results of products with weights
    'full': SAVED_NAMES,
}
