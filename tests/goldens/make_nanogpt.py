"""Writes the losses of nanoGPT's form of a tiny GPT-2, for a test that needs no PyTorch.

The model and its training are written after nanoGPT (Karpathy 2022, github.com/karpathy/nanoGPT, model.py and
train.py): fused c_attn, tied head, Linear and Embedding weights in the layout of PyTorch, AdamW with one group of
parameters that decay (two dimensions and more, embeddings included) and one of those that do not, clipping, and linear
warm-up before a cosine. The steps are those at which pretrax reaches the peak and the last rate. The activation is GELU
with tanh, as in GPT-2; `erf` is what nanoGPT's newer versions use, and shows how far another choice moves the losses.

Run by hand, in the environment of make_goldens.py:

    ENV/bin/python tests/goldens/make_nanogpt.py

nanogpt.safetensors: NAME f32 of every initial weight, by nanoGPT's names; tokens i32[STEPS, B, L+1];
losses.tanh f32[STEPS], losses.erf f32[STEPS], grad_norms.tanh f32[STEPS] before clipping.
"""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

HERE = Path(__file__).parent
VOCAB, WIDTH, HEADS, LAYERS, LENGTH, ROWS, STEPS = 64, 24, 3, 2, 16, 8, 20
RATE, WARMUP, DECAY_STEPS, MIN_RATE = 1e-2, 4, STEPS - 1, 1e-3
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(torch.ones(T, T).tril()[None, None] == 0, float('-inf'))
        y = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu = nn.GELU(approximate)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP(approximate)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block(approximate) for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return functional.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def initialize(model):
    """Wider than nanoGPT's normal(0.02), and biases are not zero, so that every part is seen in the first losses."""
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            nn.init.normal_(weight, std=0.05 if 'wte' in name or 'wpe' in name else 0.3)
        else:
            nn.init.normal_(weight, mean=float('ln_' in name and name.endswith('weight')), std=0.2)


def rate_of(step):
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    along = (step - WARMUP) / (DECAY_STEPS - WARMUP)
    return MIN_RATE + 0.5 * (1 + math.cos(math.pi * along)) * (RATE - MIN_RATE)


def train(approximate, initial, tokens):
    model = GPT(approximate)
    model.load_state_dict(initial)
    parameters = list(model.parameters())
    groups = [
        {'params': [p for p in parameters if p.dim() >= 2], 'weight_decay': WEIGHT_DECAY},
        {'params': [p for p in parameters if p.dim() < 2], 'weight_decay': 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8)
    losses, norms = [], []
    for step, rows in enumerate(tokens):
        for group in optimizer.param_groups:
            group['lr'] = rate_of(step)
        loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, CLIP))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms)


if __name__ == '__main__':
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    first = GPT('tanh')
    initialize(first)
    initial = {name: value.clone() for name, value in first.state_dict().items()}
    rng = np.random.default_rng(0)
    starts = rng.integers(0, VOCAB, (STEPS, ROWS, 1))
    tokens = (starts + np.cumsum(rng.integers(1, 4, (STEPS, ROWS, LENGTH + 1)), axis=-1)) % VOCAB  # something to learn
    tokens = torch.from_numpy(tokens)
    found = {**initial, 'tokens': tokens.int()}
    for approximate in ('tanh', 'none'):
        losses, norms = train(approximate, initial, tokens)
        name = 'erf' if approximate == 'none' else approximate
        found |= {f'losses.{name}': losses, f'grad_norms.{name}': norms}
        print(name, losses.tolist())
        print(norms.tolist())
    save_file({name: value.contiguous() for name, value in found.items()}, HERE / 'nanogpt.safetensors')
    (HERE / 'nanogpt.safetensors').chmod(0o644)
