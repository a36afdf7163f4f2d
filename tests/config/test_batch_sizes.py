"""Batches that grow: what a configuration may say, and what it is told otherwise."""

import pytest

from pretrax.config import from_values, resolved_yaml
from pretrax.config.batch_sizes import BatchSize
from pretrax.config.load import parse_overrides
from pretrax.errors import UserError

VALUES = {
    'name': 'growing', 'steps': 20, 'model': {'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}},
    'data': {'name': 'synthetic', 'vocab_size': 50}, 'optimizer': {'learning_rate': 1e-3},
    'batch': {'tokens': [[0, 64], [4, 128]], 'sequence_length': [[0, 8], [2, 16], [9, 32]]},
}  # fmt: skip


def test_sizes_change_at_the_steps_of_both_keys_and_the_last_is_the_largest():
    batch = from_values(VALUES).batch
    assert batch.sizes == {
        0: BatchSize(64, 8, None), 2: BatchSize(64, 16, None), 4: BatchSize(128, 16, None), 9: BatchSize(128, 32, None),
    }  # fmt: skip
    assert [batch.at(number).tokens for number in (0, 3, 4, 1000)] == [64, 64, 128, 128]
    assert batch.largest == BatchSize(128, 32, None)


def test_a_plain_number_is_one_size():
    assert from_values(VALUES, ['batch.tokens=64', 'batch.sequence_length=16']).batch.sizes == {
        0: BatchSize(64, 16, None)
    }


def test_the_command_line_replaces_a_schedule_as_a_whole():
    config = from_values(VALUES, ['batch.tokens=[[0, 32], [7, 96]]'])
    assert config.batch.tokens == ((0, 32), (7, 96))
    assert from_values(parse_overrides([]).values | VALUES) != config
    line = next(line for line in resolved_yaml(config).splitlines() if 'tokens' in line)
    assert line.split('#')[0].strip() == 'tokens: [[0, 32], [7, 96]]'


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['batch.tokens=[[3, 64]]'],
        r'tokens begins at step 3; expected a value from step 0 on\n.*write \[\[0, 64\], ...\]'),
        (['batch.tokens=[[0, 64], [5, 96], [5, 128]]'],
        r'tokens has step 5 after step 5; expected .* by ascending steps'),
        (['batch.tokens=[[0, 96], [5, 64]]'], r'tokens shrinks from 96 to 64 at step 5; .*may only grow'),
        (['batch.tokens=[[0, 64], [5, 80]]'],
        r'tokens is 80 from step 5 on; .*longest batch.sequence_length \(32\)\n.*64 or 96'),
        (['batch.sequence_length=[[0, 12], [5, 32]]'],
        r'sequence_length is 12 from step 0 on, which does not divide .*32'),
        (['batch.micro=5'], r'micro is 5 sequences; expected at most 4, the sequences of a step from step 2 on'),
        (['batch.tokens=[[0, 64], [20, 128]]'], r'tokens changes at step 20, but the run ends after 20 steps'),
        (['batch.tokens=[]'],
        r'tokens is \[\]; expected a number, or \[\[step, value\], ...\] .*such as \[\[0, 1024\], \[100, 2048\]\]$'),
        (['batch.tokens=[1024, 2048]'],
        r'^override: batch.tokens is \[1024, 2048\]; expected a number, or \[\[step, value\], ...\]'),
        (['batch.tokens=[[0, 1024, 5]]'], r'^override: batch.tokens is \[\[0, 1024, 5\]\]; expected a number, or'),
        (['batch.sequence_length=[[0, 16], [5]]'],
        r'^override: batch.sequence_length is \[\[0, 16\], \[5\]\]; expected a number, or'),
        (['batch.tokens=[[0, 64], [5, 2.5]]'], r'tokens\[1\]\[1\] is 2.5; expected an integer'),
        (['batch.tokens.5=2048'],
        r"the key is not a dotted name(.|\n)*a list is given as a whole: batch.tokens=\[\[0, 1024\], \[5, 2048\]\]"),
        (['sample.prompts.0=x'],
        r"the key is not a dotted name(.|\n)*a list is given as a whole: sample.prompts=\[\.\.\.\]"),
        (['batch.tokens={0: 64, 4: 128}'],
        r'batch.tokens.0 is not a string(.|\n)*a list: \[\[0, 1024\], \[100, 2048\]\]'),
    ],
)  # fmt: skip
def test_an_impossible_schedule_is_refused_with_the_fix(overrides, message):
    with pytest.raises(UserError, match=message) as refused:
        from_values(VALUES, overrides)
    assert len(str(refused.value).splitlines()) <= 10
