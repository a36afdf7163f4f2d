"""A model that is known and not read is refused with the reason, which docs/models.md gives too."""

from pathlib import Path

import pytest

from pretrax.errors import UserError
from pretrax.huggingface.configs import BY_TYPE, REFUSED, table_of

PAGE = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()


@pytest.mark.parametrize('model_type', REFUSED)
def test_a_refusal_names_the_parts(model_type):
    with pytest.raises(UserError) as error:
        table_of({'model_type': model_type})
    assert f'does not support: it has {REFUSED[model_type]}\n' in str(error.value)
    assert model_type not in BY_TYPE
    assert REFUSED[model_type] in ' '.join(PAGE.split())


def test_the_type_of_another_model_is_refused_without_a_reason():
    with pytest.raises(UserError, match='which pretrax does not support\n'):
        table_of({'model_type': 'nothing'})
