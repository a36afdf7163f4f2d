"""The ground truth of the model and of training: a decoder, its loss and AdamW in plain jax.numpy on one device.

Written from the papers, the straightforward way, and on purpose with nothing of pretrax in it: no sharding, no custom
derivatives, no fused or blocked kernels, f32 throughout. `arch` is anything with the attributes of an architecture and
`w` anything with the attributes of the weights (layers that have a weight stacked along its first dimension).
"""

import math
import types

import jax
import jax.numpy as jnp

from pretrax.model.part import weight_types
from pretrax.model.weights import Layer


def logits(w, tokens, segments, positions, arch, masks=None):
    """tokens, segments, positions [B, L] -> [B, L, vocab_size], each row on its own. For `masks`, see `dropped`."""
    return whole(w, tokens, segments, positions, arch, masks)[0]


def whole(w, tokens, segments, positions, arch, masks=None):
    """The logits, what the routers of experts did in each layer (see `mixture`), [B, layers, L, E], and the logits of
    each module of multi-token prediction, whose layers come last.
    """
    w = jax.tree.map(jnp.asarray, w)
    return jax.vmap(lambda t, s, p, m: _row(w, t, s, p, arch, m))(tokens, segments, positions, masks or {})


def hidden_states(w, tokens, segments, positions, arch):
    """The residual stream after each layer, [B, layers, L, M], without dropout."""
    w = jax.tree.map(jnp.asarray, w)

    def row(t, s, p):
        x, found = w.embed[t] + (w.positions[p] if arch.positions == 'learned' else 0), []
        for i in range(arch.n_layers):
            x = _layer(x, layer_of(w.layers, i, arch), i, s, p, arch, {}, [])
            found.append(x)
        return jnp.stack(found)

    return jax.vmap(row)(tokens, segments, positions)


def dropped(x, masks, *place):
    """Inverted dropout: `masks` has, by place, which numbers are kept and the share that is dropped. {}: no dropout."""
    if place not in masks:
        return x
    keep, rate = masks[place]
    return x * keep / (1 - rate)


def _row(w, tokens, segments, positions, arch, masks):
    x, routers = w.embed[tokens], []
    if arch.positions == 'learned':
        x = x + w.positions[positions]
    x = dropped(x, masks, 'embedding')
    for i in range(arch.n_layers):
        x = _layer(x, layer_of(w.layers, i, arch), i, segments, positions, arch, masks, routers)
    x = norm(x, w.norm, w.norm_bias, arch)
    unembedding = (w.embed if arch.embedding.tied else w.unembed)[: arch.vocab_size]
    main, later = x @ unembedding.T, []
    for k in range(1, arch.multi_token.n_layers + 1):
        module = jax.tree.map(lambda a, k=k: a[k - 1], w.multi_token)
        x = _module(x, module, k, w.embed[tokens], segments, positions, arch, routers)
        later.append(x @ unembedding.T)
    return main, tuple(jnp.stack(layers) for layers in zip(*routers, strict=True)), later


def _layer(x, layer, i, segments, positions, arch, masks, routers):
    h = norm(x, layer.norm1, layer.norm1_bias, arch)
    if mixer_of(i, arch) in ('delta', 'mamba'):
        out = linear_attention(h, layer, segments, arch)
    elif arch.attention.latent.kv_rank:
        out = latent_attention(h, layer, segments, positions, arch)
    else:
        of_heads = {place[2:]: mask for place, mask in masks.items() if place[:2] == ('probabilities', i)}
        out = attention(h, layer, segments, positions, arch, of_heads, i)
    x = x + dropped(out, masks, 'attention', i)
    if arch.feed_forward.d_ff == 0:
        return x
    h = norm(x, layer.norm2, layer.norm2_bias, arch)
    if has_experts(i, arch):
        out, router = mixture(h, layer, arch)
        routers.append(router)
    else:
        out = feed_forward(h, layer, arch)
    return x + dropped(out, masks, 'feed-forward', i)


