"""Rows with messages: the tokens and the loss mask that `transformers` gives,
errors with lines, packing, and the loss.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import reference
from chat_templates import ANSWERED, TAGGED, TEMPLATES, VARIABLES, backend
from data_options import data_options
from pretrax.data.batches.packing import PackedDocuments
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.text import find_corpus, tokenize_text
from pretrax.data.tokens import token_tools
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.token_files import open_token_files
from pretrax.errors import UserError
from pretrax.model.loss import Batch, means
from pretrax.train.step import make_gradients
from small import LLAMA, assert_same, mesh_of, random_weights, transformer

GOLDENS = json.loads((Path(__file__).parents[1] / 'chat' / 'answer_goldens.json').read_text())


def quiet(_):
    pass


def write_tokenizer(directory, name='chatml', template=None):
    directory.mkdir(exist_ok=True)
    (directory / 'tokenizer.json').write_text(backend(name).to_str())
    settings = VARIABLES[name] | {'chat_template': template or TEMPLATES[name]}
    (directory / 'tokenizer_config.json').write_text(json.dumps(settings))
    return str(directory)


def options(tmp_path, rows, name='chatml', template=None, **more):
    path = tmp_path / 'chat.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    given = {'text': str(path), 'messages_field': 'messages', 'validation': 0.0, 'workers': 1}
    return data_options(given | {'tokenizer': write_tokenizer(tmp_path / name, name, template)} | more)


def tokenized(tmp_path, *args, **more):
    place = tokenize_text(options(tmp_path, *args, **more), tmp_path / 'tokens', quiet)
    return open_split(place, 'train'), verify(place)['train']


def documents(split):
    bounds = split.read_starts(0, split.n_documents + 1).astype(int).tolist()
    ranges = list(zip(bounds, bounds[1:], strict=False))
    return [
        ((encoded >> 1).tolist(), mask.astype(int).tolist())
        for encoded, mask in zip(split.read(ranges), split.read_mask(ranges), strict=True)
    ]


@pytest.mark.parametrize('name', TAGGED)
def test_tokens_and_mask_are_those_of_transformers(tmp_path, name):
    split, counts = tokenized(tmp_path, [{'messages': ANSWERED[title]} for title in ANSWERED], name)
    found = documents(split)
    for title, (ids, mask) in zip(ANSWERED, found, strict=True):
        expected_ids, expected_mask = GOLDENS[f'{name}, {title}']
        assert ids[: len(expected_ids)] == expected_ids
        assert mask[: len(expected_mask)] == expected_mask
        # Nothing but the token that ends a document may follow, and it does not count.
        assert ids[len(expected_ids) :] in ([], [split.end_of_text])
        assert not any(mask[len(expected_ids) :])
        assert ids[-1] == split.end_of_text
    assert counts.targets == sum(sum(mask) for _, mask in found)
    # The bytes of the answers; llama3's template trims them.
    answers = [message['content'] for rows in ANSWERED.values() for message in rows if message['role'] == 'assistant']
    assert counts.predicted_bytes == sum(len(answer.encode()) for answer in answers)


@pytest.mark.parametrize('name', TAGGED)
def test_copies_count_the_bytes_of_text_as_the_tokenization_does(tmp_path, name):
    tokenized(tmp_path, [{'messages': ANSWERED[title]} for title in ANSWERED], name)
    [source] = (tmp_path / 'tokens').glob('tokens-*[0-9a-f]')
    token_tools.convert(open_token_files(source, quiet), tmp_path / 'converted', quiet)
    token_tools.split(source, tmp_path / 'split', quiet, fraction=None, count=1)
    [whole] = verify(source).values()
    for copy in ('converted', 'split'):
        counts = verify(tmp_path / copy).values()
        for what in ('bytes', 'predicted_bytes'):
            assert sum(getattr(part, what) for part in counts) == getattr(whole, what), (copy, what)


def test_names_of_special_tokens_in_messages_are_text_and_weight_0_is_context(tmp_path):
    messages = [
        {'role': 'user', 'content': 'a <|im_end|> b <|im_start|>assistant\nno'},
        {'role': 'assistant', 'content': 'quick', 'weight': 0},
        {'role': 'user', 'content': 'fox'},
        {'role': 'assistant', 'content': 'the <|im_end|> fox'},
    ]
    split, _ = tokenized(tmp_path, [{'messages': messages}])
    [(ids, mask)] = documents(split)
    names = backend('chatml')
    start, end = names.token_to_id('<|im_start|>'), names.token_to_id('<|im_end|>')
    assert (ids.count(start), ids.count(end)) == (4, 4 + (split.end_of_text == end))
    counted = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert names.decode(counted[:-1], skip_special_tokens=False) == 'the <|im_end|> fox'
    assert counted[-1] == end


@pytest.mark.parametrize(
    ('row', 'message'),
    [
        ({'text': 'x'}, "no field 'messages'"),
        ({'messages': 'x'}, 'is str'),
        ({'messages': ['x']}, 'has str as message 1'),
        ({'messages': [{'role': 'user'}]}, 'has no content in message 1'),
        ({'messages': [{'role': 'assistant', 'content': None}]}, 'has NoneType as content in message 1'),
        ({'messages': [{'role': 'user', 'content': 'x'}]}, "has no message with the role 'assistant'"),
        ({'messages': [{'role': 'robot', 'content': 'x'}, ANSWERED['one answer'][1]]}, "role is 'robot'"),
        ({'messages': [{'role': 'assistant', 'content': 'x', 'tool_calls': [1]}]}, 'tool calls are not supported'),
        ({'messages': [{'role': 'assistant', 'content': 'x', 'weight': 0.5}]}, 'has weight 0.5'),
    ],
)
def test_a_bad_row_is_named_or_skipped_with_a_count(tmp_path, row, message):
    good = {'messages': ANSWERED['one answer']}
    with pytest.raises(UserError, match=rf'chat\.jsonl:2: (.|\n)*{message}'):
        list(find_corpus(options(tmp_path, [good, row]), quiet).documents())
    counts = RowCounts()
    kept = list(find_corpus(options(tmp_path, [good, row, good], on_error='skip'), quiet).documents(counts))
    assert (len(kept), counts.read, counts.left_out['bad']) == (2, 3, 1)


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or m.role == 'system' and loop.first %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize('role', ['system', 'developer', 'tool'])
def test_a_row_with_a_message_that_the_template_leaves_out_is_bad(tmp_path, role):
    question, answer = ANSWERED['one answer']
    late = {'role': role, 'content': 'Be brief.'}
    good, bad = ({'messages': messages} for messages in ([question, answer], [question, late, answer]))
    why = 'does not write the content of message 2, whose role is '
    with pytest.raises(UserError, match=rf'chat\.jsonl:2: .*{why}'):
        list(find_corpus(options(tmp_path, [good, bad], template=SYSTEM_FIRST), quiet).documents())
    counts = RowCounts()
    skipping = options(tmp_path, [good, bad, good], template=SYSTEM_FIRST, on_error='skip')
    assert len(list(find_corpus(skipping, quiet).documents(counts))) == 2
    assert counts.left_out['bad'] == 1


def test_a_developer_is_trained_on_as_system_where_the_template_does_not_know_it(tmp_path):
    """As the server reads it. What else a message has, such as an id, may be left out."""
    question, answer = ANSWERED['one answer']
    rows = [
        {'messages': [{'role': role, 'content': 'Be brief.', 'id': 'x'}, question, answer]}
        for role in ('system', 'developer')
    ]
    split, _ = tokenized(tmp_path, rows, template=SYSTEM_FIRST)
    first, second = documents(split)
    assert first == second
    assert backend('chatml').decode(first[0]).startswith('system\nBe brief.')


def test_a_template_whose_prompt_is_not_in_the_conversation_is_refused(tmp_path):
    thinks = TEMPLATES['chatml'].replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
    assert thinks != TEMPLATES['chatml']
    with pytest.raises(UserError, match=r'chat\.jsonl:1: .*prompt for message 2 is not a part of the conversation'):
        list(find_corpus(options(tmp_path, [{'messages': ANSWERED['one answer']}], template=thinks), quiet).documents())


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        ({'packing': 'concatenate'}, 'cuts conversations'),
        ({'field': 'text'}, 'replaces field'),
        ({'tokenizer': None}, 'needs a tokenizer'),
        ({'messages_field': None, 'chat_template': 'x.jinja'}, 'applies to messages_field'),
        ({'streaming': True, 'validation': None, 'workers': None}, 'while streaming'),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        options(tmp_path, [], **more)


def test_a_tokenizer_without_a_template_is_refused_and_a_file_gives_one(tmp_path):
    rows = [{'messages': ANSWERED['one answer']}]
    given = options(tmp_path, rows)
    (tmp_path / 'chatml' / 'tokenizer_config.json').write_text(json.dumps(VARIABLES['chatml']))
    with pytest.raises(UserError, match=r'has no chat template\n.*data\.chat_template=FILE'):
        find_corpus(given, quiet)
    (tmp_path / 'mine.jinja').write_text(TEMPLATES['chatml'])
    corpus = find_corpus(given.model_copy(update={'chat_template': str(tmp_path / 'mine.jinja')}), quiet)
    [document] = corpus.documents()
    assert document.text.startswith('<|im_start|>user\nHi! 🎉<|im_end|>')
    # Another template makes other tokens.
    (tmp_path / 'mine.jinja').write_text(TEMPLATES['chatml'] + ' ')
    other = find_corpus(given.model_copy(update={'chat_template': str(tmp_path / 'mine.jinja')}), quiet)
    assert other.fingerprint() != corpus.fingerprint()


def packed(tmp_path, length):
    """Rows of conversations of several lengths, of which one is longer than a row of 64."""
    sizes = [1, 3, 2, 40, 1, 2, 5, 1]
    rows = [
        {
            'messages': [
                {'role': 'user', 'content': 'the fox ' * size},
                {'role': 'assistant', 'content': 'quick ' * size + 'brown'},
            ]
        }
        for size in sizes
    ]
    split, _ = tokenized(tmp_path, rows)
    rows = PackedDocuments(split, length, 'best_fit', tmp_path, quiet)
    return split, rows, rows.read(np.arange(rows.n), whole_blocks=True)


def test_a_row_never_mixes_conversations_and_a_longer_one_is_cut_and_counted(tmp_path):
    split, rows, batch = packed(tmp_path, 64)
    conversations = documents(split)
    assert sum(len(ids) - 1 > 64 for ids, _ in conversations) == 1
    assert '1 longer ones cut' in str(rows)
    found = []
    for tokens, targets, segments, positions, mask in zip(*batch, strict=True):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert positions[here].tolist() == list(range(here.sum()))
            if mask[here].any() or tokens[here].any():
                found.append((tokens[here].tolist(), targets[here].tolist(), mask[here].astype(int).tolist()))
    expected = [
        (ids[at : at + 64][: len(ids) - 1 - at], ids[at + 1 : at + 65], mask[at + 1 : at + 65])
        for ids, mask in conversations
        for at in range(0, len(ids) - 1, 64)
    ]
    assert sorted(found) == sorted(expected)


def test_the_loss_of_answers_is_that_of_plain_jax_numpy_under_accumulation(tmp_path):
    split, rows, batch = packed(tmp_path, 64)
    n = rows.n // 2 * 2
    batch = Batch(*(array[:n] for array in batch))
    assert 0 < batch.mask.sum() < batch.mask.size / 2
    assert len(set(batch.mask.reshape(2, -1).sum(1))) == 2  # the halves have different numbers of answers
    model = transformer(LLAMA, vocab_size=split.vocab_size, length=64)
    weights = random_weights(model)
    expected, gradient = jax.jit(jax.value_and_grad(reference.nll), static_argnums=2)(weights, batch, model.arch)
    with jax.set_mesh(mesh_of()):
        found, terms, _ = jax.jit(make_gradients(model, 2))(weights, batch)
    np.testing.assert_allclose(means(terms)['nll'], expected, rtol=1e-5)
    assert_same(found, gradient, rtol=1e-4, floor=1e-6)
