"""FLOPs and memory traffic of one instruction of a compiled program."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from pretrax.hlo.parse import KINDS, Instruction, bytes_of

CONTROL = {'while', 'call', 'conditional'}  # instructions that run other computations
# Instructions that only name, pack or wait for arrays.
PLUMBING = {
    'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'replica-id', 'iota',
    'async-update',
    'async-done', 'copy-done', 'all-gather-done', 'all-reduce-done', 'collective-permute-done', 'send-done',
    'recv-done',
    'reduce-scatter-done', 'all-to-all-done', 'fusion-done', 'slice-done', 'call-done', 'call-update',
}  # fmt: skip
FREE = PLUMBING | CONTROL | {'parameter'}  # instructions that run no kernel
_ON_CHIP = re.compile(r'\w+\[[\d,]*\]\{[^{}]*S\([1-9]\)[^{}]*\}')
_SPLASH = re.compile(r'splash_mha_(fwd|dkv|dq)')
_SLICES = {'slice', 'dynamic-slice', 'gather'}
_HOLDING = {'all-gather-start', 'collective-permute-start', 'copy-start'}  # their results contain their operands too


def bodies(one: Instruction) -> list[str]:
    """Names of the computations that run inside an instruction, in registers."""
    if one.operation in CONTROL:
        return []
    return re.findall(r'(?:calls|to_apply)=%?([\w.\-]+)', one.rest)


def inside(one: Instruction, computations: Mapping[str, list[Instruction]]) -> list[Instruction]:
    """The instructions that run inside another one, in registers."""
    return [x for called in bodies(one) for x in computations.get(called, ())]


def flops_with_contents(one: Instruction, types: Mapping[str, str], contents: Sequence[Instruction]) -> float:
    """`flops_of` an instruction and of its contents, as `inside` gives them."""
    types_inside = {x.name: x.result for x in contents}
    return flops_of(one, types) + sum(flops_of(x, types_inside) for x in contents)


def products_in(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The instructions that may be products. They identify the source of a fusion best."""
    return [one for one in instructions if one.operation in ('dot', 'convolution', 'custom-call')]


def flops_of(one: Instruction, types: Mapping[str, str]) -> float:
    """FLOPs of a product, a convolution or fused attention; 0 for other instructions.

    Fused attention: Dao 2023, arXiv:2307.08691: 2 products forward, 5 backward, half if causal. On TPUs the backward
    pass has 7 in two kernels, `jax.experimental.pallas.ops.tpu.splash_attention`, whose masks are causal here.

    Args:
        one: the instruction.
        types: the type of each instruction in its computation.
    """
    operands = one.operands
    if one.operation == 'convolution':
        return _flops_of_convolution(one, types)
    if one.operation == 'custom-call' and (splash := _SPLASH.match(one.name)):
        products = {'fwd': 2, 'dkv': 4, 'dq': 3}[splash[1]]
        constraints = one.rest.partition('operand_layout_constraints=')[2]
        queries, keys = (dims(array) for array in re.findall(r'(?:bf16|f32)\[[\d,]+\]', constraints)[:2])
        return products * 0.5 * 2 * math.prod(queries) * keys[-2]
    if one.operation == 'custom-call' and '__cudnn$fmha' in one.rest:
        score = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', one.rest)
        if score is None or operands[0] not in types:
            return 0.0
        width = dims(types[operands[0]])[-1]
        causal = 0.5 if 'CAUSAL' in one.rest else 1.0
        products = 5 if 'Backward' in one.rest else 2
        return products * causal * 2 * width * math.prod(int(n) for n in re.findall(r'\d+', score[1]))
    if one.operation == 'custom-call' and re.search('/experts/pallas_call|cudnn.blockScaledDot', one.rest):
        return 2.0 * math.prod(dims(types[operands[0]])) * dims(one.result)[-1]
    if one.operation == 'dot':
        summed = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', one.rest)
    elif one.operation == 'custom-call' and re.search(r'custom_call_target="__cublas', one.rest):
        summed = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', one.rest)
    elif one.operation == 'custom-call' and (
        written := re.search(r'"cost_estimate":\s*\{"flops":\s*"?(\d+)', one.rest)
    ):
        return float(written[1])  # of a Pallas kernel, by its author
    else:
        return 0.0
    if summed is None or operands[0] not in types:
        return 0.0
    left = dims(types[operands[0]])
    return 2.0 * math.prod(dims(one.result)) * math.prod(left[int(n)] for n in re.findall(r'\d+', summed[1]))