def _module(h, w, k, embedded, segments, positions, arch, routers):
    """DeepSeek-AI 2024, arXiv:2412.19437, eq. 21 and 22:
    h^k, normed, from h^(k-1), of which the last k do not count. [L, M]
    """
    shifted = jnp.concatenate([embedded[k:], jnp.repeat(embedded[-1:], k, axis=0)])  # routers count the last k
    both = jnp.concatenate([norm(h, w.hidden_norm, None, arch), norm(shifted, w.embedding_norm, None, arch)], axis=-1)
    x = both @ jnp.concatenate([w.from_hidden, w.from_embedding])
    layer = types.SimpleNamespace(**by_name(w.layer))
    return norm(_layer(x, layer, arch.n_layers - 1, segments, positions, arch, {}, routers), w.norm, None, arch)


def ahead_losses(w, batch, arch):
    """The weighted loss of each module of multi-token prediction, eq. 24 and 25: of targets of the same document."""
    later, found = whole(w, batch.tokens, batch.segments, batch.positions, arch)[2], {}
    for k, of_module in enumerate(later, start=1):
        log_p = jax.nn.log_softmax(of_module[:, :-k])
        of_target = jnp.take_along_axis(log_p, batch.targets[:, k:, None], axis=-1)[..., 0]
        counts = batch.mask[:, k:] * (batch.segments[:, k:] == batch.segments[:, :-k])
        found[f'mtp_loss/{k}'] = (
            -arch.multi_token.loss / arch.multi_token.n_layers * (of_target * counts).sum() / counts.sum()
        )
    return found


def has_experts(i, arch):
    """Whether layer i has experts, counted from 0 in `dense_layers`, from 1 in `expert_every`."""
    return arch.experts.n_experts > 0 and i not in arch.experts.dense_layers and (i + 1) % arch.experts.every == 0


def mixer_of(i, arch):
    types = arch.layer_types or ('full',)
    return types[i % len(types)]


def by_name(layer):
    """Every weight that there is, None if the layer does not have it."""
    return dict.fromkeys(weight_types(Layer)) | layer.named()


def layer_of(layers, i, arch):
    """The weights of layer i. A weight of a layer without experts counts those layers, and so on."""
    before = [has_experts(j, arch) for j in range(i)]
    mixers = [mixer_of(j, arch) for j in range(i + 1)]
    linear = [mixer in ('delta', 'mamba') for mixer in mixers]
    of_one = {'linear_skip': 'mamba', 'linear_group_norm': 'mamba', 'linear_beta': 'delta', 'linear_norm': 'delta'}
    found = {}
    for name, stacked in by_name(layers).items():
        if name in ('gate', 'up', 'down', 'up_bias', 'down_bias'):
            n = None if has_experts(i, arch) else before.count(False)
        elif name.startswith(('router', 'expert_', 'shared_')):
            n = before.count(True) if has_experts(i, arch) else None
        elif name in of_one:
            n = mixers[:-1].count(of_one[name]) if mixers[-1] == of_one[name] else None
        elif name.startswith('linear_'):
            n = linear[:-1].count(True) if linear[-1] else None
        elif name[0] in 'qkvo' and name[1:2] in ('', '_'):
            n = None if linear[-1] else linear.count(False) - 1
        else:
            n = i
        found[name] = None if stacked is None or n is None else stacked[n]
    return types.SimpleNamespace(**found)


def norm(x, scale, bias, arch):
    if arch.norm.kind == 'rmsnorm':
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + arch.norm.eps) * scale
    else:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + arch.norm.eps) * scale
    return x if bias is None else x + bias


