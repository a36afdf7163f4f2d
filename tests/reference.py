"""The ground truth of the model and of training: a decoder, its loss and AdamW in plain jax.numpy on one device.

Written from the papers, the straightforward way, and on purpose with nothing of pretrax in it: no sharding, no custom
derivatives, no fused or blocked kernels, f32 throughout. `arch` is anything with the attributes of an architecture and
`w` anything with the attributes of the weights (layers stacked along the first dimension).
"""

import math

import jax
import jax.numpy as jnp


def logits(w, tokens, segments, positions, arch):
    """tokens, segments, positions [B, L] -> [B, L, vocab_size], each row on its own."""
    return whole(w, tokens, segments, positions, arch)[0]


def whole(w, tokens, segments, positions, arch):
    """The logits, and what the routers of experts did in each layer (see `mixture`): [B, layers, L, E]."""
    w = jax.tree.map(jnp.asarray, w)
    return jax.vmap(lambda t, s, p: _row(w, t, s, p, arch))(tokens, segments, positions)


def _row(w, tokens, segments, positions, arch):
    x, routers = w.embed[tokens], []
    if arch.positions == 'learned':
        x = x + w.positions[positions]
    for i in range(arch.n_layers):
        layer = jax.tree.map(lambda stacked, i=i: stacked[i], w.layers)
        x = x + attention(norm(x, layer.norm1, layer.norm1_bias, arch), layer, segments, positions, arch)
        h = norm(x, layer.norm2, layer.norm2_bias, arch)
        out, router = mixture(h, layer, arch) if arch.n_experts else (feed_forward(h, layer, arch), ())
        x, routers = x + out, [*routers, router]
    x = norm(x, w.norm, w.norm_bias, arch)
    unembedding = w.embed if arch.tied else w.unembed
    return x @ unembedding[: arch.vocab_size].T, jax.tree.map(lambda *layers: jnp.stack(layers), *routers)


def norm(x, scale, bias, arch):
    if arch.norm == 'rmsnorm':
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + arch.norm_eps) * scale
    else:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + arch.norm_eps) * scale
    return x if bias is None else x + bias


def attention(x, w, segments, positions, arch):
    """Causal attention inside documents, a head at a time. x [L, M]."""
    length = x.shape[0]
    order = jnp.arange(length)
    visible = (order[None, :] <= order[:, None]) & (segments[None, :] == segments[:, None])
    total = jnp.zeros_like(x)
    for head in range(arch.n_heads):
        kv_head = head // (arch.n_heads // arch.n_kv_heads)
        q = x @ w.q[:, head] + (0 if w.q_bias is None else w.q_bias[head])
        k = x @ w.k[:, kv_head] + (0 if w.k_bias is None else w.k_bias[kv_head])
        v = x @ w.v[:, kv_head] + (0 if w.v_bias is None else w.v_bias[kv_head])
        if arch.positions == 'rope':
            q, k = rope(q, positions, arch.rope_base), rope(k, positions, arch.rope_base)
        scores = q @ k.T / jnp.sqrt(arch.d_head)
        probability = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        total = total + probability @ v @ w.o[head]
    return total if w.o_bias is None else total + w.o_bias


def rope(x, positions, base):
    """x [L, D]: the pair (i, i + D/2) is a complex number, multiplied by exp(i * position * frequency)."""
    half = x.shape[-1] // 2
    frequency = 1 / base ** (2 * jnp.arange(half) / x.shape[-1])
    turned = (x[:, :half] + 1j * x[:, half:]) * jnp.exp(1j * positions[:, None] * frequency)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def feed_forward(x, w, arch):
    up = x @ w.up + (0 if w.up_bias is None else w.up_bias)
    if arch.activation == 'swiglu':
        gate = x @ w.gate
        hidden = gate / (1 + jnp.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (up + 0.044715 * up**3)))
    return hidden @ w.down + (0 if w.down_bias is None else w.down_bias)


def mixture(x, w, arch):
    """Every expert computes every token; what the router does not choose is multiplied by zero. x [L, M].

    Returns the output, and of the router: logits, choices that count (1 or 0) and choices made, [L, E] each.
    """
    router = x @ w.router
    probability = jnp.exp(router - router.max(-1, keepdims=True))
    probability = probability / probability.sum(-1, keepdims=True)
    rank = jnp.argsort(jnp.argsort(-probability, axis=-1), axis=-1)
    chosen = (rank < arch.experts_per_token).astype(x.dtype)
    weight = probability * chosen
    if arch.normalize_router:
        weight = weight / weight.sum(-1, keepdims=True)
    fits = chosen
    if arch.capacity is not None:  # an expert takes tokens in their order, until it is full
        places = min(len(x), math.ceil(arch.capacity * len(x) * arch.experts_per_token / arch.n_experts))
        fits = chosen * (jnp.cumsum(chosen, axis=0) <= places)
    out = 0.0
    for e in range(arch.n_experts):
        gate = x @ w.expert_gate[e]
        out = out + (weight * fits)[:, e, None] * (
            (gate * jax.nn.sigmoid(gate) * (x @ w.expert_up[e])) @ w.expert_down[e]
        )
    if w.shared_up is not None:
        gate = x @ w.shared_gate
        shared = (gate * jax.nn.sigmoid(gate) * (x @ w.shared_up)) @ w.shared_down
        out = out + (shared if w.shared_mix is None else jax.nn.sigmoid(x @ w.shared_mix)[:, None] * shared)
    return out, (router, fits, chosen)


