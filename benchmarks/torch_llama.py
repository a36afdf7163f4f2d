"""Llama, Mixtral, Mamba 2 and delta nets in PyTorch, for torch_gpt2.py, as a careful user would write them for a CPU.

Letters: B batch, L length, M d_model, H heads, K key/value heads, D head, F feed-forward, E experts, V vocabulary.
"""

# PyTorch is not a dependency of the project:
# pyright: reportMissingImports=false

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch_recurrent import DeltaNet, StateSpace


def rotate(x, cos, sin):
    """Rotary positions of [B, H, L, D]. Su et al. 2021, arXiv:2104.09864, with the halves of a head as pairs."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class FeedForward(nn.Module):
    """(silu(x W_gate) * x W_up) W_down."""

    def __init__(self, w):
        super().__init__()
        self.gate_up = nn.Parameter(torch.cat([w['gate'].T, w['up'].T]))
        self.down = nn.Parameter(w['down'].T.contiguous())

    def forward(self, x):
        gate, up = functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down)


class Experts(nn.Module):
    """Each token has the two likeliest experts. Their tokens are sorted, so that an expert multiplies once."""

    def __init__(self, w):
        super().__init__()
        self.router = nn.Parameter(w['router'].T.contiguous())
        names = {'gate': 'expert_gate', 'up': 'expert_up', 'down': 'expert_down'}
        each = [{name: w[of][e] for name, of in names.items()} for e in range(len(w['expert_gate']))]
        self.experts = nn.ModuleList(map(FeedForward, each))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = functional.linear(flat.float(), self.router).softmax(dim=-1).topk(2, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        rows = flat[order // 2].split(chosen.flatten().bincount(minlength=len(self.experts)).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        results = results * weight.flatten()[order, None]
        return torch.zeros_like(flat, dtype=results.dtype).index_add(0, order // 2, results).view(x.shape)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys."""

    def __init__(self, w, length, rope_base):
        super().__init__()
        _, self.heads, self.width = w['q'].shape
        self.kv_heads = w['k'].shape[1]
        self.qkv = nn.Parameter(torch.cat([w[name].flatten(1).T for name in 'qkv']))
        self.o = nn.Parameter(w['o'].flatten(0, 1).T.contiguous())
        angle = torch.outer(torch.arange(length), rope_base ** (-torch.arange(0, self.width, 2) / self.width))
        self.register_buffer('cos', angle.cos())
        self.register_buffer('sin', angle.sin())

    def forward(self, x):
        B, L, _ = x.shape
        sizes = [n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)]
        qkv = functional.linear(x, self.qkv).split(sizes, dim=-1)
        q, k, v = (y.view(B, L, -1, self.width).transpose(1, 2) for y in qkv)
        q, k = (rotate(y, self.cos, self.sin).to(v.dtype) for y in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return functional.linear(y.transpose(1, 2).reshape(B, L, -1), self.o)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x)), which Mamba 2 does not have."""

    def __init__(self, w, length, settings):
        super().__init__()
        self.eps, self.norm1 = settings['norm_eps'], nn.Parameter(w['norm1'])
        if 'q' in w:
            self.mixer = Attention(w, length, settings['rope_base'])
        else:
            self.mixer = (DeltaNet if 'linear_beta' in w else StateSpace)(w, self.eps)
        if 'norm2' in w:
            self.norm2 = nn.Parameter(w['norm2'])
            self.mlp = Experts(w) if 'router' in w else FeedForward(w)

    def forward(self, x):
        x = x + self.mixer(functional.rms_norm(x, x.shape[-1:], self.norm1, self.eps))
        if not hasattr(self, 'mlp'):
            return x
        return x + self.mlp(functional.rms_norm(x, x.shape[-1:], self.norm2, self.eps))


class Llama(nn.Module):
    """Llama (Touvron et al. 2023), or another of these, with weights that pretrax initialized: stacked, [in, out]."""

    def __init__(self, weights, length, settings):
        super().__init__()
        w = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()}
        of_layers = {name.split('.')[-1]: x for name, x in w.items() if name.startswith('layers.')}
        each = [{name: x[i].clone() for name, x in of_layers.items()} for i in range(settings['n_layers'])]
        self.layers = nn.ModuleList(Block(of_layer, length, settings) for of_layer in each)
        self.embed, self.norm, self.head = (nn.Parameter(w[name]) for name in ('embed', 'norm', 'unembed'))
        self.eps = settings['norm_eps']

    def forward(self, tokens, targets):
        x = functional.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(functional.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.head)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
