"""The options of the data component `text`: defaults, inconsistent options, and mixtures."""

import subprocess
import sys

import pydantic
import pytest

from data_options import data_options
from pretrax.data.options import KINDS


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ({'tokens': 'x', 'text': 'stdlib'}, 'data.text=null'),
        ({'tokens': 'x', 'field': 'y', 'validation': 0.1}, 'data.field=null data.validation=null'),
        ({'validation_tokens': 'x'}, 'validation_tokens applies to data.tokens'),
        ({'text': 'x', 'end_of_text': 0}, 'end_of_text applies to data.tokens'),
        ({'text': ''}, 'text names nothing'),
        ({'text': []}, 'text names nothing'),
        ({'text': ['a', '']}, 'text names nothing'),
        ({'vocab_size': 256}, '257'),
        ({'validation': 1}, 'less than 1'),
        ({'txt': 'stdlib'}, 'txt'),
    ],
)
def test_inconsistent_options_are_refused(given, expected):
    with pytest.raises(pydantic.ValidationError) as caught:
        data_options(given)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ({'filters': [{'field': 'a'}]}, "the filter on 'a' has no condition; expected one of equals"),
        ({'filters': [{'field': 'a', 'matches': '('}]}, 'matches is not a regular expression'),
        ({'filters': [{'field': 'a', 'eval': 'x'}]}, 'eval'),
        ({'filters': [{'field': 'a', 'one_of': []}]}, 'one_of'),
        ({'prompt_field': 'q'}, 'given together'),
        ({'prompt_field': 'q', 'answer_field': 'a', 'field': 'text'}, 'replace field'),
        ({'min_characters': 5, 'max_characters': 4}, 'more than max_characters'),
        ({'on_error': 'ignore'}, 'on_error'),
        ({'hugging_face': {'split': 'train'}}, "expected text: 'hf:"),
        ({'tokens': 'x', 'filters': [{'field': 'a', 'equals': 1}], 'deduplicate': True}, 'data.filters=null data.ded'),
    ],
)
def test_inconsistent_selections_are_refused(given, expected):
    with pytest.raises(pydantic.ValidationError) as caught:
        data_options(given)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    'given', [{}, {'tokens': 'x'}, {'tokens': 'x', 'text': None}, {'tokenizer': 'x'}, {'text': None}]
)
def test_options_can_be_dumped_and_loaded(given):
    options = data_options(given)
    assert data_options(options.model_dump()) == options


@pytest.mark.parametrize(
    'given',
    [
        {'text': 'a.txt'},
        {'tokens': 'x'},
        {'tokenizer': 'bytes', 'streaming': True},
        {'mixture': [{'name': 'a', 'weight': 1, 'tokens': 'x'}]},
    ],
)
def test_the_keys_of_other_kinds_may_be_null_as_in_configurations_of_pretrax_01(given):
    nulls = dict.fromkeys(name for kind in KINDS for name in kind.model_fields)
    assert data_options(nulls | given) == data_options(given)


def test_importing_the_options_imports_no_heavy_library():
    heavy = ['jax', 'zarr', 'tensorstore', 'tokenizers', 'numpy']
    program = f'import sys, pretrax.data.options; print([name for name in {heavy} if name in sys.modules])'
    result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == '[]'


A = {'name': 'a', 'weight': 1, 'tokens': 'x'}


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ({'mixture': [A], 'text': 'stdlib'}, 'data.text=null'),
        ({'mixture': [A], 'tokens': 'x'}, 'data.tokens=null'),
        ({'mixture': []}, 'at least 1'),
        ({'mixture': [A, A]}, 'names must differ; given: a, a'),
        ({'mixture': [A | {'tokens': None, 'text': 'x'}]}, 'needs one tokenizer'),
        ({'mixture': [{'name': 'a', 'weight': 1}]}, "source 'a' has neither"),
        ({'mixture': [A | {'name': 'a/b'}]}, 'pattern'),
        ({'mixture': [A | {'weight': 0}]}, 'greater than 0'),
        ({'mixture': [A | {'weight': [[5, 1], [5, 2]]}]}, 'with increasing steps >= 0'),
        ({'mixture': [A | {'weight': [[5, -1]]}]}, 'finite and >= 0'),
        ({'mixture': [A | {'field': 'x'}]}, 'data.field=null'),
        ({'mixture': [{'name': 'b', 'weight': 1, 'mixture': [A]}]}, 'cannot be a mixture'),
        ({'mixture': [A | {'wait': 1}]}, 'wait'),
        ({'exhausted': 'stop'}, 'applies to data.mixture'),
        ({'packing': 'pack'}, 'best_fit'),
    ],
)
def test_inconsistent_mixtures_are_refused(given, expected):
    with pytest.raises(pydantic.ValidationError) as caught:
        data_options(given)
    assert expected in str(caught.value)


def test_keys_next_to_a_mixture_are_defaults_for_its_sources():
    given = {
        'tokenizer': 't', 'validation': 0.1, 'packing': 'whole', 'exhausted': 'drop',
        'mixture': [A | {'packing': 'best_fit'}, {'name': 'b', 'weight': 2, 'text': 'y', 'validation': 0.2},
        A | {'name': 'c'}],
    }  # fmt: skip
    options = data_options(given)
    assert [item.packing for item in options.mixture] == ['best_fit', 'whole', 'whole']
    assert [item.tokenizer for item in options.mixture] == [None, 't', None]
    assert [getattr(item, 'validation', None) for item in options.mixture] == [None, 0.2, None]
    assert data_options(options.model_dump()) == options
    scheduled = given | {'mixture': [A | {'weight': [[0, 1], [10, 0.5]]}]}
    assert data_options(scheduled, strict=True).mixture[0].schedule == (
        (0, 1),
        (10, 0.5),
    )
    filtered = given | {'filters': [{'field': 'a', 'one_of': [1, 2]}]}  # nested lists, as in YAML
    strict = data_options(filtered, strict=True)
    assert strict.mixture[1].filters[0].one_of == [1, 2]
    alone = {'filters': filtered['filters'], 'text': ['a', 'b']}
    assert data_options(alone, strict=True).filters[0].one_of == [1, 2]


@pytest.mark.parametrize('size', [65, 2])
def test_given_tokens_may_have_any_vocabulary(size):
    assert data_options({'tokens': 'train.bin', 'vocab_size': size}).vocab_size == size
    assert data_options({'tokenizer': 't.json', 'vocab_size': size}).vocab_size == size
    with pytest.raises(ValueError, match=f'vocab_size {size} is too small to train a tokenizer; expected at least 257'):
        data_options({'text': 'a.txt', 'vocab_size': size})
