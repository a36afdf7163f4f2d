"""A part of the matrix and of the mutations; `matrix.py` and `mutations.py` have all of them."""

import re

import jax
import pytest

from parallel import mutations
from parallel.cases import ALLOWED, MODELS, ROWS, alone, differences, trained
from pretrax.model import expert_slots
from pretrax.train.step import make_gradients
from small import mesh_of, random_batch, random_weights, transformer


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('name', 'mesh'),
    [
        ('dense', {'r': 2, 'c': 2, 't': 2}),
        ('dense', {'d': 2, 't': 2, 'p': 2}),
        ('parallel block', {'d': 2, 'c': 2, 't': 2}),
        ('dropout', {'d': 2, 'c': 2, 't': 2}),
        ('global heads', {'d': 2, 'c': 2, 't': 2}),
        ('global heads', {'t': 2, 'p': 2}),
        ('stages, 1f1b, 2 rounds, dropout', {'p': 2}),
        ('stages, interleaved', {'p': 8}),
        ('stages, 1f1b, 2 rounds', {'p': 4}),
        ('experts', {'d': 2, 'e': 2, 'c': 2}),
        ('experts, capacity', {'e': 2}),
        ('chunked attention', {'d': 2, 'e': 2, 'c': 2}),
        ('dense, muon', {'d': 2, 'c': 2, 't': 2}),
        ('experts, muon', {'d': 2, 'e': 2, 't': 2}),
        ('stages, 1f1b, muon', {'p': 2}),
    ],
)
def test_training_on_a_mesh_is_training_on_one_device(name, mesh):
    found = differences(trained(name, mesh), alone(name))
    assert {key: value for key, value in found.items() if not value <= ALLOWED[key]} == {}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('configuration', 'place'),
    [
        ('experts', r'exchange.py:\d+ all_to_all'),
        ('experts', r'context.py:\d+ ppermute'),
        ('experts', 'moe.py.* gather'),
    ],
)
def test_a_broken_collective_is_detected(configuration, place):
    every = mutations.sites()
    last = [name for name in every if re.search(place, name)][-1]
    error, reached = mutations.difference(configuration, every, last)
    assert last in reached
    assert not error <= mutations.SEEN


@pytest.mark.nightly
def test_tokens_travel_in_as_many_rounds_as_they_need(monkeypatch):
    """With room for a few only, no token is lost: the gradient of the unbroken configuration, in several rounds."""
    monkeypatch.setattr(expert_slots, 'ROOM', 0.2)
    error, _ = mutations.difference('experts', {}, None)
    assert error < 1e-5


def test_one_device_does_not_communicate():
    model = transformer(MODELS['experts'])
    with jax.set_mesh(mesh_of()):
        batch = random_batch(ROWS)
        program = jax.jit(make_gradients(model, 1)).lower(random_weights(model), batch).as_text()
    assert 'dot_general' in program
    assert not re.findall(r'all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute', program)
