"""Packaged configurations are found by name from any directory; a file of that name wins."""

import pytest

from pretrax.config import load
from pretrax.config.packaged import packaged_names
from pretrax.errors import UserError


def test_a_name_that_is_no_file_is_a_packaged_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {'quickstart', 'moe', 'starter', 'scale/16b', 'sweeps/quick'} <= set(packaged_names())
    assert load('quickstart', ['steps=500']).steps == 500
    assert load('scale/16b').name
    (tmp_path / 'quickstart').write_text('extends: moe.yaml\n')
    with pytest.raises(UserError, match=r'moe\.yaml does not exist'):
        load('quickstart')


def test_the_nearest_packaged_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='quickstrat does not exist; did you mean quickstart'):
        load('quickstrat')
