"""`pretrax import-config`: no key is dropped silently, wrong files are refused, and the result is a configuration."""

from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.config import load

MODALITIES = Path(__file__).parents[2] / 'examples' / 'coming-from' / 'modalities.yml'
NANOGPT = "n_layer = 2\nn_head = 2\nn_embd = 64\nbatch_size = 4\nblock_size = 64\nout_dir = 'out'\n"
MAXTEXT = 'base_emb_dim: 64\nmax_target_length: 128\nhf_access_token: hf_secret\ndataset_type: synthetic\n'


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(['import-config', *map(str, arguments)])
    return int(stopped.value.code or 0)


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