def attention(x, w, segments, positions, arch, masks=None, i=0):
    """Causal attention inside documents, a head at a time;
    in Llama 4, inside chunks of documents. x [L, M], layer i.
    """
    length = x.shape[0]
    order = jnp.arange(length)
    visible = (order[None, :] <= order[:, None]) & (segments[None, :] == segments[:, None])
    rotated = arch.positions == 'rope' and (not arch.rope.nope_every or (i + 1) % arch.rope.nope_every != 0)
    if arch.attention.window_type == 'chunked' and not (
        arch.attention.global_every and (i + 1) % arch.attention.global_every == 0
    ):
        visible = visible & (positions[None, :] // arch.attention.window == positions[:, None] // arch.attention.window)
    total = jnp.zeros_like(x)
    for head in range(arch.attention.n_heads):
        kv_head = head // (arch.attention.n_heads // arch.attention.n_kv_heads)
        q = x @ w.q[:, head] + (0 if w.q_bias is None else w.q_bias[head])
        k = x @ w.k[:, kv_head] + (0 if w.k_bias is None else w.k_bias[kv_head])
        v = x @ w.v[:, kv_head] + (0 if w.v_bias is None else w.v_bias[kv_head])
        if rotated:
            q, k = rope(q, positions, arch.rope.base), rope(k, positions, arch.rope.base)
            if arch.attention.qk_norm == 'l2':
                q, k = (y / jnp.sqrt((y**2).mean(-1, keepdims=True) + arch.norm.eps) for y in (q, k))
        elif arch.attention.temperature:
            steps = jnp.floor((positions + 1) / arch.attention.temperature_length)
            q = q * (jnp.log(1 + steps) * arch.attention.temperature + 1)[:, None]
        scores = q @ k.T / jnp.sqrt(arch.attention.d_head)
        weight = jnp.where(visible, jnp.exp(scores), 0)
        sink = 0 if w.sinks is None else jnp.exp(w.sinks[head])
        weight = dropped(weight / (weight.sum(-1, keepdims=True) + sink), masks or {}, head)
        total = total + weight @ v @ w.o[head]
    return total if w.o_bias is None else total + w.o_bias


def latent_attention(x, w, segments, positions, arch):
    """DeepSeek-AI 2024, arXiv:2405.04434, eq. 9 to 17, a head at a time, in the names of eq. 37 to 47. x [L, M]."""

    def normed(c, scale):
        return c / jnp.sqrt((c**2).mean(-1, keepdims=True) + 1e-6) * scale

    order = jnp.arange(x.shape[0])
    visible = (order[None, :] <= order[:, None]) & (segments[None, :] == segments[:, None])
    c_kv, k_r = x @ w.kv_a[:, : arch.attention.latent.kv_rank], x @ w.kv_a[:, arch.attention.latent.kv_rank :]
    c_kv, k_r = normed(c_kv, w.kv_a_norm), rope(k_r, positions, arch.rope.base)
    c_q = x if w.q_a is None else normed(x @ w.q_a, w.q_a_norm)
    w_q = w.q_direct if w.q_a is None else w.q_b
    total = jnp.zeros_like(x)
    for head in range(arch.attention.n_heads):
        q = c_q @ w_q[:, head]
        q_c, q_r = (
            q[:, : arch.attention.latent.d_nope],
            rope(q[:, arch.attention.latent.d_nope :], positions, arch.rope.base),
        )
        k_c, v_c = (
            c_kv @ w.kv_b[:, head, : arch.attention.latent.d_nope],
            c_kv @ w.kv_b[:, head, arch.attention.latent.d_nope :],
        )
        scores = (q_c @ k_c.T + q_r @ k_r.T) / jnp.sqrt(arch.attention.latent.d_nope + arch.attention.latent.d_rope)
        total = total + jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1) @ v_c @ w.o[head]
    return total


