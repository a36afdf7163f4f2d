"""A federation computed again from the objects in its bucket: the encodings, the outer optimizer, and the protocol.

It shares no arithmetic with pretrax: it parses the JSON and the chunks itself. Of pretrax it takes one digest.
"""

import collections
import itertools
import json
import math
import re

import ml_dtypes
import numpy as np
import xxhash

from pretrax.federation.host_weights import HostArray, digest_of, joined_digest


class Recomputed:
    """The rounds of a federation, and what is wrong with them.

    Args:
        objects: {key below the place of the federation: content}, with those that were removed.

    Attributes:
        closings: {round: closing}. contributions: {round: {island: contribution}}.
        weights: after the newest round. problems: sentences; [] if all is as it should be.
    """

    def __init__(self, objects, rate=0.7, mu=0.9):
        self.objects, self.rate, self.mu = objects, np.float32(rate), np.float32(mu)
        self.problems: list[str] = []
        self.shares = self._json('federation.json')['islands']
        self.closings, self.contributions = self._rounds()
        anchor = self._json('anchors/0/anchor.json')
        assert anchor['momentum'] == []
        self.weights = self._whole(anchor['weights'])
        self.momentum = {name: np.zeros_like(x) for name, x in self.weights.items()}
        self._check_batches()
        for number in self.closings:
            self._take(number)

    def learned(self):
        """{(round, island): digest of what a member has learned}"""
        return {
            (number, name): member['learned']
            for number, closing in self.closings.items()
            for name, member in closing['members'].items()
        }

    def batches(self):
        """{island: the batches that count}"""
        found = collections.defaultdict(list)
        for number, closing in self.closings.items():
            for name in closing['members']:
                one = self.contributions[number][name]
                found[name] += range(one['first_batch'], one['last_batch'])
        return found

    def _rounds(self):
        closings, contributions = {}, collections.defaultdict(dict)
        for key in self.objects:
            if found := re.fullmatch(r'rounds/(\d+)/([^/]+)\.json', key):
                number, name = int(found[1]), found[2]
                if name == 'closed':
                    closings[number] = self._json(key)
                else:
                    contributions[number][name] = self._json(key)
        closings = dict(sorted(closings.items()))
        if list(closings) != list(range(1, len(closings) + 1)):
            self.problems.append(f'the closed rounds are {list(closings)}')
        for number, closing in closings.items():
            for name, member in closing['members'].items():
                digest = xxhash.xxh3_128_hexdigest(self.objects[f'rounds/{number}/{name}.json'])
                if (digest, self.shares[name]) != (member['xxh3'], member['share']):
                    self.problems.append(f'round {number}: closed.json lists another contribution of {name}')
        return closings, contributions

    def _check_batches(self):
        for name, batches in self.batches().items():
            twice = [batch for batch, times in collections.Counter(batches).items() if times > 1]
            if twice:
                self.problems.append(f'{name} has contributed batches {twice} twice')

    def _take(self, number):
        """The outer optimizer after the mean difference of the members of a round."""
        before = digest(self.weights)
        for name, one in self.contributions[number].items():
            if one['anchor'] != before:
                self.problems.append(f'round {number}: {name} began at other weights ({one["anchor"]}, not {before})')
        members = sorted(self.closings[number]['members'], key=self.shares.__getitem__)
        tokens = [self.contributions[number][name]['tokens'] for name in members]
        total = {name: np.zeros_like(x) for name, x in self.weights.items()}
        part: dict[str, np.ndarray] = {}  # of the weights that the round is about
        for name, count in zip(members, tokens, strict=True):
            sent = {weight: np.zeros(x.shape, bool) for weight, x in total.items()}
            for weight, cell, values in self._cells(self.contributions[number][name]['pieces']):
                total[weight][cell] += np.float32(count / sum(tokens)) * values
                sent[weight][cell] = True
            if part and any((sent[weight] != part[weight]).any() for weight in sent):
                self.problems.append(f'round {number}: {name} has sent other weights than the others')
            part = sent
        for name, where in part.items():
            gradient = total[name][where]
            momentum = self.momentum[name][where] = self.mu * self.momentum[name][where] + gradient
            self.weights[name][where] -= self.rate * (gradient + self.mu * momentum)
        if f'anchors/{number}/anchor.json' in self.objects:
            self._check_anchor(number)

    def _check_anchor(self, number):
        anchor = self._json(f'anchors/{number}/anchor.json')
        for kind, ours in (('weights', self.weights), ('momentum', self.momentum)):
            theirs = self._whole(anchor[kind])
            if any(not np.array_equal(ours[name], theirs[name]) for name in ours):
                self.problems.append(f'the {kind} in anchor {number} are others')

    def _whole(self, pieces):
        shapes: dict[str, tuple] = {}
        cells = list(self._cells({'0': pieces}, shapes))
        weights = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
        for name, cell, values in cells:
            weights[name][cell] = values
        return weights

    def _cells(self, pieces, shapes=None):
        """Name, slices and values of each chunk of a contribution or of an anchor, once."""
        seen = set()
        for piece in itertools.chain.from_iterable(pieces[process] for process in sorted(pieces, key=int)):
            index = self.objects[piece['object']]
            assert (len(index), xxhash.xxh3_128_hexdigest(index)) == (piece['size'], piece['xxh3']), piece
            listing = json.loads(index)
            for number, keys in enumerate(listing['objects']):
                content, at = self.objects[piece['object'].replace('index.json', str(number))], 0
                for key, wanted in keys.items():
                    name, _, place = key.rpartition('/')
                    cuts = listing['arrays'][name]
                    cell = [
                        (c[int(i)], c[int(i) + 1]) for i, c in zip(place.split('.') if place else (), cuts, strict=True)
                    ]
                    if shapes is not None:
                        shapes[name] = tuple(c[-1] for c in cuts)
                    count = math.prod(b - a for a, b in cell)
                    size = SIZES[listing['encoding']](count)
                    chunk, at = content[at : at + size], at + size
                    assert xxhash.xxh3_128_hexdigest(chunk) == wanted, key
                    if (name, place) not in seen:
                        seen.add((name, place))
                        values = decoded(chunk, listing['encoding'], count)
                        yield name, tuple(slice(*c) for c in cell), values.reshape([b - a for a, b in cell])

    def _json(self, key):
        return json.loads(self.objects[key])


