"""The PyTorch side of accelerator.py: runs one part with the same decoders in a process of its own, with JSON as input
and output.

It is written as a careful PyTorch user would write it for a GPU: f32 weights that are cast when they are used; a bf16
residual stream; one product for q, k and v, and one for gate and up; fused attention; fused AdamW; gradients set to
None; no value read from the device between steps. `compile` compiles the model with Inductor, in the mode `mode`.

Letters: B batch, L length, M d_model, H heads, D head, F feed-forward, V vocabulary.
"""

# PyTorch is not a dependency of the project:
# pyright: reportMissingImports=false

import json
import statistics
import sys
import time

import numpy as np
import torch
from laps import laps
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {'bf16': torch.bfloat16, 'f32': torch.float32}
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # in this order of preference
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


class Linear(nn.Linear):
    """A linear layer in the dtype of its input, with weights in f32."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return functional.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RMSNorm(nn.Module):
    def __init__(self, M, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(M)), eps

    def forward(self, x):
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), of GPT-2 or of Llama."""

    def __init__(self, M, H, F, gpt2):
        super().__init__()
        self.heads, self.gpt2 = H, gpt2
        norm = (lambda: LayerNorm(M, eps=1e-5)) if gpt2 else (lambda: RMSNorm(M, 1e-5))
        self.norm1, self.norm2 = norm(), norm()
        self.qkv, self.o = Linear(M, 3 * M, bias=gpt2), Linear(M, M, bias=gpt2)
        self.up, self.down = Linear(M, F if gpt2 else 2 * F, bias=gpt2), Linear(F, M, bias=gpt2)

    def forward(self, x, turn):
        B, L, M = x.shape
        q, k, v = (y.view(B, L, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(M, dim=2))
        if turn is not None:
            q, k = rotated(q, turn), rotated(k, turn)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, L, M))
        h = self.up(self.norm2(x))
        if self.gpt2:
            return x + self.down(functional.gelu(h, approximate='tanh'))
        gate, up = h.chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def rotated(x, turn):
    """Rotates the pair (i, i + D/2) of each head by its angle. Su et al. 2021, arXiv:2104.09864."""
    cos, sin = turn
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """GPT-2 (Radford et al. 2019) or Llama (Touvron et al. 2023), with tied embeddings."""

    def __init__(self, spec):
        super().__init__()
        model, L = spec['model'], spec['length']
        M, H = model['d_model'], model['n_heads']
        gpt2 = model['family'] == 'gpt2'
        self.dtype, F = DTYPES[spec['compute']], model.get('d_ff', 4 * M)
        self.embed = nn.Embedding(spec['vocab_size'], M)
        self.positions = nn.Embedding(L, M) if gpt2 else None
        self.layers = nn.ModuleList(Block(M, H, F, gpt2) for _ in range(model['n_layers']))
        self.norm = LayerNorm(M, eps=1e-5) if gpt2 else RMSNorm(M, 1e-5)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
        if not gpt2:
            half = M // H // 2
            angle = torch.arange(L)[:, None] * 10000.0 ** (-torch.arange(half) / half)
            self.register_buffer('cos', angle.cos())
            self.register_buffer('sin', angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens).to(self.dtype)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]].to(self.dtype)
        turn = None if self.positions is not None else (self.cos, self.sin)
        for layer in self.layers:
            x = layer(x, turn)
        logits = functional.linear(self.norm(x), self.embed.weight.to(x.dtype))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load(model, w):
    """Copies weights that pretrax initialized: one array per name, with stacked layers."""

    def put(parameter, value):
        assert parameter.shape == value.shape, (parameter.shape, value.shape)
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    M = w['embed'].shape[1]
    put(model.embed.weight, w['embed'])
    put(model.norm.weight, w['norm'])
    gpt2 = model.positions is not None
    if gpt2:
        put(model.positions.weight, w['positions'])
        put(model.norm.bias, w['norm_bias'])
    for i, layer in enumerate(model.layers):
        of = {name.removeprefix('layers.'): value[i] for name, value in w.items() if name.startswith('layers.')}
        put(layer.norm1.weight, of['norm1'])
        put(layer.norm2.weight, of['norm2'])
        put(layer.qkv.weight, np.concatenate([of[name].reshape(M, M).T for name in 'qkv']))
        put(layer.o.weight, of['o'].reshape(M, M).T)
        put(layer.up.weight, of['up'].T if gpt2 else np.concatenate([of['gate'].T, of['up'].T]))
        put(layer.down.weight, of['down'].T)
        if gpt2:
            put(layer.norm1.bias, of['norm1_bias'])
            put(layer.norm2.bias, of['norm2_bias'])
            put(layer.qkv.bias, np.concatenate([of[f'{name}_bias'].reshape(M) for name in 'qkv']))
            for name in ('o', 'up', 'down'):
                put(getattr(layer, name).bias, of[f'{name}_bias'])


