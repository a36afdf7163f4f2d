"""The value that a refusal suggests is not refused next."""

import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from decoders import decoder_options
from pretrax.config.batch import check_batch
from pretrax.config.schema import Batch
from pretrax.model.architecture import resolve
from pretrax.model.context import choose_context
from pretrax.model.pipeline_schedule import PipelineSchedule, _check_layers
from small import LLAMA

SUGGESTED = re.compile(r'^use ([a-z_.]+)=(\d+)', re.MULTILINE)


def refusal(options, batch, mesh):
    """The first refusal of the arithmetic checks, in the order in which a run makes them; None: the run may begin."""
    try:
        check_batch(Batch.model_validate(batch), mesh)
        arch = resolve(decoder_options(**options), 100, batch['sequence_length'])
        arch.check_mesh(mesh, batch['sequence_length'])
        choose_context('auto', arch, mesh, batch['sequence_length'])
        if mesh['p'] > 1:
            _check_layers(PipelineSchedule(mesh['p'], 1, 4), arch)
    except ValueError as error:  # a UserError, also within an error of pydantic
        return str(error)
    return None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12]), kv_heads=st.integers(1, 12), d_ff=st.integers(1, 50),
    layers=st.integers(1, 8), experts=st.sampled_from([0, 2, 3, 4, 6]), length=st.integers(1, 48),
    sequences=st.integers(1, 12), micro=st.sampled_from([None, 1, 2, 3]), d=st.integers(1, 4),
    axis=st.sampled_from('dectp'), size=st.integers(2, 12),
)  # fmt: skip
def test_a_few_fixes_lead_to_a_valid_run(
    heads, kv_heads, d_ff, layers, experts, length, sequences, micro, d, axis, size
):
    options = LLAMA | {'n_heads': heads, 'n_kv_heads': kv_heads, 'd_model': 8 * heads, 'd_ff': d_ff, 'n_layers': layers}
    if experts:
        options |= {'n_experts': experts, 'experts_per_token': 1}
    elif axis == 'e':
        axis = 't'  # a model without experts is told to use another axis
    batch = {'tokens': sequences * length, 'sequence_length': length, 'micro': min(micro, sequences) if micro else None}
    mesh = dict.fromkeys('rdectp', 1) | {'d': d, axis: size}
    n_devices = math.prod(mesh.values())
    keys = []
    while message := refusal(options, batch, mesh):
        [(key, value)] = SUGGESTED.findall(message)
        assert key not in keys[-1:], f'{keys[-1:]} was just changed as suggested: {message}'
        assert not key.startswith('mesh.') or key not in keys, f'{keys}: {message}'
        keys.append(key)
        section, _, name = key.rpartition('.')
        {'mesh': mesh, 'batch': batch}.get(section, options)[name] = int(value)
        if section == 'mesh':
            rest, left = divmod(n_devices, math.prod(mesh.values()) // mesh['r'])  # the axis r takes the other devices
            assert not left, message
            mesh['r'] = rest
    assert len(keys) <= 5, keys
