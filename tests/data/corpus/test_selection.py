"""Every row becomes a document or is counted with the reason for skipping it, and errors name the line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import Filter, RowCounts, Selection
from pretrax.errors import UserError


def write(path, rows):
    path.write_text(''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows))
    return path


def corpus(path, **selection):
    filters = tuple(Filter.model_validate(one) for one in selection.pop('filters', ()))
    return Corpus(find_files(str(path)), Selection(filters=filters, **selection))


def kept(path, **selection):
    return [document.text for document in corpus(path, **selection).documents()]


ROWS = [
    {'text': 'a', 'lang': 'en', 'score': 0.9, 'meta': {'ok': True}},
    {'text': 'b', 'lang': 'de', 'score': 1, 'meta': {'ok': False}},
    {'text': 'c', 'lang': 'en-GB', 'score': 0.1, 'meta': {'ok': True}},
]


@pytest.mark.parametrize(
    ('condition', 'expected'),
    [
        ({'field': 'lang', 'equals': 'en'}, 'a'),
        ({'field': 'lang', 'differs': 'en'}, 'bc'),
        ({'field': 'lang', 'one_of': ['en', 'de']}, 'ab'),
        ({'field': 'lang', 'matches': '^en'}, 'ac'),
        ({'field': 'lang', 'lacks': 'GB$'}, 'ab'),
        ({'field': 'score', 'at_least': 0.9}, 'ab'),
        ({'field': 'score', 'at_most': 0.9}, 'ac'),
        ({'field': 'score', 'at_least': 0.2, 'at_most': 0.95}, 'a'),
        ({'field': 'score', 'equals': 1}, 'b'),
        ({'field': 'meta.ok', 'equals': True}, 'ac'),
        ({'field': 'meta.ok', 'equals': 1}, ''),
        ({'field': 'absent', 'equals': 1, 'missing': 'keep'}, 'abc'),
        ({'field': 'meta.absent', 'equals': 1, 'missing': 'drop'}, ''),
    ],
)
def test_a_filter_keeps_the_rows_that_meet_it(tmp_path, condition, expected):
    path = write(tmp_path / 'a.jsonl', ROWS)
    counts = RowCounts()
    found = [document.text for document in corpus(path, filters=[condition]).documents(counts)]
    assert ''.join(found) == expected
    assert sum(counts.left_out.values()) == 3 - len(expected)
    if len(expected) < 3:
        (reason,) = counts.left_out
        assert reason.startswith(f'not {condition["field"]} ')


def test_csv_values_are_compared_as_numbers_and_booleans(tmp_path):
    (tmp_path / 'a.csv').write_text('text,n,ok\na,1.5,true\nb,2,False\n')
    assert kept(tmp_path / 'a.csv', filters=[{'field': 'n', 'at_least': 2}]) == ['b']
    assert kept(tmp_path / 'a.csv', filters=[{'field': 'n', 'equals': 2}]) == ['b']
    assert kept(tmp_path / 'a.csv', filters=[{'field': 'ok', 'equals': True}]) == ['a']


@pytest.mark.parametrize(
    ('condition', 'expected'),
    [
        (
            {'field': 'lnag', 'equals': 'en'},
            ":1: no field 'lnag', but a filter needs it\n  fields found: 'text', 'lang'",
        ),
        ({'field': 'lang', 'at_least': 3}, ':1: field \'lang\' is "en"\n  the filter needs a number'),
        ({'field': 'score', 'matches': 'x'}, ":1: field 'score' is 0.9\n  the filter needs a string"),
        ({'field': 'meta', 'at_most': 1}, ":1: field 'meta' is {"),
    ],
)
def test_a_filter_on_a_missing_field_or_another_type_is_refused(tmp_path, condition, expected):
    path = write(tmp_path / 'a.jsonl', ROWS)
    with pytest.raises(UserError) as caught:
        kept(path, filters=[condition])
    assert str(path) + expected in str(caught.value)


def test_length_limits_skip_whole_documents(tmp_path):
    path = write(tmp_path / 'a.jsonl', [{'text': 'x' * n} for n in range(6)])
    counts = RowCounts()
    limited = corpus(path, min_characters=2, max_characters=4)
    assert [document.text for document in limited.documents(counts)] == ['xx', 'xxx', 'xxxx']
    assert counts.lines() == [
        'documents: 6 read = 3 kept + 1 empty + 1 over 4 characters + 1 under 2 characters'
    ]  # fmt: skip


def test_only_answers_count_in_the_loss(tmp_path):
    rows = [{'q': 'Wie? ', 'a': 'Sö.'}, {'q': '', 'a': 'Just so.'}, {'q': 'Only asked', 'a': ''}, {'q': '', 'a': ''}]
    path = write(tmp_path / 'a.jsonl', rows)
    found = list(corpus(path, prompt_field='q', answer_field='a').documents())
    assert [(document.text, document.answers) for document in found] == [
        ('Wie? Sö.', ((5, 8),)), ('Just so.', ((0, 8),)), ('Only asked', ()),
    ]  # fmt: skip
    (start, stop), *_ = found[0].answers
    assert found[0].text[start:stop] == 'Sö.'
    with pytest.raises(UserError, match=r"no field 'p'\n.*\n  to read 'q': data\.prompt_field=q"):
        list(corpus(path, prompt_field='p', answer_field='a').documents())


@given(
    texts=st.lists(st.sampled_from(['a', 'b', 'c', 'ä', '', 'a ']), max_size=40),
    n=st.integers(1, 8),
    start=st.integers(0, 40),
)
def test_the_first_of_equal_documents_is_kept_in_any_shards(tmp_path_factory, texts, n, start):
    path = write(tmp_path_factory.mktemp('equal') / 'a.jsonl', [{'text': text} for text in [*texts, 'end']])
    expected = list(dict.fromkeys(text for text in [*texts, 'end'] if text))
    counts = RowCounts()
    unique = corpus(path, deduplicate=True)
    assert [d.text for shard in shards(unique, n) for d in shard.documents(counts)] == expected
    assert counts.left_out['duplicates'] == len([*texts, 'end']) - texts.count('') - len(expected)
    seen = set(texts[:start])
    assert [d.text for d in unique.documents(start=start)] == [text for text in expected if text not in seen][
        : None if start <= len(texts) else 0
    ]


def test_duplicates_have_equal_text_and_answers_in_any_file(tmp_path):
    write(tmp_path / 'a.jsonl', [{'q': 'a', 'a': 'b'}, {'q': 'ab', 'a': ''}])
    write(tmp_path / 'b.jsonl', [{'q': '', 'a': 'ab'}, {'q': 'a', 'a': 'b'}])
    mapped = []

    def pool_map(function, arguments):
        mapped.extend(arguments)
        return map(function, mapped)

    found = shards(corpus(tmp_path, deduplicate=True, prompt_field='q', answer_field='a'), 2, map=pool_map)
    assert [document.answers for shard in found for document in shard.documents()] == [((1, 2),), (), ((0, 2),)]
    assert len(mapped) == 2


BAD = [
    'nonsense',
    '[1]',
    '{"text": 1}',
    '{"content": "x"}',
    '{"text": "\\ud800"}',
    '1' * 5000,
    '[' * 100_000,
    '\0',
    '{}',
]


@pytest.mark.parametrize('n', [1, 3])
def test_bad_rows_are_skipped_counted_and_reported_with_their_lines(tmp_path, n):
    rows = [row for number, bad in enumerate(BAD) for row in ({'text': f'good {number}'}, bad)]
    path = write(tmp_path / 'a.jsonl', [*rows, {'text': 'last'}])
    counts = [RowCounts() for _ in range(n)]
    found = [
        document.text
        for shard, of in zip(shards(corpus(path, on_error='skip'), n), counts, strict=True)
        for document in shard.documents(of)
    ]
    assert found == [*(f'good {number}' for number in range(len(BAD))), 'last']
    total = sum(counts, RowCounts())
    assert (total.read, total.kept, total.left_out) == (2 * len(BAD) + 1, len(BAD) + 1, {'bad': len(BAD)})
    # A shard in the middle has to count the lines before it.
    assert [error.partition(': ')[0] for error in total.errors] == [f'{path}:{2 * n + 2}' for n in range(len(BAD))]
    assert all(error.startswith(f'skipped bad row: {path}:') for error in total.lines()[1:])
    with pytest.raises(UserError, match=rf'^{path}:2: not JSON'):
        list(corpus(path).documents())
    with pytest.raises(UserError, match=rf'^{path}:1[68]: '):
        list(shards(corpus(path), n)[-1].documents(start=0 if n > 1 else 2 * len(BAD) - 1))


def test_only_the_first_bad_rows_are_reported(tmp_path):
    path = write(tmp_path / 'a.jsonl', ['bad'] * 25)
    counts = RowCounts()
    assert list(corpus(path, on_error='skip').documents(counts)) == []
    assert counts.lines()[0] == 'documents: 25 read = 0 kept + 25 bad'
    assert counts.lines()[-1] == 'and 15 more bad rows'
    assert len(counts.lines()) == 12


def test_the_fingerprint_depends_on_the_selection_but_not_on_error_handling(tmp_path):
    path = write(tmp_path / 'a.jsonl', ROWS)
    changes = [
        {}, {'field': 'lang'}, {'prompt_field': 'text', 'answer_field': 'lang'}, {'deduplicate': True},
        {'min_characters': 1}, {'max_characters': 9}, {'filters': [{'field': 'lang', 'equals': 'en'}]},
        {'filters': [{'field': 'lang', 'equals': 'de'}]}, {'filters': [{'field': 'lang', 'differs': 'de'}]},
        {'filters': [{'field': 'lang', 'equals': 'en', 'missing': 'drop'}]},
    ]  # fmt: skip
    fingerprints = [corpus(path, **change).fingerprint() for change in changes]
    assert len(set(fingerprints)) == len(changes)
    assert corpus(path, on_error='skip').fingerprint() == fingerprints[0]


def test_options_reach_the_corpus(open_source, tmp_path, said):
    rows = [{'q': f'question {n}? ', 'a': f'answer {n}.', 'lang': 'en' if n % 2 else 'de'} for n in range(20)]
    path = write(tmp_path / 'a.jsonl', [*rows, 'bad', rows[1]])
    open_source(
        text=str(path), vocab_size=300, validation=0, prompt_field='q', answer_field='a', deduplicate=True,
        filters=[{'field': 'lang', 'equals': 'en'}], min_characters=3, max_characters=1000, on_error='skip',
    )  # fmt: skip
    assert 'documents: 22 read = 10 kept + 1 bad + 1 duplicates + 10 not lang equals "en"' in said.text
    assert f'skipped bad row: {path}:21: not JSON' in said.text
    assert 'all text is read twice' in said.text


def test_fields_of_files_without_fields_are_refused(open_source, tmp_path):
    (tmp_path / 'a.txt').write_text('text')
    for options, expected in (
        ({'field': 'content'}, r'data\.field needs rows'),
        ({'filters': [{'field': 'a', 'equals': 1}]}, r'data\.filters needs rows'),
        ({'prompt_field': 'q', 'answer_field': 'a'}, r'data\.prompt_field needs rows'),
    ):
        with pytest.raises(UserError, match=expected):
            open_source(text=str(tmp_path / 'a.txt'), **options)
