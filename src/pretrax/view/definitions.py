"""What each number means that a run writes or a page shows: definitions.yaml has the names, units and meanings.

The page of metrics of the reference is generated from it.
"""

from pathlib import Path
from typing import NamedTuple

from pretrax.tables import read_table


class Definition(NamedTuple):
    """What a number is."""

    name: str  # for people, such as 'training loss'
    unit: str  # such as 'nats per token'; '' if it has none
    meaning: str  # one sentence

    @property
    def is_fraction(self) -> bool:
        """Whether the number is shown in percent."""
        return self.unit == 'fraction of 1'


_SECTIONS = {
    section: {key: Definition(one.get('name', key), one.get('unit', ''), one['meaning']) for key, one in table.items()}
    for section, table in read_table(Path(__file__).with_suffix('.yaml')).items()
}
DEFINITIONS = _SECTIONS['metrics']
OF_RUNS = _SECTIONS['runs']
FIGURES = OF_RUNS | _SECTIONS['reports']
COMPARISONS = _SECTIONS['comparisons']
LAYER_DEFINITIONS = _SECTIONS['layers']
PROGRAM_FIGURES = _SECTIONS['program']
TRACE_COLUMNS, TRACE_PHASE_COLUMNS = _SECTIONS['trace'], _SECTIONS['trace_phases']


def definition_of(key: str) -> Definition:
    """The definition of a key of metrics; of a key that pretrax does not know, only its name."""
    if key in DEFINITIONS:
        return DEFINITIONS[key]
    start, slash, name = key.partition('/')
    family = DEFINITIONS.get(f'{start}/NAME') if slash else None
    if family is not None:
        return family._replace(name=family.name.replace('NAME', name))
    return Definition(key, '', 'a number that the model or a plugin adds to its metrics')


def definition_of_statistic(key: str) -> Definition:
    """The definition of a key of layer statistics; that of one kind of weight is named after the weight."""
    start, slash, weight = key.partition('/')
    found = LAYER_DEFINITIONS.get(start) or Definition(start, '', 'a statistic that this version does not know')
    return found._replace(name=f'{found.name} of {weight}') if slash else found