def _flops_of_convolution(one: Instruction, types: Mapping[str, str]) -> float:
    """Two per multiplication of real values: padding and dilation do not count.
    XLA for TPUs writes products this way.
    """
    labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', one.rest)
    if labels is None or any(name not in types for name in one.operands[:2]):
        return 0.0
    left, right = (dims(types[name]) for name in one.operands[:2])
    out, window = dims(one.result), re.search(r'window=\{([^}]*)\}', one.rest)
    of_left, of_right, of_out = (
        dict(zip(label, sizes, strict=False)) for label, sizes in zip(labels.groups(), (left, right, out), strict=True)
    )
    places = 1
    for number, dimension in enumerate(sorted(d for d in of_out if d.isdigit())):
        field = {
            key: _fields(window[1] if window else '', key, number)
            for key in ('stride', 'pad', 'lhs_dilate', 'rhs_dilate')
        }
        stride, before = int(field['stride'] or 1), int((field['pad'] or '0').split('_')[0])
        spread, gap = int(field['lhs_dilate'] or 1), int(field['rhs_dilate'] or 1)
        last = (of_left[dimension] - 1) * spread
        place = np.arange(of_out[dimension])[:, None] * stride + np.arange(of_right[dimension]) * gap - before
        places *= int(np.sum((place >= 0) & (place <= last) & (place % spread == 0)))
    groups = re.search(r'batch_group_count=(\d+)', one.rest)
    return 2.0 * places * of_left['b'] / int(groups[1] if groups else 1) * of_right['i'] * of_right['o']


def _fields(window: str, key: str, number: int) -> str:
    """One dimension of a field of a window, such as 'pad=0_0x1_1'."""
    found = re.search(rf'(?<!\w){key}=([\w\-]+)', window)
    return found[1].split('x')[number] if found else ''


def traffic_of(
    one: Instruction, types: Mapping[str, str], computations: Mapping[str, list[Instruction]]
) -> tuple[float, float]:
    """Bytes that a kernel reads and writes. A slice counts only itself, and an update in place only the update."""
    operands, result = one.operands, _first(one)
    if one.operation == 'async-start':
        contents = inside(one, computations)
        inner_types = {x.name: x.result for x in contents}
        parts = [traffic_of(x, inner_types, computations) for x in contents if x.operation not in FREE]
        return sum(read for read, _ in parts), sum(written for _, written in parts)
    if one.operation in _HOLDING:
        read = sum(bytes_of(types.get(name, ''), '') for name in operands)
        return read, bytes_of(re.sub(r'[su]32\[\]', '', one.result), '') - read
    if one.operation in _SLICES:
        return result, result
    if one.operation == 'dynamic-update-slice':
        update = bytes_of(types.get(operands[1], ''), '')
        return update, update
    called = bodies(one) if one.operation in ('fusion', 'fusion-start') else []
    if not called or not computations.get(called[0]):
        return sum(bytes_of(types.get(name, ''), '') for name in operands), result
    body = computations[called[0]]
    if one.operation == 'fusion-start':
        result = bytes_of(body[-1].result, '')
    inner, read = {x.name: x for x in body}, 0.0
    parameters = {x.name: int(x.rest.split(')')[0]) for x in body if x.operation == 'parameter'}
    users: dict[str, list[Instruction]] = defaultdict(list)
    renamed: dict[str, str] = {}  # bitcasts of parameters
    for x in body:
        sources = [renamed.get(name, name) for name in x.operands]
        if x.operation == 'bitcast' and sources[0] in parameters and x is not body[-1]:
            renamed[x.name] = sources[0]
            continue
        for name in sources:
            users[name].append(x)

    def all_of(uses: list[Instruction], operations: Container[str], parameter: str) -> bool:
        return all(x.operation in operations and renamed.get(x.operands[0], x.operands[0]) == parameter for x in uses)

    for parameter, index in parameters.items():
        uses = users[parameter]
        whole = bytes_of(inner[parameter].result, '')
        if uses and all(x is body[-1] or x.operation in KINDS for x in uses) and body[-1].operation == 'tuple':
            # Passed on, beside the work of the fusion: a collective on a TPU that is under way.
            result -= whole if body[-1] in uses else 0
        elif uses and all_of(uses, (*_SLICES, 'dynamic-update-slice'), parameter):
            updates = [bytes_of(inner[x.operands[1]].result, '') for x in uses if x.operation not in _SLICES]
            read += sum(_first(x) for x in uses if x.operation in _SLICES)
            result += sum(updates) - whole if updates else 0
        elif index < len(operands):
            read += whole
    if body[-1].operation == 'tuple':
        result -= sum(bytes_of(inner[name].result, '') for name in body[-1].operands if inner[name].operation in KINDS)
    return read, max(result, 0.0)


def in_main_memory(computations: Mapping[str, list[Instruction]]) -> dict[str, list[Instruction]]:
    """A program for a TPU without the arrays that stay in its on-chip memory (a layout with `S(1)` or higher)."""
    return {
        name: [dataclasses.replace(one, result=_ON_CHIP.sub('', one.result)) for one in body]
        for name, body in computations.items()
    }


def dims(result: str) -> list[int]:
    """Dimensions of the first array of a type."""
    found = re.search(r'\[([\d,]*)\]', result)
    return [int(n) for n in found[1].split(',') if n] if found else []


def _first(one: Instruction) -> float:
    """Bytes of the results, without the workspace of a library."""
    return bytes_of(re.sub(r'[su]8\[\d+\]\{0\}', '', one.result) if one.operation == 'custom-call' else one.result, '')
