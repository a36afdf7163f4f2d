"""configs/coming-from: each is a configuration, and has the size and the batch that its tool publishes."""

import pytest

from pretrax.config import load
from pretrax.config.packaged import packaged_names
from published import ABOUT, PUBLISHED
from small import count_parameters

NAMES = [name.removeprefix('coming-from/') for name in packaged_names() if name.startswith('coming-from/')]
BASES = {'seqax-c4'}  # files that only others extend
SEQAX = 64 * 1024  # tokens per step, configs/c4_a100x8_base.yaml


def test_every_file_is_a_configuration_of_its_own_name():
    assert len(NAMES) >= 15
    for name in set(NAMES) - BASES:
        assert load(f'coming-from/{name}').name == name


@pytest.mark.parametrize(
    ('name', 'parameters', 'tolerance', 'tokens'),
    [
        *((f'seqax-{size}', *ABOUT[f'seqax-{size}'], SEQAX) for size in ('84m', '270m', '540m', '1b', '2b')),
        ('maxtext-llama2-7b', PUBLISHED['llama2-7b'], 0, 8 * 4 * 4096),
        ('maxtext-llama3-8b', PUBLISHED['llama3-8b'], 0, 8 * 2 * 8192),
        ('torchtitan-llama3-8b', PUBLISHED['llama3.1-8b'], 0, 64 * 8192),
        ('torchtitan-llama3-debug', 6_163_712 - 2 * (2048 - 257) * 256, 0, 8 * 256),  # 2,048 tokens there, 257 here
        ('modalities-fsdp', 2651e6, 0.01, 8 * 2 * 4096),  # Modalities' README: 2 sequences on each of 8 GPUs
        ('nanogpt-gpt2-124m', 123.59e6 + 1024 * 768, 1e-4, 491_520),  # nanoGPT prints its size without positions
        # 65 characters there, 257 tokens here
        ('nanogpt-shakespeare-cpu', 0.80e6 + (257 - 65 + 64) * 128, 0.01, 12 * 64),
        ('hugging-face-gpt2', PUBLISHED['gpt2-124m'], 0, 65_536),
    ],
)  # fmt: skip
def test_sizes_and_batches_are_the_published_ones(name, parameters, tolerance, tokens):
    config = load(f'coming-from/{name}')
    options = config.model.options.model_dump(exclude_unset=True)
    assert count_parameters(options, 257, config.batch.sequence_length) == pytest.approx(parameters, rel=tolerance)
    assert config.batch.tokens == tokens