def run(spec):
    if spec['kind'] == 'device':
        return {
            'device': torch.cuda.get_device_name() if DEVICE == 'cuda' else 'cpu',
            'versions': {'torch': torch.__version__, 'python (torch)': sys.version.split()[0]},
        }
    torch.manual_seed(0)
    inputs = np.load(spec['inputs']) if spec.get('inputs') else None
    with torch.device(DEVICE):
        model = Decoder(spec)
    if inputs is not None:
        load(model, {name.removeprefix('weights.'): inputs[name] for name in inputs.files if '.' in name})
    training = spec['training']
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{'params': decayed, 'weight_decay': training['weight_decay']}, {'params': rest, 'weight_decay': 0.0}],
        lr=training['learning_rate'], betas=(training['b1'], training['b2']), eps=training['eps'], fused=True,
    )  # fmt: skip
    forward = torch.compile(model, mode=spec.get('mode')) if spec.get('compile') else model
    batches, passes = batches_of(spec, inputs), spec.get('passes', 1)

    allowed = FUSED if DEVICE == 'cuda' and spec['compute'] == 'bf16' else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]

    def step(number):
        tokens, targets = batches[number % len(batches)]
        total = torch.zeros((), device=DEVICE)
        with sdpa_kernel(allowed, set_priority=True):
            for micro in zip(tokens.chunk(passes), targets.chunk(passes), strict=True):
                loss = forward(*micro) / passes
                loss.backward()
                total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training['clip_norm'])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    if spec['kind'] == 'check':
        return {'losses': [step(number).item() for number in range(spec['steps'])]}
    start = time.perf_counter()
    first = step(0).item()
    compiling = time.perf_counter() - start

    def steps(count):
        losses = [step(number) for number in range(count)]
        losses[-1].item()

    found = laps(steps, spec['seconds'])
    median = statistics.median(found)
    return {
        'tokens_per_second': spec['rows'] * spec['length'] / median, 'step_seconds': median,
        'spread': (max(found) - min(found)) / median, 'laps': len(found), 'compile_seconds': compiling,
        'first_loss': first, 'peak_bytes': torch.cuda.max_memory_allocated() if DEVICE == 'cuda' else 0,
    }  # fmt: skip


def batches_of(spec, inputs):
    """The batches that pretrax trains on, or random ones of the same shape, on the device before timing starts."""
    if inputs is not None:
        pairs = zip(inputs['tokens'], inputs['targets'], strict=True)
    else:
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, spec['vocab_size'], (spec['rows'], spec['length'] + 1)) for _ in range(8)]
        pairs = ((tokens[:, :-1], tokens[:, 1:]) for tokens in rows)
    return [tuple(torch.from_numpy(np.ascontiguousarray(x)).long().to(DEVICE) for x in pair) for pair in pairs]


if __name__ == '__main__':
    print(json.dumps(run(json.loads(sys.argv[1]))))
