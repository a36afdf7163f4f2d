"""What is shipped with a job."""

import pytest

from launched import BASE
from pretrax.config import from_values
from pretrax.errors import UserError
from pretrax.launch.shipped import shipped


def test_large_plugins_and_two_of_one_name_are_refused(tmp_path):
    (tmp_path / 'a').mkdir()
    for path in (tmp_path / 'plugin.py', tmp_path / 'a' / 'plugin.py'):
        path.write_text('x = 1\n')
    with pytest.raises(UserError, match=r'two files are named plugin\.py'):
        shipped(from_values(BASE | {'plugins': [str(tmp_path / 'plugin.py'), str(tmp_path / 'a' / 'plugin.py')]}))
    (tmp_path / 'large.py').write_text('#' * 1_000_000)
    with pytest.raises(UserError, match=r'expected at most 900,000'):
        shipped(from_values(BASE | {'plugins': [str(tmp_path / 'large.py')]}))
