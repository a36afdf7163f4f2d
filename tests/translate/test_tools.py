"""`pretrax import-config`: no key is dropped silently, wrong files are refused, and the result is a configuration."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrax.cli import main
from pretrax.config import load
from pretrax.translate import Fate, translate, yaml_text

MODALITIES = Path(__file__).parents[2] / 'examples' / 'coming-from' / 'modalities.yml'
NANOGPT = "n_layer = 2\nn_head = 2\nn_embd = 64\nbatch_size = 4\nblock_size = 64\nout_dir = 'out'\n"
MAXTEXT = 'base_emb_dim: 64\nmax_target_length: 128\nhf_access_token: hf_secret\ndataset_type: synthetic\n'
NAMES = st.from_regex(r'[a-z][a-z_]{0,12}[a-z]', fullmatch=True).filter(lambda name: name not in ('if', 'is', 'in',
'or', 'as', 'and', 'def', 'del', 'for', 'try', 'not', 'else', 'elif', 'from', 'pass', 'with', 'break', 'class', 'raise',
'while', 'yield', 'async', 'await', 'except', 'finally', 'global', 'import', 'lambda', 'return', 'assert', 'nonlocal',
'continue', 'y', 'n', 'no', 'on', 'off', 'yes', 'null', 'true', 'false'))  # fmt: skip


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(['import-config', *map(str, arguments)])
    return int(stopped.value.code or 0)


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


def test_the_file_is_written_and_the_summary_names_what_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('mine.py').write_text(NANOGPT + 'wanted = 3\n')
    assert run('nanogpt', 'mine.py', '--out', 'mine.yaml') == 0
    printed = capsys.readouterr().out
    assert printed.startswith('wrote mine.yaml\n')
    assert printed.endswith('next: pretrax config show mine.yaml\n')
    assert '  out_dir: the run is written to runs/mine' in printed
    assert '  wanted: not a key of nanoGPT' in printed
    assert load('mine.yaml').batch.tokens == 4 * 64 * 40
    assert run('nanogpt', 'mine.py', '--out', 'mine.yaml') == 2
    assert 'already exists' in capsys.readouterr().err
    assert run('nanogpt', 'mine.py') == 0
    assert capsys.readouterr().out == Path('mine.yaml').read_text()


@pytest.mark.parametrize(
    ('tool', 'name', 'text', 'message'),
    [
        ('nanogpt', 'absent.py', None, 'cannot be read'),
        ('maxtext', 'absent.yml', None, 'absent.yml'),
        ('nanogpt', 'a.py', b'\xff\xfe', 'UTF-8'),
        ('nanogpt', 'a.py', b"n_layer = 2\nbatch_size = __import__('os').system('touch touched')\n", 'a.py:2'),
        ('nanogpt', 'a.py', b'colour = 3\n', 'it has none of its keys'),
        ('nanogpt', 'a.yml', MAXTEXT.encode(), 'it looks like one of MaxText: pretrax import-config maxtext a.yml'),
        ('maxtext', 'a.py', NANOGPT.encode(), 'it looks like one of nanoGPT'),
        ('modalities', 'a.yml', MAXTEXT.encode(), 'it looks like one of MaxText'),
        ('maxtext', 'a.yml', MODALITIES.read_bytes(), 'it looks like one of Modalities'),
        ('maxtext', 'a.yml', b'!!python/object/apply:os.system ["touch touched"]\n', 'a.yml'),
        ('modalities', 'a.yml', b'a: !!python/object:os.system {}\ncomponent_key: 1\n', 'a.yml'),
        ('maxtext', 'a.yml', b'model: {n_layers: 2}\nbatch: {tokens: 3}\n', 'is not a configuration of MaxText'),
        ('torchtitan', 'a.yml', b'', 'expected nanogpt, modalities, maxtext'),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_in_words(tmp_path, capsys, monkeypatch, tool, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_bytes(text)
    assert run(tool, name) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) <= 10
    assert not Path('touched').exists()


@pytest.mark.parametrize('text', ['${oc.env:HOME}', 'a: b # c', 'x\ny: 1', '\x1b[31m', 'é✓'])
def test_texts_of_the_file_stay_texts(tmp_path, text):
    """Neither an interpolation, nor another key, nor a control character comes out of a value or a name."""
    path = tmp_path / 'a.yml'
    path.write_text(yaml.safe_dump({'max_target_length': 128, 'dataset_type': 'hf', 'hf_path': text, text: 1}))
    translation = translate('maxtext', path)
    written = tmp_path / 'b.yaml'
    written.write_text(yaml_text(translation))
    config = load(written)
    assert config.data.options.text == f'hf:{text}'
    assert '\x1b' not in written.read_text()
