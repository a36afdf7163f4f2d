"""The engine writes what the whole forward pass writes, whatever else happens in its slots at the same time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigram import Bigram
from goldens.golden import CASES, model_of, ours, tensors
from goldens.golden import options as golden_options
from pretrax.errors import UserError
from pretrax.infer.engine import Engine
from pretrax.infer.programs import EngineOptions, Programs, fitting_length
from pretrax.infer.request import Request
from pretrax.infer.sampling_settings import Sampling
from pretrax.shardlib import i32, num, typed_shard_map
from small import GPT2, LLAMA, LLAMA4, MIXTURE, mesh_of, random_weights, transformer

LENGTH = 64
GREEDY = Sampling(temperature=0)
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]  # with which several prompts begin: four pages
WINDOWED = LLAMA | {'window': 6, 'global_every': 2}
STATES = LLAMA | {
    'layer_types': ('mamba', 'delta', 'window', 'full'), 'n_layers': 4, 'window': 6, 'linear_heads': 4,
    'linear_key_heads': 2,
    'linear_d_head': 8, 'linear_d_key': 6,
}  # fmt: skip
OPTIONS = EngineOptions(max_length=LENGTH, slots=4, block=4, chunk=8, page=4)
OTHERS = (
    ('llama', 'eight devices'), ('gpt2', 'one device'), ('windowed', 'eight devices'), ('mixture', 'one device'),
    ('chunked', 'one device'), ('chunked', 'eight devices'),
    ('mixture', 'eight devices'), ('mixture', 'experts apart'), ('states', 'eight devices'),
)  # fmt: skip
MESHES = {
    'one device': {},
    'eight devices': {'r': 2, 'd': 2, 't': 2},
    'eight devices, heads whole': {'r': 2, 'd': 4},
    'experts apart': {'d': 2, 'e': 2, 't': 2},
}


def placed(model, weights, mesh):
    with jax.set_mesh(mesh):
        return jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())


@functools.cache
def decoder(name, mesh_name):
    """A model on a mesh, and its weights: of a golden, or random ones."""
    mesh = mesh_of(**MESHES[mesh_name])
    small = {
        'chunked': LLAMA4,
        'llama': LLAMA,
        'gpt2': GPT2 | {'max_sequence_length': LENGTH},
        'windowed': WINDOWED,
        'mixture': MIXTURE,
        'states': STATES,
    }
    if name in small:
        model = transformer(small[name], mesh, length=LENGTH)
        return model, placed(model, random_weights(model), mesh), mesh
    model = transformer(golden_options(name), mesh, vocab_size=model_of(name).arch.vocab_size, length=LENGTH)
    with jax.set_mesh(mesh_of()):
        weights = ours(name, model_of(name), tensors(name))
    return model, placed(model, weights, mesh), mesh


def engine_of(name, mesh_name='one device', draft=None, **changes):
    model, weights, mesh = decoder(name, mesh_name)
    drafter, draft_weights = (None, None) if draft is None else decoder(draft, mesh_name)[:2]
    programs = Programs(model, mesh, dataclasses.replace(OPTIONS, **changes), drafter)
    return Engine(programs, weights, weights_step=7, draft=draft_weights)


@functools.cache
def forward(name):
    """tokens [1, LENGTH] -> logits, by the forward pass of training on one device."""
    model, weights, mesh = decoder(name, 'one device')
    weights_type = model.Weights

    @jax.jit
    @typed_shard_map
    def logits(weights: weights_type, tokens: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        return model.logits(weights, tokens)

    def run(tokens):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(tokens)] = tokens
        with jax.set_mesh(mesh):
            return np.asarray(logits(weights, row))[0, : len(tokens), : model.arch.vocab_size].astype(np.float64)

    return run


def likeliest(name, prompt, answer):
    """Whether each token of the answer is the likeliest one, by the forward pass over the whole text."""
    logits = forward(name)([*prompt, *answer])[len(prompt) - 1 : -1]
    gap = np.max(logits, axis=-1) - logits[np.arange(len(answer)), answer]
    return np.all(gap <= 1e-4 * np.abs(logits).max(initial=0))


def run(engine, requests, cancel=(), every=2):
    """The answers. A request joins at every second step, or all at once if `every` is 0; those in `cancel` end after
    four steps of their own.
    """
    waiting, answers, updates, born = list(enumerate(requests)), {}, {}, {}
    numbers = {}
    steps = 0
    while waiting or not engine.idle:
        while waiting and (not every or steps == every * waiting[0][0]):
            index, request = waiting.pop(0)
            number = engine.add(request)
            numbers[number], born[number], answers[index], updates[index] = index, steps, [], []
        for number, index in numbers.items():
            if index in cancel and steps - born[number] == 4:
                engine.cancel(number)
        for update in engine.step():
            answers[numbers[update.number]] += update.tokens
            updates[numbers[update.number]].append(update)
        steps += 1
    return [answers[i] for i in range(len(requests))], [updates[i] for i in range(len(requests))]


def ids(tokens):
    return [token.id for token in tokens]


def prompts_for(vocab_size):
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, vocab_size, n).tolist() for n in (1, 2, 7, 30, 13, 4, 21)]
    return [*drawn, [*SHARED, 11, 2], [*SHARED, 7], drawn[3], [*drawn[3][:20], 1, 2]]


def writes_the_likeliest_tokens(name, mesh_name, draft=None, **changes):
    engine = engine_of(name, mesh_name, draft, **changes)
    prompts = prompts_for(engine.vocab_size)
    requests = [
        Request(prompt=tuple(prompt), max_tokens=5 + 3 * i, sampling=GREEDY) for i, prompt in enumerate(prompts)
    ]
    answers, updates = run(engine, requests, cancel=(4, 6))
    status = engine.status()
    assert (status.busy_slots, status.waiting, status.used_pages, status.compilations) == (0, 0, 0, 0)
    assert all(updates[i][-1].finish == ('cancelled' if i in (4, 6) else 'length') for i in range(len(requests)))
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        assert i in (4, 6) or len(answer) == request.max_tokens
        assert likeliest(name, request.prompt, ids(answer)), f'request {i}'
    return status


@pytest.mark.parametrize(
    ('name', 'mesh_name'),
    [
        ('llama', 'one device'),
        pytest.param('gpt2', 'eight devices', marks=pytest.mark.slow),
        pytest.param('windowed', 'one device', marks=pytest.mark.nightly),
        *[pytest.param(*case, marks=pytest.mark.nightly) for case in OTHERS],
    ],
)
def test_answers_are_those_of_the_forward_pass(name, mesh_name):
    """Requests join and leave, some are canceled, prompts are read in chunks,
    and two kinds of beginnings are shared.
    """
    status = writes_the_likeliest_tokens(name, mesh_name)
    assert mesh_name != 'one device' or status.cached_prompt_tokens >= 16


@pytest.mark.parametrize(
    ('name', 'draft'),
    [
        pytest.param('llama', None, marks=pytest.mark.nightly),
        pytest.param('windowed', None, marks=pytest.mark.nightly),
        pytest.param('windowed', 'gpt2', marks=pytest.mark.nightly),
        pytest.param('llama', 'llama', marks=pytest.mark.slow),
    ],
)
def test_answers_with_proposals_are_those_of_the_forward_pass(name, draft):
    status = writes_the_likeliest_tokens(name, 'one device', draft, proposed=3)
    if draft == name:  # a model agrees with itself
        assert status.accepted_tokens == status.proposed_tokens > 0
    else:
        assert status.proposed_tokens > status.accepted_tokens > 0


@pytest.mark.nightly
@pytest.mark.parametrize(('mesh_name', 'proposed'), [('one device', 3), ('eight devices', 0)])
@pytest.mark.parametrize('name', CASES)
def test_answers_of_every_family_are_those_of_the_forward_pass(name, mesh_name, proposed):
    attention = model_of(name).arch.attention
    if mesh_name == 'eight devices' and (attention.n_kv_heads % 2 or attention.global_n_kv_heads % 2):
        mesh_name = 'eight devices, heads whole'
    if model_of(name).arch.has_states:
        proposed = 0
    writes_the_likeliest_tokens(name, mesh_name, proposed=proposed)


@pytest.mark.slow
def test_states_are_those_of_the_forward_pass():
    """As above. A prompt that begins like another one is read again;
    so is one that is scored before its answer is written.
    """
    status = writes_the_likeliest_tokens('states', 'one device')
    assert status.cached_prompt_tokens == status.cached_pages == 0
    engine = engine_of('states')
    alone = Request(prompt=tuple(SHARED), max_tokens=9, sampling=GREEDY)
    scored = dataclasses.replace(alone, prompt_logprobs=0)
    (expected, same), (_, updates) = run(engine, [alone, scored])
    assert same == expected
    logits = forward('states')(SHARED)[:-1]
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    found = [token.logprob for token in updates[0].prompt[1:]]
    np.testing.assert_allclose(found, logprobs[np.arange(15), SHARED[1:]], atol=1e-4)


def test_what_states_cannot_do_is_refused():
    """No tokens are taken back; and a cache of keys and values has a format only if there are any."""
    with pytest.raises(UserError, match='leave out --propose and --draft'):
        Programs(transformer(STATES), mesh_of(), dataclasses.replace(OPTIONS, proposed=3))
    alone = {'family': 'mamba2', 'n_layers': 2, 'd_model': 64}
    with pytest.raises(UserError, match='leave out --cache'):
        Programs(transformer(alone), mesh_of(), dataclasses.replace(OPTIONS, cache='int8'))


@pytest.fixture(scope='module')
def engine():
    return engine_of('llama')


def shapes_of(program, monkeypatch, programs):
    """The shapes of the tokens in calls of a program: rows, or rows and columns."""
    shapes, run = [], getattr(programs, program)

    def noted(weights, caches, tokens, *rest):
        shapes.append(getattr(tokens, 'token', tokens).shape)
        return run(weights, caches, tokens, *rest)

    monkeypatch.setattr(programs, program, noted)
    return shapes


@pytest.mark.parametrize(
    ('name', 'mesh_name', 'proposed'),
    [
        ('llama', 'one device', 3),
        pytest.param('states', 'one device', 0, marks=pytest.mark.slow),
        pytest.param('windowed', 'eight devices', 0, marks=pytest.mark.nightly),
        pytest.param('states', 'eight devices', 0, marks=pytest.mark.nightly),
    ],
)
def test_answers_are_those_of_the_forward_pass_in_few_and_many_rows(name, mesh_name, proposed, monkeypatch):
    """All requests come at once. Short prompts are read together, and rows become fewer as answers end."""
    slots = 8 if mesh_name == 'one device' else 32
    engine = engine_of(name, mesh_name, proposed=proposed, slots=slots, chunk=64)
    written = shapes_of('_write', monkeypatch, engine._programs)
    read = shapes_of('_read', monkeypatch, engine._programs)
    prompts = prompts_for(engine.vocab_size)
    requests = [
        Request(prompt=tuple(prompt), max_tokens=5 + 3 * i, sampling=GREEDY) for i, prompt in enumerate(prompts)
    ]
    requests += [Request(prompt=(1, 2), max_tokens=9, choice=i, sampling=Sampling(seed=3)) for i in range(4)]
    answers, updates = run(engine, requests, cancel=(4, 6), every=0)
    assert engine.status().compilations == 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
        assert updates[i][-1].finish == ('cancelled' if i in (4, 6) else 'length')
        assert likeliest(name, prompt, ids(answer)), f'request {i}'
    assert answers[len(prompts) :] == [run(engine, [request])[0][0] for request in requests[len(prompts) :]]
    shards = engine._programs.shards
    assert {rows // shards for (rows,) in written} == set(engine._programs.written_rows)
    assert max(rows // shards for rows, columns in read if columns == 16) > 1


def test_a_block_has_as_many_rows_as_slots_are_in_use(monkeypatch):
    """1, 4, 8 or all."""
    engine = engine_of('llama', slots=10)
    written = shapes_of('_write', monkeypatch, engine._programs)
    for count, rows in (1, 1), (3, 4), (5, 8), (9, 10):
        written.clear()
        run(engine, [Request(prompt=(1,), max_tokens=3, choice=i) for i in range(count)], every=0)
        assert set(written) == {(rows,)}


def test_short_prompts_are_read_together(monkeypatch):
    """Rows of padding are fewer than rows with a prompt. Longer prompts are read later, in chunks of their size.
    The rows of a chunk together may have more tokens than the longest sequence.
    """
    engine = engine_of('llama', slots=12, chunk=64, max_length=48)
    read = shapes_of('_read', monkeypatch, engine._programs)
    for count, shapes in (1, [(1, 16)]), (2, [(1, 16)] * 2), (3, [(4, 16)]), (6, [(4, 16), (1, 16), (1, 16)]):
        read.clear()
        run(engine, [Request(prompt=(count, i, 7), max_tokens=1) for i in range(count)], every=0)
        assert read == shapes
    read.clear()
    lengths = 5, 30, 6, 7
    run(engine, [Request(prompt=(9, *range(n)), max_tokens=1) for n in lengths], every=0)
    assert read == [(4, 16), (1, 48)]


def test_an_engine_without_a_warm_up_compiles_no_program_for_fewer_rows():
    model, weights, mesh = decoder('llama', 'one device')
    engine = Engine(Programs(model, mesh, OPTIONS), weights, warm_up=False)
    for i in range(4):
        engine.add(Request(prompt=(1, 2, i), max_tokens=5 + 5 * i, sampling=GREEDY))
    engine.step()
    compiled = engine.status().compilations
    while not engine.idle:
        engine.step()
    assert engine.status().compilations == compiled > 0


def test_the_first_token_of_an_answer_does_not_wait_for_a_block_of_slow_steps(engine):
    engine.add(Request(prompt=(1, 2, 3), max_tokens=20))
    engine._step_seconds = 0.05
    blocks = []
    for _ in range(2):
        ((update,), engine._step_seconds) = engine.step(), 0.05
        blocks.append(len(update.tokens))
    assert blocks == [1, 2]
    while not engine.idle:
        engine.step()


def test_an_answer_is_the_same_alone_and_in_any_company(engine):
    """Random requests of every kind. Those with a seed draw at random."""
    rng = np.random.default_rng(1)
    requests = [
        Request(
            prompt=tuple(rng.integers(0, 100, rng.integers(1, 30)).tolist()),
            max_tokens=int(rng.integers(1, 20)),
            choice=i % 2,
            sampling=Sampling(
                temperature=[0, 1.5][i % 2], top_p=[None, 0.9][i % 3 == 0], seed=i % 5, repetition_penalty=1 + i % 2
            ),
        )
        for i in range(12)
    ]  # fmt: skip
    together, _ = run(engine, requests)
    alone = [run(engine, [request])[0][0] for request in requests]
    assert together == alone
    other, _ = run(engine, [dataclasses.replace(requests[1], choice=5)])
    assert other[0] != alone[1]


@pytest.mark.parametrize('draft', [None, pytest.param('gpt2', marks=pytest.mark.nightly)])
def test_proposals_never_change_a_random_answer(engine, draft):
    requests = [
        Request(prompt=(1, 2, 3) * 4, max_tokens=30, sampling=Sampling(temperature=temperature, seed=4, top_k=40))
        for temperature in (0.3, 1.0)
    ]
    requests.append(Request(prompt=(5, 6), max_tokens=20, sampling=Sampling(seed=1, frequency_penalty=0.5)))
    expected, _ = run(engine, requests)
    speculative = engine_of('llama', draft=draft, proposed=3)
    assert run(speculative, requests)[0] == expected
    assert speculative.status().accepted_tokens > 0


def test_log_probabilities_are_those_of_the_forward_pass(engine):
    prompt = (*SHARED, *SHARED, 8)
    request = Request(prompt=prompt, max_tokens=6, sampling=Sampling(seed=2), logprobs=3, prompt_logprobs=2)
    (answer,), (updates,) = run(engine, [request])
    logits = forward('llama')([*prompt, *ids(answer)])
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    scored = [*updates[0].prompt, *answer]
    assert updates[0].cached == 0  # a token that is not read has no log probability
    assert [token.id for token in scored] == [*prompt, *ids(answer)]
    assert (scored[0].logprob, scored[0].top) == (None, ())
    for i, token in enumerate(scored[1:]):
        assert token.logprob == pytest.approx(expected[i, token.id], abs=1e-4)
        count = 2 if i + 1 < len(prompt) else 3
        assert [one for one, _ in token.top] == np.argsort(-expected[i])[:count].tolist()
        assert [p for _, p in token.top] == pytest.approx(np.sort(expected[i])[::-1][:count], abs=1e-4)


def test_prompts_are_scored_beside_others_on_every_device():
    engine = engine_of('windowed', 'eight devices')
    requests = [
        Request(
            prompt=tuple(prompt), max_tokens=i % 4, sampling=GREEDY, logprobs=0, prompt_logprobs=0 if i % 2 else None
        )
        for i, prompt in enumerate(prompts_for(engine.vocab_size))
    ]
    answers, updates = run(engine, requests)
    assert engine.status().compilations == 0
    for request, answer, (first, *_) in zip(requests, answers, updates, strict=True):
        text = [*request.prompt, *ids(answer)]
        logits = forward('windowed')(text)
        expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        found = [token.logprob for token in (*first.prompt[1:], *answer)]
        start = len(text) - len(found)
        assert len(answer) == request.max_tokens
        assert found == pytest.approx(expected[np.arange(start - 1, len(text) - 1), text[start:]], abs=1e-4)


def test_embeddings_are_the_final_hidden_states(engine):
    """The unembedding of the last hidden state gives the logits of the last token."""
    prompt = tuple(range(20, 41))
    both = [Request(prompt=prompt, max_tokens=0, embedding=kind) for kind in ('last', 'mean')]
    _, (last, mean) = run(engine, both)
    _, (shorter, *_) = run(engine, [dataclasses.replace(both[1], prompt=prompt[:-1])])
    model, weights, _ = decoder('llama', 'one device')
    table = np.asarray(weights.unembed)[: model.arch.vocab_size]
    assert table @ last[0].embedding == pytest.approx(forward('llama')(prompt)[-1], abs=1e-4)
    n = len(prompt)
    expected = ((n - 1) * shorter[0].embedding + last[0].embedding) / n
    assert mean[0].embedding == pytest.approx(expected, abs=1e-5)
    assert (last[0].finish, last[0].tokens) == ('length', ())


@pytest.mark.parametrize('prompt', [(5,), (*SHARED, 9)])  # the second time, all but the last token is in the cache
def test_a_request_for_no_tokens_ends_when_its_prompt_is_read(engine, prompt):
    request = Request(prompt=prompt, max_tokens=0)
    _, updates = run(engine, [dataclasses.replace(request, max_tokens=1), request])
    assert [(update.finish, update.tokens) for update in updates[1]] == [('length', ())]


@pytest.mark.parametrize('steps', [0, 1])
def test_a_canceled_request_reports_nothing_about_a_prompt_that_is_not_read(engine, steps):
    """It waits, or a part of its prompt is read."""
    request = Request(prompt=tuple(range(50)), max_tokens=0, embedding='mean', prompt_logprobs=1)
    number = engine.add(request)
    assert [update for _ in range(steps) for update in engine.step()] == []
    engine.cancel(number)
    (update,) = engine.step()
    assert (update.number, update.finish, update.prompt, update.embedding) == (number, 'cancelled', (), None)
    assert engine.idle


def test_the_first_token_after_a_scored_prompt_sees_its_whole_window():
    """The last token of the prompt is read twice. Prompts of every length, relative to a page."""
    engine = engine_of('windowed')
    requests = [
        Request(prompt=tuple(range(n)), max_tokens=1, sampling=GREEDY, logprobs=0, prompt_logprobs=0)
        for n in range(9, 13)
    ]
    answers, _ = run(engine, requests)
    for request, (token,) in zip(requests, answers, strict=True):
        logits = forward('windowed')(request.prompt)[-1]
        assert token.logprob == pytest.approx(logits[token.id] - np.log(np.sum(np.exp(logits))), abs=1e-4)


def test_an_answer_ends_at_a_stop_token_and_includes_it(engine):
    request = Request(prompt=(1, 2, 3), max_tokens=20, sampling=Sampling(temperature=2, seed=3))
    (whole,), _ = run(engine, [request])
    end = ids(whole)[9]
    first = ids(whole).index(end)
    (answer,), (updates,) = run(engine, [dataclasses.replace(request, stop_ids=(end, 99 - end))])
    assert ids(answer) == ids(whole)[: first + 1]
    assert (updates[-1].finish, updates[-1].weights_step) == ('stop', 7)


def test_a_prompt_that_begins_like_another_is_not_read_again(engine):
    engine.swap(decoder('llama', 'one device')[1], 7)  # forgets the other tests
    requests = [Request(prompt=(*SHARED, 50 + i), max_tokens=4, sampling=GREEDY) for i in range(3)]
    _, updates = run(engine, requests)
    assert [one[0].cached for one in updates] == [0, 16, 16]


def test_other_weights_write_from_the_next_block_on(engine):
    """A request that runs continues, and what was read with the old weights is not used for new prompts."""
    model, weights, mesh = decoder('llama', 'one device')
    other = placed(model, random_weights(model, seed=5), mesh)
    fresh = Request(prompt=(*SHARED, 5), max_tokens=8, sampling=GREEDY)
    (before,), _ = run(engine, [fresh])
    long = engine.add(Request(prompt=(4, 5), max_tokens=40, sampling=GREEDY))
    first = engine.step()
    engine.swap(other, 9)
    later = [update for _ in range(12) for update in engine.step()]
    assert {update.weights_step for update in first} == {7}
    assert {update.weights_step for update in later} == {9}
    assert sum(len(update.tokens) for update in (*first, *later) if update.number == long) == 40
    (after,), (updates,) = run(engine, [fresh])
    assert updates[0].cached == 0
    assert after == run(Engine(engine._programs, other), [fresh])[0][0] != before
    engine.swap(weights, 7)
    assert run(engine, [fresh])[0][0] == before


def test_weights_that_are_not_numbers_leave_nothing_in_the_cache(engine):
    """A server follows a run that diverges, and then its next one. New requests use the pages of old ones."""
    weights = decoder('llama', 'one device')[1]
    request = Request(prompt=(2, 3, 5), max_tokens=8, sampling=GREEDY)
    (before,), _ = run(engine, [request])
    engine.swap(jax.tree.map(lambda w: np.nan * w, weights), 8)
    run(engine, [dataclasses.replace(request, max_tokens=50, choice=i) for i in range(8)])
    engine.swap(weights, 9)
    assert run(engine, [request])[0][0] == before


def test_a_draft_has_to_fit_its_model():
    model = transformer(LLAMA)
    with pytest.raises(UserError, match='the draft has 90 tokens, the model 100'):
        Programs(model, mesh_of(), OPTIONS, transformer(LLAMA, vocab_size=90))
    for one, other in (Bigram(), model), (model, Bigram()):
        with pytest.raises(UserError, match='Bigram has no cache, so it cannot use a draft or be one'):
            Programs(one, mesh_of(), OPTIONS, other)
    narrow = transformer(LLAMA | {'d_model': 36, 'd_head': 8})
    assert Programs(model, mesh_of(d=8), OPTIONS, narrow).mesh.shape['d'] == 4  # which divides both


@pytest.mark.parametrize('name', ['llama', 'windowed'])
def test_sequences_that_do_not_fit_together_are_read_again_later(name):
    """Pages for one sequence and a half: the newer one makes room, and its answer is the same."""
    engine, tight = engine_of(name), engine_of(name)
    for memory in tight._memories:
        for layers in memory._layers:
            while layers.pool.available > 20:
                layers.pool.allocate()
    requests = [Request(prompt=tuple(range(i, i + 9)), max_tokens=40, sampling=Sampling(seed=i)) for i in range(4)]
    assert run(tight, requests)[0] == run(engine, requests)[0]


@pytest.mark.parametrize('cache', [pytest.param(kind, marks=pytest.mark.slow) for kind in ('int8', 'fp8', 'bf16')])
def test_a_smaller_cache_changes_logits_by_its_rounding_alone(cache):
    """The log probabilities of one text. fp8 has 3 bits of mantissa, int8 and bf16 have 7."""
    request = Request(prompt=(*SHARED, *SHARED), max_tokens=0, prompt_logprobs=0)

    def scores(engine):
        _, (updates,) = run(engine, [request])
        return np.array([token.logprob for token in updates[0].prompt[1:]])

    exact, rounded = scores(engine_of('llama')), scores(engine_of('llama', cache=cache))
    error = np.sqrt(np.mean((exact - rounded) ** 2)) / np.std(exact)
    assert 0 < error < {'int8': 0.02, 'bf16': 0.02, 'fp8': 0.15}[cache]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'prompt': ()}, 'the prompt is empty'),
        ({'prompt': (1,) * 60}, 'the prompt has 60 tokens; with 5 new ones that is 65, but there is room for 64'),
        ({'prompt': (1,) * 70}, 'shorten the prompt'),
        ({'prompt': (1, 100)}, 'the prompt has the token 100\nthe vocabulary has the tokens 0 to 99'),
        ({'max_tokens': -1}, 'max_tokens is -1\ngive 0 or more'),
        ({'stop_ids': (-1,)}, 'stop_ids has the token -1'),
        ({'stop_ids': tuple(range(17))}, 'stop_ids asks for 17\nat most 16'),
        ({'logprobs': 21}, 'logprobs asks for 21'),
        ({'sampling': Sampling(logit_bias={500: 1.0})}, 'logit_bias has the token 500'),
    ],
)
def test_a_request_that_can_never_run_is_refused(engine, changes, message):
    with pytest.raises(UserError) as refusal:
        engine.add(Request(**({'prompt': (1,), 'max_tokens': 5} | changes)))
    assert message in str(refusal.value)
    assert engine.idle


def test_a_length_fits_if_its_cache_does():
    """A cache has 2 arrays per layer of f32[9 sequences of the length, 2 heads, 8],
    and a page of 16 tokens for padding.
    """
    model, options = (
        transformer(LLAMA | {'n_layers': 2, 'n_kv_heads': 2, 'd_head': 8}),
        EngineOptions(max_length=1 << 20),
    )
    of_a_token = 2 * 2 * 2 * 8 * 4
    mesh = mesh_of()
    found = fitting_length(model, mesh, options)
    room = (1 << 30) * mesh.devices.size
    assert of_a_token * 9 * found <= room < of_a_token * 9 * 2 * found
    assert fitting_length(model, mesh, EngineOptions(max_length=5000)) == 5000
    small = Programs(model, mesh, EngineOptions(max_length=64))
    assert small.cache_bytes() == sum(array.nbytes for array in jax.tree.leaves(small.new_caches()))


@pytest.mark.parametrize(
    ('slots', 'length', 'dtype', 'exact'),
    [(1, 9, jnp.float32, True), (1, 60, jnp.float32, False), (4, 9, jnp.bfloat16, False)],
)
def test_a_bf16_model_on_a_cpu_writes_one_sequence_in_f32(slots, length, dtype, exact):
    """Many tokens of a prompt are read in bf16, and several sequences are written in it, never one row of them."""
    model, weights, mesh = decoder('gpt2', 'one device')
    rounded = transformer(GPT2 | {'max_sequence_length': LENGTH}, mesh, length=LENGTH, dtype=jnp.bfloat16)
    options = dataclasses.replace(OPTIONS, slots=slots, chunk=LENGTH)
    request = Request(prompt=tuple(range(length)), max_tokens=3, sampling=GREEDY, logprobs=0)
    programs = Programs(rounded, mesh, options)
    engine = Engine(programs, weights, warm_up=False)
    assert engine._weights[0].layers[0].weights.named()['q'].dtype == dtype
    assert {cache.k.dtype for cache in engine._caches[0]} == {jnp.dtype(dtype)}
    assert programs.written_rows == [slots]
    assert engine.dtype == dtype
    (found,), _ = run(engine, [request])
    (expected,), _ = run(Engine(Programs(model, mesh, options), weights, warm_up=False), [request])
    gaps = [abs(token.logprob - other.logprob) for token, other in zip(found, expected, strict=True)]
    assert (max(gaps) == 0) == exact
    assert max(gaps) < 0.05
