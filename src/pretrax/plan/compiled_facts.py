"""Facts of steps that `pretrax plan --verify` compiled, so that later plans of the same configuration know them.

They are in `plan.json` in the user's cache directory, by configuration, hardware, versions and flags, and by choice.
`mesh: auto` does not read them: processes of a run whose caches differ would choose different meshes.
"""

import dataclasses
import hashlib
import json

from pretrax.config import RunConfig, values_in_step
from pretrax.cost.topology import Topology
from pretrax.errors import Report
from pretrax.system.cache import cache_directory, read_entries, write_entries
from pretrax.system.software import flags, versions

_CHOSEN = ('mesh', 'batch.micro', 'model.save', 'model.batch_parts', 'memory.offload')  # by a search


@dataclasses.dataclass(frozen=True)
class CompiledFact:
    """Facts that the compiler reported for a step."""

    needed: int  # bytes per device
    # Seconds of communication that the schedule of the program does not hide; None: it has no schedule
    exposed: float | None


class CompiledFacts:
    """The facts of one configuration on some hardware, by `Choice.written()`."""

    def __init__(self, config: RunConfig, topology: Topology, say: Report):
        self._path = cache_directory() / 'plan.json'
        if not (entries := read_entries(self._path)) and self._path.exists():
            say(f'{self._path} is damaged; the plan does not use steps that were compiled before')
        step = {key: value for key, value in values_in_step(config).items() if not key.startswith(_CHOSEN)}
        facts = [step, config.data.model_dump(mode='json'), versions(), flags()]
        self._key = f'{topology} | {hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}'
        known = entries.get(self._key)
        self._known = known if isinstance(known, dict) else {}

    def get(self, choice: str) -> CompiledFact | None:
        """The facts of a choice; None: unknown."""
        try:
            fact = self._known[choice]
            return CompiledFact(int(fact['needed']), fact['exposed'])
        except (KeyError, TypeError, ValueError):
            return None

    def add(self, choice: str, fact: CompiledFact) -> CompiledFact:
        """Keeps the facts of a choice, unless the file cannot be written. Returns them."""
        self._known[choice] = dataclasses.asdict(fact)
        write_entries(self._path, read_entries(self._path) | {self._key: self._known})
        return fact