SIZES = {
    'f32': lambda count: 4 * count, 'bf16': lambda count: 2 * count, 'int8': lambda count: -(-count // 64) * 66,
    'int4': lambda count: -(-count // 64) * 34,
}  # fmt: skip


def decoded(content, encoding, count):
    """f32[count], by the documentation of the encodings."""
    if encoding == 'f32':
        return np.frombuffer(content, '<f4')
    if encoding == 'bf16':
        return np.frombuffer(content, ml_dtypes.bfloat16).astype(np.float32)
    blocks = -(-count // 64)
    scales = np.frombuffer(content[: 2 * blocks], ml_dtypes.bfloat16).astype(np.float32)
    codes = np.frombuffer(content[2 * blocks :], np.uint8).astype(np.int64).reshape(blocks, -1)
    if encoding == 'int4':
        codes = np.concatenate([codes & 15, codes >> 4], axis=1)
    largest = {'int4': 8, 'int8': 128}[encoding]
    codes = np.where(codes < largest, codes, codes - 2 * largest)
    return (scales[:, None] * codes.astype(np.float32)).reshape(-1)[:count]


def digest(weights):
    """That of contributions, for whole arrays."""

    def whole(values):
        index = tuple((0, size) for size in values.shape)
        return HostArray(index, {index: np.ascontiguousarray(values)}, frozenset([index]))

    return joined_digest([digest_of({name: whole(values) for name, values in weights.items()})])
