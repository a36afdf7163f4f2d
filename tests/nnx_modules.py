"""Flax NNX modules as users write them, right and wrong, for `model.target=nnx_modules:NAME`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH = 16


class Plain(nnx.Module):
    """Says nothing about sharding."""

    def __init__(self, vocab_size, rate=0.0, *, rngs):
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.unembed = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def hidden(self, tokens):
        return self.drop(nnx.relu(self.up(self.embed(tokens))))

    def __call__(self, tokens):
        return self.unembed(self.hidden(tokens))


class PartlyAnnotated(nnx.Module):
    """One weight of a feed-forward is sharded, and XLA would shard its neighbors too.

    `with_mesh`: by a sharding over a mesh of the module, as in JAX's walk-through, instead of by names.
    """

    def __init__(self, vocab_size, with_mesh=False, *, rngs):
        names = (None, 't')
        if with_mesh:
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('t',))
            names = jax.sharding.NamedSharding(mesh, jax.P(*names))
        kernel_init = nnx.with_partitioning(nnx.initializers.normal(0.1), names)
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=kernel_init, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.unembed = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.unembed(x + self.down(nnx.relu(self.up(x))))


class Masks(nnx.Module):
    """Its logits are a weight of ones behind two dropouts: half of the vocabulary behind each."""

    def __init__(self, vocab_size, rate, *, rngs):
        self.one = nnx.Param(jnp.ones(()))
        self.first, self.second = nnx.Dropout(rate, rngs=rngs), nnx.Dropout(rate, rngs=rngs)
        self.half = vocab_size // 2

    def __call__(self, tokens):
        ones = jnp.broadcast_to(self.one[...], (*tokens.shape, self.half))
        return jnp.concatenate([self.first(ones), self.second(ones)], axis=-1)


class TellsMode(nnx.Module):
    """Its logits are 1 if both flags of the call say that this is training."""

    def __init__(self, vocab_size, *, rngs):
        self.weight = nnx.Param(jnp.zeros(vocab_size))

    def __call__(self, tokens, train, *, deterministic):
        return self.weight[...] + jnp.full((*tokens.shape, 1), float(train and not deterministic))


class Table(Plain):
    """Has a variable that is not trained."""

    def __init__(self, vocab_size, *, rngs):
        super().__init__(vocab_size, rngs=rngs)
        self.table = nnx.Variable(jnp.arange(WIDTH, dtype=jnp.float32))

    def __call__(self, tokens):
        return self.unembed(self.hidden(tokens) + self.table[...])


class Batched(Plain):
    def __init__(self, vocab_size, frozen=None, *, rngs):
        super().__init__(vocab_size, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.frozen = frozen

    def __call__(self, tokens):
        return self.unembed(self.norm(self.hidden(tokens), use_running_average=self.frozen))


class Counts(Plain):
    def __init__(self, vocab_size, *, rngs):
        super().__init__(vocab_size, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, tokens):
        self.calls[...] += 1
        return super().__call__(tokens)


class Keeps(Plain):
    """Keeps an intermediate result, which is no state."""

    def __call__(self, tokens):
        self.kept = nnx.Intermediate(self.hidden(tokens))
        return self.unembed(self.kept[...])


class WithAuxiliary(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens), None


class InDict(Plain):
    def __call__(self, tokens):
        return {'loss': jnp.zeros(()), 'logits': super().__call__(tokens)}


class Nothing(Plain):
    def __call__(self, tokens):
        super().__call__(tokens)


class LastToken(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens)[:, -1]


class Flat(Plain):
    def __call__(self, tokens):
        logits = super().__call__(tokens)
        return logits.reshape(-1, logits.shape[-1])


class LengthFirst(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).swapaxes(0, 1)


class Shifted(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens[:, :-1])


class WithoutHead(Plain):
    def __call__(self, tokens):
        return self.hidden(tokens)


class Padded(Plain):
    def __call__(self, tokens):
        return jnp.pad(super().__call__(tokens), ((0, 0), (0, 0), (0, 28)))


class Likeliest(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).argmax(-1)


class Mistaken(Plain):
    def __call__(self, tokens):
        return self.hidden(tokens) @ jnp.zeros((3, 3))


class WantsMore(Plain):
    def __call__(self, tokens, image):
        return super().__call__(tokens) + image


class FixedLength(nnx.Module):
    """Its table of positions fits one length only."""

    def __init__(self, vocab_size, sequence_length, *, rngs):
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.positions = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (sequence_length, WIDTH)))
        self.unembed = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        return self.unembed(self.embed(tokens) + self.positions[...])


class Layers(nnx.Module):
    """Layers like those of GPT-2 with modules of Flax of several kinds, and two parameters of its own."""

    def __init__(self, vocab_size, *, rngs):
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((64, WIDTH)))
        self.attention = nnx.List([nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.experts = nnx.Einsum('blm,emf->blef', (3, WIDTH, 8), rngs=rngs)
        self.mix = nnx.Einsum('blef,efg->bleg', (3, 8, 8), rngs=rngs)
        self.merge = nnx.LinearGeneral((3, 8), WIDTH, axis=(-2, -1), rngs=rngs)
        self.own = nnx.Param(jnp.eye(WIDTH))
        self.depthwise = nnx.Conv(WIDTH, WIDTH, (3,), padding='CAUSAL', feature_group_count=WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), padding='CAUSAL', rngs=rngs)
        self.stacked = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(3))
        self.unembed = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for attention in self.attention:
            x = x + attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.merge(self.mix(nnx.relu(self.experts(x)))) @ self.own[...]
        x = self.conv(self.depthwise(x)) + jnp.einsum('blm,smn->bln', x, self.stacked.kernel[...])
        return self.unembed(x)
