"""Tasks: their documents are right, their answers become the right numbers, and a failing one stops nothing."""

import ast
import json
import math
import re
import types

import pytest

from pretrax.errors import UserError
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.results import TASKS, Results, as_json, run_tasks, table_rows
from pretrax.evaluate.task import Document, Generate, Likelihood, Rolling, Score, Settings, Task, choose
from pretrax.evaluate.text_tasks import parses

FEW = Settings(limit=4)


class Known(LanguageModel):
    """Gives what each token of `right` texts has a probability of 1/2, and all others 1/8. Bytes are tokens."""

    def __init__(self, right=(), max_length=math.inf, window=7):
        self.tokenizer = types.SimpleNamespace(encode=lambda text: list(text.encode()), end_of_text=256)
        self.max_length, self.window, self.prefix, self.end = max_length, window, [256], (256,)
        self.right, self.asked = right, []

    def score(self, pairs):
        self.asked += pairs
        found = []
        for _, continuation in pairs:
            good = bytes(continuation).decode(errors='replace') in self.right
            found.append((len(continuation) * math.log(1 / 2 if good else 1 / 8), good))
        return found

    def _generate(self, requests):
        return ['return 1\nx ='] * len(requests)


def documents(name, settings=FEW):
    return TASKS[name].documents(settings)


def test_documents_depend_on_the_seed_alone():
    for name in TASKS:
        assert repr([d.requests for d in documents(name)]) == repr([d.requests for d in documents(name)])
        assert repr([d.requests for d in documents(name)]) != repr(
            [d.requests for d in documents(name, Settings(limit=4, seed=1))]
        )


def test_questions_of_arithmetic_have_right_answers():
    for document in documents('arithmetic', Settings(limit=50)):
        [request] = document.requests
        for line in (request.context + request.continuation).splitlines():
            question, answer = line.split(' = ')
            assert ast.literal_eval(question.split()[0]) is not None
            a, sign, b = question.split()
            assert int(answer) == (int(a) + int(b) if sign == '+' else int(a) - int(b))


def test_what_is_copied_or_retrieved_is_in_the_context():
    for document in documents('copying'):
        [request] = document.requests
        first, second = (request.context + request.continuation).split('\n')
        assert first.startswith(second)
        assert len(first.split()) == document.length
    for document in documents('retrieval'):
        [request] = document.requests
        *lines, asked = request.context.split('\n')
        assert len(lines) == document.length
        assert dict(line.split(':') for line in lines)[asked.removesuffix(':')] == request.continuation


def test_cloze_asks_for_a_word_of_the_context_and_choices_differ():
    for document in documents('cloze'):
        [request] = document.requests
        assert re.search(rf'\b{request.continuation.strip()}\b', request.context)
    for document in documents('multiple_choice'):
        assert len({request.continuation for request in document.requests}) == 4
        assert len({request.context for request in document.requests}) == 1


def test_bits_per_byte_are_bits_over_bytes():
    """Bytes are tokens, each of probability 1/8: 3 bits."""
    results = run_tasks(Known(), choose(['documentation', 'python'], TASKS), FEW, pytest.fail)
    for name in ('documentation', 'python'):
        assert results.metrics[name]['bits_per_byte'].value == pytest.approx(3)
        assert results.metrics[name]['bits_per_byte'].stderr == pytest.approx(0, abs=1e-9)


def test_accuracies_count_the_right_answers():
    right = {document.requests[0].continuation for document in documents('multiple_choice')[:3]}
    right |= {document.requests[0].continuation for document in documents('arithmetic')[:1]}
    results = run_tasks(Known(right), choose(['multiple_choice', 'arithmetic'], TASKS), FEW, pytest.fail)
    assert results.metrics['multiple_choice']['accuracy_per_byte'].value >= 0.75
    assert results.metrics['arithmetic']['accuracy/1_digits'].value >= 0.25
    assert results.metrics['arithmetic']['accuracy/3_digits'].value == 0


@pytest.mark.parametrize(
    ('answer', 'is_python'),
    [
        ('return 1\nx = (', True),
        ('return 1', True),
        ('return (\n    1\n', False),
        ('re turn', False),
        ('pass\n\0\n', False),
    ],
)
def test_whole_lines_are_parsed(answer, is_python):
    assert parses('def f():\n    ', answer) is is_python


def test_every_token_of_a_text_is_scored_once():
    """In windows of 7 tokens, as lm-evaluation-harness makes them: the last one has as much before it as fits."""
    model = Known()
    for size in (1, 6, 7, 8, 20, 21):
        ids = list(range(1, size + 1))
        parts = model.windows(ids)
        assert [token for _, continuation in parts for token in continuation] == ids
        whole = [256, *ids]
        for context, continuation in parts:
            assert len(context) + len(continuation) - 1 <= 7
            start = whole.index(continuation[0])
            assert whole[start - len(context) : start] == context
        if size > 7:
            assert len(parts[-1][0]) + len(parts[-1][1]) - 1 == 7
    [score] = model.answer([Rolling('twenty letters long!')])
    assert score == Score(pytest.approx(20 * math.log(1 / 8)), False, tokens=20)


def test_spaces_between_context_and_continuation_belong_to_the_continuation():
    model = Known()
    model.answer([Likelihood('a b ', 'c'), Likelihood('', 'c')])
    assert model.asked == [(list(b'a b'), list(b' c')), ([256], list(b'c'))]


def test_texts_that_are_too_long():
    model, said = Known(max_length=100), []
    results = run_tasks(model, choose(['copying', 'cloze'], TASKS), FEW, said.append)
    assert list(results.metrics['copying']) == ['accuracy/8']
    assert said[:2] == [f'copying: length {n} exceeds the 100 positions of the model; left out' for n in (32, 128)]
    assert 'exceeds the 100 positions of the model' in results.failed['cloze']
    with pytest.raises(UserError, match='exceeds the 100 positions'):
        model.answer([Generate('x' * 90, 11)])


def test_a_failing_task_is_reported_and_the_others_run():
    def fails(settings):
        raise RuntimeError('nothing works')

    def empty(settings):
        return [Document((Likelihood('a', 'b'),), lambda answers: {'answers': (len(answers), 1.0)})] * 2

    said = []
    results = run_tasks(Known(), [Task('bad', '', fails), Task('good', '', empty)], FEW, said.append)
    assert results.failed == {'bad': 'nothing works'}
    assert results.flat() == {'task/good/answers': 1.0, 'task_stderr/good/answers': 0.0}
    assert said == ["task bad failed: RuntimeError('nothing works')"]
    assert table_rows({'a': results, 'b': Results({})}) == [
        ['task', 'metric', 'documents', 'a', 'b'],
        ['good', 'answers', '2', '1.0000 ± 0.0000', '-'],
        ['bad', 'failed', '0', '-', '-'],
    ]
    written = json.loads(as_json({'a': results}, FEW))
    assert written['results']['a']['tasks']['good']['answers'] == {'value': 1.0, 'stderr': 0.0, 'documents': 2}
