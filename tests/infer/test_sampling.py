"""Tokens are chosen as in `transformers` and by the papers' formulas. A slot's tokens depend on its request alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file

from goldens.golden import HERE as GOLDENS
from pretrax.infer.request import MAX_BIASED, MAX_LOGPROBS
from pretrax.infer.sampling import Seen, choose, log_probabilities, see_answer, slot_row, unused_slots
from pretrax.infer.sampling_settings import Sampling

POSITIONS = 40
choose = functools.partial(jax.jit, static_argnames='vocab_size')(choose)
log_probabilities = functools.partial(jax.jit, static_argnames='vocab_size')(log_probabilities)


def stack(rows):
    return jax.tree.map(lambda *values: np.stack(values), *rows)


def seen_in(prompts, answers, columns):
    prompt, answer = (
        np.stack([np.bincount(text, minlength=columns) for text in texts]) for texts in (prompts, answers)
    )
    return Seen(prompt > 0, answer.astype(np.int32))


def nothing(slots, columns):
    return seen_in([np.zeros(0, int)] * slots, [np.zeros(0, int)] * slots, columns)


def noise(seed, choice, position, columns):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)
    return jax.random.gumbel(key, (columns,))


def test_choices_are_those_of_transformers():
    """Penalty, temperature, top-k, top-p and min-p of 48 rows at 40 positions, each with the same noise."""
    golden = load_file(GOLDENS / 'sampling.safetensors')
    logits, tokens = golden['logits'], golden['tokens']
    rows, columns = logits.shape
    names = ['temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty']
    how = [Sampling(**{name: golden[name][row].item() for name in names}, seed=row) for row in range(rows)]
    sampling = stack([slot_row(each, choice=3) for each in how])
    seen = seen_in(tokens[:, :12], tokens[:, 12:], columns)
    noises = jax.jit(jax.vmap(jax.vmap(functools.partial(noise, columns=columns), (None, None, 0)), (0, None, None)))(
        jnp.arange(rows), 3, jnp.arange(POSITIONS)
    )
    expected = np.argmax(golden['processed'][:, None] + np.asarray(noises), axis=-1)
    chosen = [
        choose(logits, sampling, seen, np.full(rows, at, np.int32), vocab_size=columns) for at in range(POSITIONS)
    ]
    np.testing.assert_array_equal(np.stack(chosen, axis=1), expected)


PROBABILITY = np.array([0.05, 0.5, 0.1, 0.2, 0.15])


@pytest.mark.parametrize(
    ('options', 'kept'),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({'top_k': 3}, [1, 3, 4]),
        ({'top_k': 9}, [0, 1, 2, 3, 4]),
        ({'top_p': 0.49}, [1]),
        ({'top_p': 0.51}, [1, 3]),  # the smallest set that reaches it
        ({'top_p': 0.69}, [1, 3]),
        ({'top_p': 0.71}, [1, 3, 4]),
        ({'top_p': 1.0}, [0, 1, 2, 3, 4]),
        ({'top_p': 0.0}, [1]),
        ({'top_k': 2, 'top_p': 0.72}, [1, 3]),  # of 0.5 and 0.2 renormalized, 0.5 alone reaches 0.71
        ({'top_k': 2, 'top_p': 0.7}, [1]),
        ({'temperature': 2.0, 'top_p': 0.49}, [1, 3]),  # the set is that of the heated distribution
        ({'temperature': 0.5}, [0, 1, 2, 3, 4]),
        ({'temperature': 1e-39, 'top_p': 0.9}, [1]),
        ({'temperature': 1e-30}, [1]),
        ({'min_p': 0.25}, [1, 3, 4]),
        ({'min_p': 0.25, 'temperature': 2.0}, [0, 1, 2, 3, 4]),
        ({'min_p': 1.0}, [1]),
    ],
)
def test_sampled_tokens_have_the_expected_distribution(options, kept):
    n = 20_000
    sampling = jax.tree.map(lambda x: np.broadcast_to(x, (n, *np.shape(x))), slot_row(Sampling(**options), choice=0))
    logits = np.broadcast_to(np.log(PROBABILITY) + 7, (n, 5)).astype(np.float32)
    drawn = np.asarray(choose(logits, sampling, nothing(n, 5), np.arange(n, dtype=np.int32), vocab_size=5))
    p = np.zeros(5)
    p[kept] = (PROBABILITY[kept] / PROBABILITY[kept].max()) ** (1 / options.get('temperature', 1))
    p /= p.sum()
    counts = np.bincount(drawn, minlength=5)
    assert not counts[p == 0].any()
    assert np.all(np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)))


COLUMNS, TOKENS, ROWS, DRAWS = 24, 20, 8, 150
levels = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, 30.0])  # many ties
# XLA rounds subnormal numbers to zero.
floats = st.floats(-20, 20, width=32, allow_subnormal=False)
random_logits = arrays.arrays(np.float32, (ROWS, COLUMNS), elements=levels | floats)
each_row = functools.partial(st.lists, min_size=ROWS, max_size=ROWS)


@settings(max_examples=30)
@given(
    logits=random_logits,
    top_k=each_row(st.integers(0, COLUMNS + 3)),
    top_p=each_row(st.floats(0.01, 1)),
    min_p=each_row(st.just(0.0) | st.floats(0, 1)),
)
def test_drawn_tokens_pass_the_filters(logits, top_k, top_p, min_p):
    """Of rows with ties and with padding."""
    options = zip(top_k, top_p, min_p, range(ROWS), strict=True)
    how = [Sampling(top_k=k, top_p=p, min_p=m, seed=seed) for k, p, m, seed in options]
    for row, drawn in enumerate(draw(logits, how)):
        assert set(drawn) <= kept_by_sorting(logits[row, :TOKENS], how[row])


@settings(max_examples=30)
@given(logits=random_logits, top_k=each_row(st.integers(1, 5)))
def test_every_token_that_passes_is_drawn(logits, top_k):
    """At a high temperature all that pass are about equally likely: 150 draws miss none of up to 8."""
    how = [Sampling(top_k=k, temperature=1e4, seed=seed) for seed, k in enumerate(top_k)]
    for row, drawn in enumerate(draw(logits, how)):
        kept = kept_by_sorting(logits[row, :TOKENS], how[row])
        assert set(drawn) == kept or len(kept) > 8


def draw(logits, how):
    """Tokens of each row, at 150 positions."""
    rows = jax.tree.map(lambda x: np.repeat(x, DRAWS, axis=0), stack([slot_row(each, choice=0) for each in how]))
    position = np.tile(np.arange(DRAWS, dtype=np.int32), ROWS)
    seen = nothing(ROWS * DRAWS, COLUMNS)
    drawn = choose(np.repeat(logits, DRAWS, axis=0), rows, seen, position, vocab_size=TOKENS)
    return np.asarray(drawn).reshape(ROWS, DRAWS)


def kept_by_sorting(logits, how):
    """A token as likely as one that passes top-k or top-p passes it too."""
    logits = (logits / np.float32(how.temperature)).astype(np.float64)
    order = np.argsort(-logits, kind='stable')
    if how.top_k:
        order = order[logits[order] >= logits[order][: how.top_k][-1]]
    if how.top_p is not None:
        p = np.exp(logits[order] - logits.max())
        passing = np.cumsum(p) - p < (how.top_p + 1e-5) * p.sum()  # rounding of the sums
        order = order[logits[order] >= logits[order][passing].min()]
    return set(order[np.exp(logits[order] - logits.max()) >= how.min_p - 1e-5])


def test_biases_and_penalties_equal_their_formulas():
    """At temperature 0: the likeliest of the logits of OpenAI's documentation and of Keskar et al., equation 1."""
    rng = np.random.default_rng(0)
    rows, columns = 64, 50
    logits = rng.normal(size=(rows, columns)).astype(np.float32)
    logits[::2] -= 4  # all negative
    prompts, answers = rng.integers(0, columns, (2, rows, 30))
    how = []
    for _ in range(rows):
        biased = rng.permutation(columns)[: rng.integers(0, 6)].tolist()
        how.append(
            Sampling(
                temperature=0,
                repetition_penalty=rng.choice([1.0, 1.2, 3.0]),
                presence_penalty=rng.choice([0.0, 0.7, -0.9]),
                frequency_penalty=rng.choice([0.0, 0.4, -0.5]),
                logit_bias={token: float(rng.normal()) for token in biased},
            )
        )
    sampling = stack([slot_row(each, choice=0) for each in how])
    position = np.zeros(rows, np.int32)
    chosen = choose(logits, sampling, seen_in(prompts, answers, columns), position, vocab_size=columns)
    likeliest = []
    for row in range(rows):
        mu = logits[row].astype(np.float64)
        for token, value in how[row].logit_bias.items():
            mu[token] += value
        for token in set(prompts[row]) | set(answers[row]):
            mu[token] *= how[row].repetition_penalty ** (-1 if mu[token] > 0 else 1)
        c = np.bincount(answers[row], minlength=columns)
        mu -= how[row].presence_penalty * (c > 0) + how[row].frequency_penalty * c
        likeliest.append(int(np.argmax(mu)))
    assert chosen.tolist() == likeliest
    assert np.mean(np.argmax(logits, axis=1) == likeliest) < 0.7  # the penalties mattered


