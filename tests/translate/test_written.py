"""Texts of a file stay texts."""

import pytest
import yaml

from pretrax.config import load
from pretrax.translate import translate, yaml_text


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
