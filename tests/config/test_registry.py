"""Components by name: their options come from their signature or from a model, and reach them."""

import pydantic
import pytest

from config.smallest import VALUES
from pretrax.config import build, from_values, register
from pretrax.config.one_of import OneOf
from pretrax.config.registry import names, options_model
from pretrax.errors import UserError


@register('schedule', 'stairs')
def stairs(steps: int, *, every: int = 10, factor=0.5, warmup: int = 0) -> tuple:
    return steps, every, factor, warmup


class RowsOptions(pydantic.BaseModel):
    rows: int = pydantic.Field(ge=1)
    columns: tuple[int, ...] = ()


@register('data', 'rows', options=RowsOptions)
class Rows:
    def __init__(self, request: str, *, options: RowsOptions):
        self.request, self.options = request, options


def test_options_from_a_signature_reach_the_component() -> None:
    config = from_values(VALUES | {'schedule': {'name': 'stairs', 'factor': 0.25}})
    assert build('schedule', config.schedule, config.steps) == (10, 10, 0.25, 0)
    with pytest.raises(UserError, match=r"schedule.factor is 'x'; expected a number"):
        from_values(VALUES | {'schedule': {'name': 'stairs', 'factor': 'x'}})


def test_options_from_a_model_reach_the_component_validated() -> None:
    config = from_values(VALUES | {'data': {'name': 'rows', 'rows': 2, 'columns': [1, 2]}})
    data = build('data', config.data, 'request')
    assert (data.request, data.options.rows, data.options.columns) == ('request', 2, (1, 2))
    for rows, said in ((0, 'at least 1'), ('2', 'expected an integer'), (True, 'expected an integer')):
        with pytest.raises(UserError, match=said):
            from_values(VALUES | {'data': {'name': 'rows', 'rows': rows}})
    with pytest.raises(UserError, match=r'data\.row is not a key.*\n.*did you mean rows'):
        from_values(VALUES | {'data': {'name': 'rows', 'row': 2}})
    with pytest.raises(UserError, match=r'data\.rows is missing'):
        from_values(VALUES | {'data': {'name': 'rows'}})


def test_registration_is_checked() -> None:
    with pytest.raises(UserError, match='did you mean optimizer'):
        register('optimiser', 'x')
    with pytest.raises(UserError, match='cannot name a component'):
        register('optimizer', 'a b')
    with pytest.raises(UserError, match='already registered by pretrax itself'):
        register('schedule', 'cosine')(lambda steps: steps)

    def untyped(*, momentum=None): ...
    def unwritable(*, device: Rows): ...

    with pytest.raises(UserError, match='momentum: float'):
        register('optimizer', 'untyped')(untyped)
    with pytest.raises(UserError, match='cannot be checked'):
        register('optimizer', 'unwritable')(unwritable)

    @register('optimizer', 'greedy')
    def greedy(*, learning_rate: float = 1.0): ...

    with pytest.raises(UserError, match='pretrax applies itself'):
        from_values(VALUES | {'optimizer': {'name': 'greedy', 'learning_rate': 1.0}})


@pytest.mark.parametrize('kind', ['model', 'data', 'optimizer', 'schedule'])
def test_every_built_in_component_can_be_imported(kind: str) -> None:
    for name in names(kind):
        options = options_model(kind, name)
        for model in options.models if isinstance(options, OneOf) else (options,):
            assert issubclass(model, pydantic.BaseModel)