def test_a_choice_depends_on_seed_choice_and_position_alone():
    """The same row in another slot, beside other slots, and with more padding."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 40)).astype(np.float32)
    how = Sampling(top_k=30, top_p=0.95, seed=2**64 - 5)
    others = [Sampling(temperature=2.0, seed=n, presence_penalty=1.0) for n in range(5)]

    def choices(slot, slots, padding, seed=how.seed, choice=2, start=0):
        rows = [slot_row(other, choice=0) for other in others]
        rows[slot:slot] = [slot_row(Sampling(top_k=30, top_p=0.95, seed=seed), choice)]
        texts = np.roll(logits, slot, axis=0)[:slots]
        texts = np.pad(texts, ((0, 0), (0, padding)), constant_values=50)
        found = []
        for at in range(start, start + 25):
            position = np.arange(slots, dtype=np.int32) + at - slot
            found.append(
                choose(texts, stack(rows[:slots]), nothing(slots, 40 + padding), position, vocab_size=40)[slot]
            )
        return np.array(found).tolist()

    alone = choices(0, 1, 0)
    assert len(set(alone)) > 5
    assert choices(0, 6, 8) == choices(4, 6, 8) == alone
    assert choices(0, 1, 0, seed=how.seed - 1) != alone
    assert choices(0, 1, 0, seed=how.seed % 2**32) != alone
    assert choices(0, 1, 0, choice=3) != alone
    assert choices(0, 1, 0, start=5)[:20] == alone[5:]


def test_padding_is_never_chosen_and_greedy_takes_the_first_of_equals():
    logits = np.zeros((3, 8), np.float32)
    logits[:, 6:] = 1e9
    logits[1, 2:5] = 1
    logits[2] = -np.inf
    logits[2, 5] = -1e30
    position = np.zeros(3, np.int32)
    assert choose(logits, unused_slots(3), nothing(3, 8), position, vocab_size=6).tolist() == [0, 2, 5]
    hot = stack([slot_row(Sampling(temperature=1e4, seed=n), choice=0) for n in range(3)])
    drawn = {choose(logits, hot, nothing(3, 8), position + n, vocab_size=6).tolist()[0] for n in range(60)}
    assert drawn == set(range(6))


def test_even_of_nan_logits_a_token_is_chosen():
    logits = np.full((2, 8), np.nan, np.float32)
    how = stack([slot_row(Sampling(temperature=t, top_p=0.5), choice=0) for t in (0, 1)])
    assert max(choose(logits, how, nothing(2, 8), np.zeros(2, np.int32), vocab_size=6)) < 6


def test_zeros_of_both_signs_are_equally_likely():
    logits = np.broadcast_to(np.array([-0.0, 0.0, -5, 0.0], np.float32), (40, 4))
    how = stack([slot_row(Sampling(top_k=1, seed=n), choice=0) for n in range(40)])
    assert set(choose(logits, how, nothing(40, 4), np.zeros(40, np.int32), vocab_size=4).tolist()) == {0, 1, 3}


def test_biases_reach_the_last_token_and_the_limit_of_their_number():
    logits = np.zeros((1, MAX_BIASED), np.float32)
    biases = {token: token / 1000 for token in range(MAX_BIASED)}
    for sign, expected in (1, MAX_BIASED - 1), (-1, 0):
        how = Sampling(temperature=0, logit_bias={token: sign * bias for token, bias in biases.items()})
        sampling = stack([slot_row(how, choice=0)])
        seen = nothing(1, MAX_BIASED)
        assert choose(logits, sampling, seen, np.zeros(1, np.int32), vocab_size=MAX_BIASED).tolist() == [expected]


def test_answers_are_counted_where_a_token_is_real():
    seen = nothing(3, 4)
    for token, real in ([1, 2, 3], [True, True, False]), ([1, 0, 2], [True, False, True]):
        seen = jax.jit(see_answer)(seen, np.array(token), np.array(real))
    np.testing.assert_array_equal(seen.answer, [[0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]])
    assert not np.any(seen.prompt)


@pytest.mark.parametrize('tokens', [7, 90])
def test_log_probabilities_are_those_of_the_softmax(tokens):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 96)).astype(np.float32) * 4
    chosen = np.array([0, 5, 6], np.int32)
    wanted = np.array([False, True, False])
    found, ids, values = log_probabilities(logits, chosen, wanted, vocab_size=tokens)
    of_tokens = np.float64(logits[:, :tokens])
    expected = of_tokens - np.log(np.sum(np.exp(of_tokens), axis=1, keepdims=True))
    top = np.argsort(-expected, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_allclose(found, expected[np.arange(3), chosen], rtol=1e-5)
    np.testing.assert_array_equal(ids, top)
    np.testing.assert_allclose(values, np.take_along_axis(expected, top, axis=1), rtol=1e-5, atol=1e-6)
    assert not np.any(log_probabilities(logits, chosen, np.zeros(3, bool), vocab_size=tokens)[0])


def test_slots_need_no_compilation_of_their_own():
    """Requests with every option run the program that greedy ones were compiled for."""
    logits, position = np.zeros((2, 16), np.float32), np.zeros(2, np.int32)
    choose(logits, unused_slots(2), nothing(2, 16), position, vocab_size=16)
    programs = choose._cache_size()
    how = Sampling(
        top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, presence_penalty=1, logit_bias={3: -100}, seed=2**40
    )
    choose(logits, stack([slot_row(how, choice=1)] * 2), nothing(2, 16), position, vocab_size=16)
    assert choose._cache_size() == programs
