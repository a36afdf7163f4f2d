"""What a change of a key affects, as `schema.py` declares it: the compiled step, its inputs, or nothing."""

from typing import Any

from pydantic import BaseModel

from pretrax.config.problems import leaves
from pretrax.config.schema import Effect, RunConfig


def effect_of(key: str) -> Effect:
    """The declaration of a dotted key, or of the innermost section that has one. Raises KeyError if there is none."""
    section: Any = RunConfig
    effect = None
    for name in key.split('.'):
        field = section.model_fields.get(name.partition('[')[0])
        if field is None:  # an option of a component
            break
        effect = next((one for one in field.metadata if isinstance(one, Effect)), effect)
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break
    if effect is None:
        raise KeyError(f'{key}: config/schema.py declares no effect for it')
    return effect


def may_change_on_resume(key: str) -> bool:
    """Whether a run may be resumed with another value of this key, without `--allow-changes`."""
    return effect_of(key).resumable


def values_in_step(config: RunConfig, *, inputs: bool = False) -> dict[str, Any]:
    """{dotted key: value} of everything that may change the compiled step, or with `inputs` what it computes."""
    wanted = ('step', 'input') if inputs else ('step',)
    by_key = {'.'.join(map(str, path)): value for path, value in leaves(config.model_dump(mode='json'))}
    return {key: value for key, value in by_key.items() if effect_of(key).on in wanted}
