"""No key of a file is dropped silently."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrax.translate import Fate, translate, yaml_text

MODALITIES = Path(__file__).parents[2] / 'examples' / 'coming-from' / 'modalities.yml'


NANOGPT = "n_layer = 2\nn_head = 2\nn_embd = 64\nbatch_size = 4\nblock_size = 64\nout_dir = 'out'\n"


MAXTEXT = 'base_emb_dim: 64\nmax_target_length: 128\nhf_access_token: hf_secret\ndataset_type: synthetic\n'


NAMES = st.from_regex(r'[a-z][a-z_]{0,12}[a-z]', fullmatch=True).filter(lambda name: name not in ('if', 'is', 'in',
'or', 'as', 'and', 'def', 'del', 'for', 'try', 'not', 'else', 'elif', 'from', 'pass', 'with', 'break', 'class', 'raise',
'while', 'yield', 'async', 'await', 'except', 'finally', 'global', 'import', 'lambda', 'return', 'assert', 'nonlocal',
'continue', 'y', 'n', 'no', 'on', 'off', 'yes', 'null', 'true', 'false'))  # fmt: skip


@pytest.mark.parametrize('tool', ['nanogpt', 'maxtext', 'modalities'])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(NAMES.map(lambda name: f'my_{name}'), min_size=1, max_size=4), value=st.integers(0, 9))
def test_no_key_is_dropped_silently(tmp_path, tool, names, value):
    """A key that nobody knows is reported, in the translation and in the file, and so has every other key a fate."""
    separator = ' = ' if tool == 'nanogpt' else ': '
    texts = {'nanogpt': NANOGPT, 'maxtext': MAXTEXT, 'modalities': MODALITIES.read_text()}
    text = texts[tool] + ''.join(f'{name}{separator}{value}\n' for name in names)
    path = tmp_path / ('a.py' if tool == 'nanogpt' else 'a.yaml')
    path.write_text(text)
    translation = translate(tool, path)
    assert translation.fates.keys() == translation.given.keys()
    assert {key for key, (fate, _) in translation.fates.items() if fate is Fate.UNKNOWN} == names
    comments = yaml_text(translation).partition('# Unknown:')[2]
    assert all(name in comments for name in names)
    assert 'hf_secret' not in yaml_text(translation)