def linear_attention(x, w, segments, arch):
    """A gated delta net, or the state-space model of Mamba 2, one token after the other. x [L, M]."""

    def convolved(projected, kernel, bias):
        total = jnp.zeros_like(projected) if bias is None else bias
        for back in range(kernel.shape[-1]):
            earlier = jnp.roll(projected, back, axis=0) * kernel[..., -1 - back]
            same = (jnp.roll(segments, back) == segments) & (jnp.arange(len(x)) >= back)
            total = total + jnp.where(same[:, None, None], earlier, 0)
        return total * jax.nn.sigmoid(total)

    shared = arch.recurrent.n_heads // arch.recurrent.n_key_heads
    q = convolved(jnp.einsum('lm,mgs->lgs', x, w.linear_q), w.linear_q_conv, w.linear_q_conv_bias)
    k = convolved(jnp.einsum('lm,mgs->lgs', x, w.linear_k), w.linear_k_conv, w.linear_k_conv_bias)
    v = convolved(jnp.einsum('lm,mnw->lnw', x, w.linear_v), w.linear_v_conv, w.linear_v_conv_bias)
    z = jnp.einsum('lm,mnw->lnw', x, w.linear_z)
    step = jnp.log1p(jnp.exp(x @ w.linear_a + w.linear_dt_bias))
    decay = jnp.exp(-jnp.exp(w.linear_log_decay) * step)
    q, k = jnp.repeat(q, shared, axis=1), jnp.repeat(k, shared, axis=1)
    if w.linear_beta is not None:
        q = q / jnp.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) / math.sqrt(arch.recurrent.d_key)
        k = k / jnp.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
        beta = jax.nn.sigmoid(x @ w.linear_beta)
    else:
        beta = jnp.zeros_like(step)

    def token(state, one):
        q, k, v, step, decay, beta, begins = one
        state = jnp.where(begins, 0, state * decay[:, None, None])
        held = jnp.einsum('ns,nsw->nw', k, state)
        write = step[:, None] * v if w.linear_beta is None else beta[:, None] * (v - held)
        state = state + jnp.einsum('ns,nw->nsw', k, write)
        return state, jnp.einsum('ns,nsw->nw', q, state)

    begins = segments != jnp.roll(segments, 1)
    empty = jnp.zeros((arch.recurrent.n_heads, arch.recurrent.d_key, arch.recurrent.d_head))
    _, y = jax.lax.scan(token, empty, (q, k, v, step, decay, beta, begins))
    gate = z * jax.nn.sigmoid(z)
    if w.linear_beta is None:
        y = ((y + w.linear_skip[:, None] * v) * gate).reshape(len(x), arch.recurrent.n_key_heads, -1)
        y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + arch.norm.eps)
        y = y.reshape(gate.shape) * w.linear_group_norm
    else:
        y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + arch.norm.eps) * w.linear_norm * gate
    return jnp.einsum('lnw,nwm->lm', y, w.linear_o)


def rope(x, positions, base):
    """x [L, D]: the pair (i, i + D/2) is a complex number, multiplied by exp(i * position * frequency)."""
    half = x.shape[-1] // 2
    frequency = 1 / base ** (2 * jnp.arange(half) / x.shape[-1])
    turned = (x[:, :half] + 1j * x[:, half:]) * jnp.exp(1j * positions[:, None] * frequency)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def feed_forward(x, w, arch):
    up = x @ w.up + (0 if w.up_bias is None else w.up_bias)
    if arch.feed_forward.activation == 'swiglu':
        gate = x @ w.gate
        hidden = gate / (1 + jnp.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (up + 0.044715 * up**3)))
    return hidden @ w.down + (0 if w.down_bias is None else w.down_bias)


def mixture(x, w, arch):
    """Every expert computes every token; what the router does not choose is multiplied by zero. x [L, M].

    Returns the output, and of the router: logits, choices that count (1 or 0) and choices made, [L, E] each.
    """
    router = x @ w.router + (0 if w.router_logit_bias is None else w.router_logit_bias)
    if arch.experts.router.scores == 'sigmoid':
        probability = 1 / (1 + jnp.exp(-router))
    else:
        probability = jnp.exp(router - router.max(-1, keepdims=True))
        probability = probability / probability.sum(-1, keepdims=True)
    rank = jnp.argsort(jnp.argsort(-probability, axis=-1), axis=-1)
    chosen = (rank < arch.experts.experts_per_token).astype(x.dtype)
    weight = probability * chosen
    if arch.experts.router.normalize:
        weight = weight / weight.sum(-1, keepdims=True)
    fits = chosen
    if arch.experts.capacity is not None:  # an expert takes tokens in their order, until it is full
        places = min(
            len(x), math.ceil(arch.experts.capacity * len(x) * arch.experts.experts_per_token / arch.experts.n_experts)
        )
        fits = chosen * (jnp.cumsum(chosen, axis=0) <= places)
    out = 0.0
    for e in range(arch.experts.n_experts):
        read, share = x, (weight * fits)[:, e, None]
        if arch.experts.router.weigh_inputs:
            read, share = x * weight[:, e, None], fits[:, e, None]
        gate, up, down_bias = read @ w.expert_gate[e], read @ w.expert_up[e], 0
        if w.expert_up_bias is not None:
            gate, up, down_bias = gate + w.expert_gate_bias[e], up + w.expert_up_bias[e], w.expert_down_bias[e]
        hidden = gate * jax.nn.sigmoid(gate) * up
        if arch.feed_forward.activation == 'swiglu_oai':
            gate, up = (
                jnp.minimum(gate, arch.feed_forward.swiglu_limit),
                jnp.clip(up, -arch.feed_forward.swiglu_limit, arch.feed_forward.swiglu_limit),
            )
            hidden = gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)
        out = out + share * (hidden @ w.expert_down[e] + down_bias)
    if w.shared_up is not None:
        gate = x @ w.shared_gate
        shared = (gate * jax.nn.sigmoid(gate) * (x @ w.shared_up)) @ w.shared_down
        out = out + (shared if w.shared_mix is None else jax.nn.sigmoid(x @ w.shared_mix)[:, None] * shared)
    return out, (router, fits, chosen)


