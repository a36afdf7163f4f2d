"""The PyTorch side of cpu.py: trains the same model in turns. It needs a Python with PyTorch.

It is written as a careful PyTorch user would write it for a CPU: one product for q, k and v, fused attention, fused
AdamW, gradients set to None. It reads numbers of seconds from standard input, one per line, trains that long, and
answers each with a line of JSON.

Letters: B batch, L length, M d_model, H heads, V vocabulary.
"""

# PyTorch is not a dependency of the project:
# pyright: reportMissingImports=false

import argparse
import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch_llama import Llama


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, M, H):
        super().__init__()
        self.heads = H
        self.norm1, self.qkv, self.o = nn.LayerNorm(M), nn.Linear(M, 3 * M), nn.Linear(M, M)
        self.norm2, self.up, self.down = nn.LayerNorm(M), nn.Linear(M, 4 * M), nn.Linear(4 * M, M)

    def forward(self, x):
        B, L, M = x.shape
        q, k, v = (y.view(B, L, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(M, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, L, M))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate='tanh'))


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019), with tied embeddings."""

    def __init__(self, V, L, M, H, n_layers):
        super().__init__()
        self.embed, self.positions = nn.Embedding(V, M), nn.Embedding(L, M)
        self.layers = nn.ModuleList(Block(M, H) for _ in range(n_layers))
        self.norm = nn.LayerNorm(M)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.embed.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load(model, w):
    """Copies weights that pretrax initialized: one array per name, with stacked layers."""

    def put(parameter, value):
        assert parameter.shape == value.shape, (parameter.shape, value.shape)
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    M = w['embed'].shape[1]
    put(model.embed.weight, w['embed'])
    put(model.positions.weight, w['positions'])
    put(model.norm.weight, w['norm'])
    put(model.norm.bias, w['norm_bias'])
    for i, layer in enumerate(model.layers):
        of = {name.removeprefix('layers.'): value[i] for name, value in w.items() if name.startswith('layers.')}
        for name, module in (('norm1', layer.norm1), ('norm2', layer.norm2)):
            put(module.weight, of[name])
            put(module.bias, of[f'{name}_bias'])
        put(layer.qkv.weight, np.concatenate([of[name].reshape(M, M).T for name in 'qkv']))
        put(layer.qkv.bias, np.concatenate([of[f'{name}_bias'].reshape(M) for name in 'qkv']))
        put(layer.o.weight, of['o'].reshape(M, M).T)
        put(layer.up.weight, of['up'].T)
        put(layer.down.weight, of['down'].T)
        for name in ('o', 'up', 'down'):
            put(getattr(layer, name).bias, of[f'{name}_bias'])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('inputs')
    parser.add_argument('--threads', type=int, required=True)
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--bf16', action='store_true')
    parser.add_argument('--cpu-time', action='store_true', help='answer with seconds of the processor')
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    inputs = np.load(arguments.inputs)
    weights = {name.removeprefix('weights.'): inputs[name] for name in inputs.files if name.startswith('weights.')}
    settings = json.loads(str(inputs['settings']))
    pairs = zip(inputs['tokens'], inputs['targets'], strict=True)
    batches = [(torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()) for tokens, targets in pairs]
    if settings['family'] == 'gpt2':
        V, M = weights['embed'].shape
        model = GPT2(V, weights['positions'].shape[0], M, settings['n_heads'], settings['n_layers'])
        load(model, weights)
    else:
        model = Llama(weights, inputs['tokens'].shape[-1], settings)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{'params': decayed, 'weight_decay': settings['weight_decay']}, {'params': rest, 'weight_decay': 0.0}],
        lr=settings['learning_rate'], betas=(settings['b1'], settings['b2']), eps=settings['eps'], fused=True,
    )  # fmt: skip
    forward = torch.compile(model) if arguments.compile else model

    def step(number):
        tokens, targets = batches[number % len(batches)]
        with torch.autocast('cpu', torch.bfloat16, enabled=arguments.bf16):
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings['clip_norm'])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    losses = [step(number) for number in range(settings['checked_steps'])]
    versions = {'torch': torch.__version__, 'python': sys.version.split()[0]}
    print(json.dumps({'losses': losses, 'versions': versions}), flush=True)
    number = len(losses)
    for line in sys.stdin:
        start, before, first = time.perf_counter(), time.process_time(), number
        while (seconds := time.perf_counter() - start) < float(line):
            step(number)
            number += 1
        seconds = time.process_time() - before if arguments.cpu_time else seconds
        print(json.dumps({'steps': number - first, 'seconds': seconds}), flush=True)


if __name__ == '__main__':
    main()
