"""Layers with a state in PyTorch, for torch_llama.py: Mamba 2 and gated delta nets in chunks, in products of matrices.

They follow the PyTorch code in `transformers`, which copies a key to all of its heads; here, heads that share a key are
the columns of one product.

Letters: B batch, L length, M d_model, H heads, W width of a value, G key heads, R heads that share a key, S width of a
key, n chunks, C tokens of a chunk, J tokens that the convolution sees.
"""

# PyTorch is not a dependency of the project:
# pyright: reportMissingImports=false

import torch
from torch import nn
from torch.nn import functional

CHUNK = 64


def decays(decay):
    """From token j to token i [..., C, C], from before the chunk to i, and from i to its end, from their logarithms."""
    total = decay.cumsum(dim=-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(later, float('-inf')).exp()
    return pairs, total.exp(), (total[..., -1:] - total).exp()


class Recurrent(nn.Module):
    """Projections, the convolution of q, k and v, the scan of a subclass, and the projection of its result."""

    def __init__(self, w, eps):
        super().__init__()
        (_, self.G, self.S), (_, self.H, self.W) = w['linear_q'].shape, w['linear_v'].shape
        self.R, self.eps = self.H // self.G, eps
        names = [name for name in ('q', 'k', 'v', 'z', 'a', 'beta') if f'linear_{name}' in w]
        matrices = [w[f'linear_{name}'].flatten(1).T for name in names]
        self.sizes = [self.G * self.S * 2 + self.H * self.W, *(len(matrix) for matrix in matrices[3:])]
        self.project = nn.Parameter(torch.cat(matrices))
        self.kernel = nn.Parameter(torch.cat([w[f'linear_{name}_conv'].flatten(0, 1) for name in 'qkv']).T.contiguous())
        biases = [w[f'linear_{name}_conv_bias'].flatten() for name in 'qkv' if f'linear_{name}_conv_bias' in w]
        self.bias = nn.Parameter(torch.cat(biases)) if biases else None
        self.dt_bias, self.log_decay = nn.Parameter(w['linear_dt_bias']), nn.Parameter(w['linear_log_decay'])
        self.o = nn.Parameter(w['linear_o'].flatten(0, 1).T.contiguous())

    def forward(self, x):
        qkv, z, a, *beta = functional.linear(x, self.project).split(self.sizes, dim=-1)
        length, J = x.shape[1], len(self.kernel)
        padded = functional.pad(qkv, (0, 0, J - 1, 0))
        qkv = sum(padded[:, j : j + length] * self.kernel[j] for j in range(J))  # faster than conv1d, with its gradient
        qkv = functional.silu(qkv if self.bias is None else qkv + self.bias)
        q, k, v = qkv.split([self.G * self.S] * 2 + [self.H * self.W], dim=-1)
        q, k = (self.chunks(y.float(), self.S)[:, :, :, 0] for y in (q, k))  # [B, n, G, C, S]
        v = self.chunks(v.float(), self.W)
        step = functional.softplus(a.float() + self.dt_bias)
        decay, step, *beta = (self.chunks(y, 1)[..., 0] for y in (-self.log_decay.exp() * step, step, *beta))
        y = self.scan(q, k, v, decay, step, *beta).permute(0, 1, 4, 2, 3, 5).reshape(*z.shape[:2], self.H, self.W)
        return functional.linear(self.gate(y, functional.silu(z.float()).view_as(y)).flatten(2), self.o)

    def chunks(self, x, width):
        """[B, L, heads * width] -> [B, n, G, heads / G, C, width]"""
        return x.unflatten(1, (-1, CHUNK)).unflatten(-1, (self.G, -1, width)).permute(0, 1, 3, 4, 2, 5)


class StateSpace(Recurrent):
    """Mamba 2. Dao and Gu 2024, arXiv:2405.21060, section 6: q, k and v are C, B and x."""

    def __init__(self, w, eps):
        super().__init__(w, eps)
        self.skip, self.norm = nn.Parameter(w['linear_skip']), nn.Parameter(w['linear_group_norm'].flatten())

    def scan(self, q, k, v, decay, step):
        pairs, start, end = decays(decay)
        written = v * step[..., None]
        y = ((q @ k.mT)[:, :, :, None] * pairs) @ written  # [B, n, G, R, C, W]
        new = k.mT @ columns(written * end[..., None])  # [B, n, G, S, R W]
        whole = start[..., -1].repeat_interleave(self.W, dim=-1)[..., None, :]
        state, before = torch.zeros_like(new[:, 0]), []
        for i in range(new.shape[1]):
            before.append(state)
            state = state * whole[:, i] + new[:, i]
        read = (q @ torch.stack(before, 1)).unflatten(-1, (self.R, self.W)).transpose(3, 4)
        return y + read * start[..., None] + v * self.skip.view(self.G, self.R, 1, 1)

    def gate(self, y, z):
        y = (y * z).unflatten(2, (self.G, self.R)).flatten(3)
        return functional.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(2) * self.norm


class DeltaNet(Recurrent):
    """A gated delta net. Yang et al. 2024, arXiv:2412.06464, section 3.3."""

    def __init__(self, w, eps):
        super().__init__(w, eps)
        self.norm = nn.Parameter(w['linear_norm'])

    def scan(self, q, k, v, decay, step, beta):
        pairs, start, end = decays(decay)
        beta = beta.float().sigmoid()[..., None]
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * self.S**-0.5
        system = (k @ k.mT)[:, :, :, None] * pairs * beta
        scores = (q @ k.mT)[:, :, :, None] * pairs
        q, k = q[:, :, :, None], k[:, :, :, None]
        right = torch.cat([v, k * start[..., None]], dim=-1) * beta
        new, read = torch.linalg.solve_triangular(system.float(), right, upper=False, unitriangular=True).split(
            [self.W, self.S], dim=-1
        )
        queries, writing, whole = q * start[..., None], (k * end[..., None]).mT, start[..., -1, None, None]
        state, y = torch.zeros_like(writing[:, 0] @ new[:, 0]), []
        for i in range(new.shape[1]):
            own = new[:, i] - read[:, i] @ state
            y.append(queries[:, i] @ state + scores[:, i] @ own)
            state = state * whole[:, i] + writing[:, i] @ own
        return torch.stack(y, 1)

    def gate(self, y, z):
        return functional.rms_norm(y.float(), y.shape[-1:], self.norm, self.eps) * z


def columns(x):
    """[B, n, G, R, C, W] -> [B, n, G, C, R W]"""
    return x.transpose(3, 4).flatten(4)
