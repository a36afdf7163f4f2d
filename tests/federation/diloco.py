"""Islands again, in one process and in double precision: Douillard et al. 2023 and 2025, for the bigram model."""

import jax
import numpy as np

from bigram import Bigram, by_hand
from pretrax.data.batches.source import DataRequest, HostBatch
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.train.state import initial_key
from small import VOCAB

ROWS, LENGTH = 4, 16


def batch_of(share, islands, number, directory):
    """Rows number * ROWS + j of the rows k * islands + share."""
    source = SyntheticSource(DataRequest(0, LENGTH, directory, print), VOCAB, document_length=LENGTH + 1)
    rows = [[(number * ROWS + j) * islands + share for j in range(ROWS)]]
    parts = [source.batch(row, slice(0, 1), 1) for row in rows[0]]
    return HostBatch(*map(np.concatenate, zip(*parts, strict=True)))


class Outer:
    """Nesterov momentum as in torch.optim.SGD(nesterov=True)."""

    def __init__(self, weights, rate=0.7, mu=0.9):
        self.theta = {name: w.copy() for name, w in weights.items()}
        self.momentum = {name: np.zeros_like(w) for name, w in weights.items()}
        self.rate, self.mu = rate, mu

    def step(self, names, gradient):
        for name in names:
            self.momentum[name] = self.mu * self.momentum[name] + gradient[name]
            self.theta[name] = self.theta[name] - self.rate * (gradient[name] + self.mu * self.momentum[name])


def first_weights():
    weights = Bigram(VOCAB).init(initial_key(0))
    return {'table': np.asarray(weights.table, np.float64), 'bias': np.asarray(weights.bias, np.float64)}


class Inner:
    """One island: plain SGD."""

    def __init__(self, share, islands, weights, directory, rate=0.5):
        self.share, self.islands, self.directory, self.rate = share, islands, directory, rate
        self.w, self.losses = {name: w.copy() for name, w in weights.items()}, []

    def step(self, number):
        weights = jax.tree.unflatten(jax.tree.structure(Bigram(VOCAB).init(initial_key(0))), [*self.w.values()])
        loss, gradient = by_hand(weights, batch_of(self.share, self.islands, number, self.directory))
        self.losses.append(loss)
        self.w['table'] = self.w['table'] - self.rate * gradient.table
        self.w['bias'] = self.w['bias'] - self.rate * gradient.bias


def diloco(directory, islands, steps, every):
    """Returns the global weights at the end, and the losses of each island."""
    outer = Outer(first_weights())
    inner = [Inner(i, islands, outer.theta, directory) for i in range(islands)]
    names = list(outer.theta)
    for number in range(steps):
        for one in inner:
            one.step(number)
        if (number + 1) % every == 0 or number + 1 == steps:
            mean = {name: np.mean([outer.theta[name] - one.w[name] for one in inner], axis=0) for name in names}
            outer.step(names, mean)
            for one in inner:
                one.w = {name: w.copy() for name, w in outer.theta.items()}
    return outer.theta, [one.losses for one in inner]


def streaming(directory, islands, steps, every, fragments, delay, mixing):
    """The same in fragments (lists of names) that are due in turn, sent while the islands train on."""
    outer = Outer(first_weights())
    inner = [Inner(i, islands, outer.theta, directory) for i in range(islands)]
    apart, due, turn = every // len(fragments), {}, 0
    for number in range(steps):
        for one in inner:
            one.step(number)
        done = number + 1
        if done in due:
            names = due.pop(done)
            for one in inner:
                for name in names:
                    one.w[name] = mixing * one.w[name] + (1 - mixing) * outer.theta[name]
        if done % apart == 0 and done < steps:
            names, turn = fragments[turn % len(fragments)], turn + 1
            outer.step(names, {n: np.mean([outer.theta[n] - one.w[n] for one in inner], axis=0) for n in names})
            due[done + delay] = names
    for _ in fragments:  # at the end all are averaged
        names, turn = fragments[turn % len(fragments)], turn + 1
        outer.step(names, {n: np.mean([outer.theta[n] - one.w[n] for one in inner], axis=0) for n in names})
        for one in inner:
            for name in names:
                one.w[name] = outer.theta[name].copy()
    return outer.theta, [one.losses for one in inner]
