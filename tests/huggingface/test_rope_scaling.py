"""The scaling of RoPE in config.json: what files say, and what they may not say. The goldens have the numbers."""

import json
from pathlib import Path

import pytest

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options
from pretrax.huggingface.rope_scaling import write_scaling
from pretrax.model.architecture import resolve

GOLDENS = Path(__file__).parents[1] / 'goldens'
YARN = {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32768}
SHORT = {'short_factor': [1.0, 1.3, 1.7], 'long_factor': [1.5, 4.0, 9.0]}


def scaling(case, scaling, **more):
    config = json.loads((GOLDENS / case / 'config.json').read_text())
    options, _ = read_options(config | {'rope_parameters': None, 'rope_scaling': scaling} | more)
    return resolve(decoder_options(**options), options['vocab_size'], 64).rope.scaling


def test_released_yarn_and_longrope_have_the_published_attention_factors():
    """0.1 ln(s) + 1 (arXiv:2309.00071, eq. 22), and sqrt(1 + ln(s) / ln(L)) of Phi-3's code,
    where s = 32 and L = 4096.
    """
    assert scaling('qwen2', YARN).amplitude == pytest.approx(1.1386294, abs=1e-6)
    long = scaling(
        'phi3', SHORT | {'type': 'longrope'}, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    assert (long.factor, long.amplitude) == (32.0, pytest.approx(1.1902381, abs=1e-6))
    assert scaling('qwen2', YARN | {'attention_factor': 0.9}).amplitude == 0.9
    assert scaling('qwen2', YARN | {'mscale': 1.0, 'mscale_all_dim': 1.0}).amplitude == 1.0


@pytest.mark.parametrize('old', ['su', 'yarn'])
def test_old_names_of_phi3_are_longrope(old):
    assert scaling('phi3', SHORT | {'type': old}).kind == 'longrope'


def test_a_missing_original_length_is_that_of_the_class():
    assert scaling('phi3', SHORT | {'type': 'longrope'}, original_max_position_embeddings=9).original_length == 9
    assert scaling('qwen2', {'type': 'yarn', 'factor': 2.0}, max_position_embeddings=77).original_length == 77
    derived = {'type': 'yarn', 'factor': None, 'original_max_position_embeddings': 16}
    assert scaling('qwen2', derived, max_position_embeddings=64).factor == 4.0


@pytest.mark.parametrize('case', ['llama3', 'llama-linear', 'llama-yarn', 'qwen2-yarn'])
def test_an_export_writes_what_was_read(case):
    said = json.loads((GOLDENS / case / 'config.json').read_text())['rope_parameters']
    written = write_scaling(scaling(case, said))
    assert {name: written[name] for name in said if name != 'rope_theta'} == {
        name: value for name, value in said.items() if name != 'rope_theta'
    }


@pytest.mark.parametrize(
    ('case', 'said', 'message'),
    [
        ('qwen2', {'type': 'dynamic', 'factor': 2.0}, 'frequencies change while a text grows'),
        ('qwen2', YARN | {'factor': 'four'}, r"rope_scaling.factor is 'four'"),
        ('qwen2', YARN | {'beta_fast': 0.5}, 'beta_slow is 1.0; expected at most beta_fast, 0.5'),
        ('qwen2', YARN | {'truncate': 1}, 'truncate is 1; expected true or false'),
        ('qwen2', YARN | {'finetuned': True}, 'rope_scaling has finetuned, which pretrax does not know'),
        ('phi3', {'type': 'longrope'}, 'rope_scaling.short_factor is null'),
        ('phi3', SHORT | {'type': 'longrope', 'long_factor': [1.0, 'x', 2.0]}, "long_factor is 'x'"),
        ('phi3', {'type': 'linear', 'factor': 2.0}, "'linear' is not supported"),
        ('phi3', {'type': 'longrope', 'short_factor': [1.0, 2.0], 'long_factor': [1.0, 2.0]}, 'rope rotates 3 pairs'),
        ('phi3', SHORT | {'type': 'longrope', 'long_factor': [1.0]}, 'longrope needs short_factor and long_factor'),
    ],
)  # fmt: skip
def test_a_scaling_that_cannot_be_is_refused(case, said, message):
    with pytest.raises((UserError, ValueError), match=message):
        scaling(case, said)