def nll(w, batch, arch, masks=None):
    """The mean of -log p(target) over the targets that count."""
    log_p = jax.nn.log_softmax(logits(w, batch.tokens, batch.segments, batch.positions, arch, masks))
    of_target = jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    return -(of_target * batch.mask).sum() / batch.mask.sum()


def z_loss(w, batch, arch):
    """The mean of log(Z)^2, weighted."""
    log_z = jax.nn.logsumexp(logits(w, batch.tokens, batch.segments, batch.positions, arch), axis=-1)
    return arch.z_loss * (log_z**2 * batch.mask).sum() / batch.mask.sum()


def router_losses(w, batch, arch):
    """The load-balance loss and the z-loss of the routers, each with its weight.
    What is behind a row's last target does not count.
    """
    _, (router, _, chosen), _ = whole(w, batch.tokens, batch.segments, batch.positions, arch)  # [B, layers, L, E] each
    last = (jnp.arange(1, batch.mask.shape[1] + 1) * (batch.mask > 0)).max(-1)
    real = (jnp.arange(batch.mask.shape[1]) < last[:, None])[:, None, :, None]
    probability = jax.nn.softmax(router, axis=-1)
    if (
        arch.experts.router.balance_over == 'sequence'
    ):  # DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20; the mean over sequences and layers
        n = real.sum(2)
        f = arch.experts.n_experts / (arch.experts.experts_per_token * n) * (chosen * real).sum(2)
        balance = (f * (probability * real).sum(2) / n).sum(-1).mean()
    else:  # load_balancing_loss_func of Hugging Face's Mixtral: all layers and tokens in one
        n = real.sum() * router.shape[1]
        share, mean = (chosen * real).sum((0, 1, 2)) / n, (probability * real).sum((0, 1, 2)) / n
        balance = arch.experts.n_experts * (share * mean).sum()
    square = jax.nn.logsumexp(router, axis=-1) ** 2 * real[..., 0]
    return {
        'balance_loss': arch.experts.router.balance_loss * balance,
        'router_z_loss': arch.experts.router.z_loss * square.sum() / (real.sum() * router.shape[1]),
    }


def terms(w, batch, arch):
    """The terms of the loss that have a weight, by name."""
    found = {'nll': nll(w, batch, arch)}
    if arch.z_loss:
        found['z_loss'] = z_loss(w, batch, arch)
    if arch.experts.n_experts:
        weights = {'balance_loss': arch.experts.router.balance_loss, 'router_z_loss': arch.experts.router.z_loss}
        found |= {name: value for name, value in router_losses(w, batch, arch).items() if weights[name]}
    return found | (ahead_losses(w, batch, arch) if arch.multi_token.n_layers else {})


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
            decays = 'norm' not in name and not name.endswith(('bias', 'log_decay', 'skip'))
            return w - rate * (m / (jnp.sqrt(v) + self.eps) + decays * self.weight_decay * w)

        return jax.tree_util.tree_map_with_path(update, w, self.first, self.second)