def nll(w, batch, arch):
    """The mean of -log p(target) over the targets that count."""
    log_p = jax.nn.log_softmax(logits(w, batch.tokens, batch.segments, batch.positions, arch))
    of_target = jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    return -(of_target * batch.mask).sum() / batch.mask.sum()


def z_loss(w, batch, arch):
    """The mean of log(Z)^2, weighted."""
    log_z = jax.nn.logsumexp(logits(w, batch.tokens, batch.segments, batch.positions, arch), axis=-1)
    return arch.z_loss * (log_z**2 * batch.mask).sum() / batch.mask.sum()


def router_losses(w, batch, arch):
    """The load-balance loss and the z-loss of the routers, each with its weight. What is behind a row's last target does not count."""
    _, (router, _, chosen) = whole(w, batch.tokens, batch.segments, batch.positions, arch)  # [B, layers, L, E] each
    last = (jnp.arange(1, batch.mask.shape[1] + 1) * (batch.mask > 0)).max(-1)
    real = (jnp.arange(batch.mask.shape[1]) < last[:, None])[:, None, :, None]
    probability = jax.nn.softmax(router, axis=-1)
    if (
        arch.balance_over == 'sequence'
    ):  # DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20; the mean over sequences and layers
        n = real.sum(2)
        f = arch.n_experts / (arch.experts_per_token * n) * (chosen * real).sum(2)
        balance = (f * (probability * real).sum(2) / n).sum(-1).mean()
    else:  # load_balancing_loss_func of Hugging Face's Mixtral: all layers and tokens in one
        n = real.sum() * arch.n_layers
        share, mean = (chosen * real).sum((0, 1, 2)) / n, (probability * real).sum((0, 1, 2)) / n
        balance = arch.n_experts * (share * mean).sum()
    square = jax.nn.logsumexp(router, axis=-1) ** 2 * real[..., 0]
    return {
        'balance_loss': arch.balance_loss * balance,
        'router_z_loss': arch.router_z_loss * square.sum() / (real.sum() * arch.n_layers),
    }


def terms(w, batch, arch):
    """The terms of the loss that have a weight, by name."""
    found = {'nll': nll(w, batch, arch)}
    if arch.z_loss:
        found['z_loss'] = z_loss(w, batch, arch)
    if arch.n_experts:
        found |= {name: value for name, value in router_losses(w, batch, arch).items() if getattr(arch, name)}
    return found


def gradient_of(arch):
    """Of weights and a batch: the gradient of the whole loss, and its terms."""

    def whole_loss(w, batch):
        found = terms(w, batch, arch)
        return sum(found.values()), found

    return jax.jit(jax.grad(whole_loss, has_aux=True))


def loss(w, batch, arch):
    return sum(terms(w, batch, arch).values())


class AdamW:
    """Clipping by global norm, Adam's two moments with bias correction, and decay that bypasses both."""

    def __init__(self, w, rates, *, b1, b2, eps, weight_decay, clip_norm):
        self.rates, self.b1, self.b2, self.eps = rates, b1, b2, eps
        self.weight_decay, self.clip_norm, self.steps = weight_decay, clip_norm, 0
        self.first = jax.tree.map(jnp.zeros_like, w)
        self.second = jax.tree.map(jnp.zeros_like, w)

    def step(self, w, gradient):
        length = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
        if length > self.clip_norm:
            gradient = jax.tree.map(lambda g: g * self.clip_norm / length, gradient)
        self.first = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, self.first, gradient)
        self.second = jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, self.second, gradient)
        rate = self.rates[self.steps]
        self.steps += 1

        def update(path, w, m, v):
            m, v = m / (1 - self.b1**self.steps), v / (1 - self.b2**self.steps)
            name = path[-1].name
            decays = 'norm' not in name and not name.endswith('bias')
            return w - rate * (m / (jnp.sqrt(v) + self.eps) + decays * self.weight_decay * w)

        return jax.tree_util.tree_map_with_path(update, w, self.first, self.second)
