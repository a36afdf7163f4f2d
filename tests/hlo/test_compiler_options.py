"""Which options of XLA are set where, by hardware, mesh and model."""

import collections
import itertools
from pathlib import Path

import pytest

from pretrax.hlo.compiler_options import (
    TABLE,
    CompilerOption,
    Situation,
    by_reason,
    choose_options,
    hardware_of,
    wrong_hardware,
)
from pretrax.model.axes import AXES

HARDWARE = ('v4', 'v5e', 'v5p', 'v6e', 'tpu7x', 'gpu', 'cpu')


def situation(hardware: str, slices: int = 1, **mesh: int) -> Situation:
    return Situation(hardware, dict.fromkeys(AXES, 1) | mesh, slices)


def names(*arguments, **keywords) -> set[str]:
    return {option.name for option in choose_options(situation(*arguments, **keywords))}


@pytest.mark.parametrize('hardware', HARDWARE)
def test_all_collectives_run_on_sparse_cores_only_where_they_can(hardware):
    offloaded = {name for name in names(hardware, d=64) if 'sparse_core' in name}
    assert (len(offloaded) >= 4) == (hardware in ('v5p', 'v6e', 'tpu7x'))


@pytest.mark.parametrize('axis', AXES)
def test_gpus_hide_communication_over_every_axis(axis):
    assert 'xla_gpu_enable_latency_hiding_scheduler' in names('gpu', **{axis: 8})
    assert not names('gpu')


@pytest.mark.parametrize('mesh', [{}, {'d': 8}, {'r': 2, 'd': 4, 't': 2}])
def test_a_cpu_uses_its_widest_vectors_on_every_mesh(mesh):
    assert names('cpu', **mesh) == {'xla_cpu_prefer_vector_width'}


def test_a_single_tpu_has_no_collectives_to_change():
    assert not {name for hardware in HARDWARE for name in names(hardware) if 'gather' in name or 'scatter' in name}


def test_options_are_for_platforms_that_have_them():
    known = {hardware: f'xla_{hardware if hardware in ("gpu", "cpu") else "tpu"}_' for hardware in HARDWARE}
    assert {hardware for option in TABLE for hardware in option.hardware} <= set(known)
    other = ('xla_gpu_', 'xla_tpu_', 'xla_cpu_')
    assert not [
        (option.name, hardware)
        for option in TABLE
        for hardware in option.hardware
        if option.name.startswith(other) and not option.name.startswith(known[hardware])
    ]


def test_no_run_has_two_values_for_an_option():
    meshes = [
        {},
        {'d': 8},
        {'r': 2, 'd': 8},
        {'d': 8, 't': 4},
        {'e': 8},
        {'p': 4, 'd': 8},
        {'t': 8},
        {'c': 4},
        {'r': 2},
    ]
    for hardware, slices, mesh in itertools.product(HARDWARE, (1, 2), meshes):
        counts = collections.Counter(o.name for o in choose_options(situation(hardware, slices, **mesh)))
        assert not [name for name, n in counts.items() if n > 1], (hardware, slices, mesh)


def test_each_condition_of_a_row_counts():
    row = CompilerOption('xla_a', 1, ('v5e',), 'why', 'how', axes='de', slices=True)
    assert row.suits(situation('v5e', slices=2, d=4))
    assert row.suits(situation('v5e', slices=2, e=4))
    for other in (situation('v5p', slices=2, d=4), situation('v5e', d=4), situation('v5e', slices=2, t=4)):
        assert not row.suits(other)
    assert row.where() == 'v5e; d or e > 1; several slices or nodes'


@pytest.mark.parametrize(
    ('platform', 'kind', 'hardware'),
    [
        ('tpu', 'TPU v4', 'v4'), ('tpu', 'TPU v5 lite', 'v5e'), ('tpu', 'TPU v5', 'v5p'), ('tpu', 'TPU v5p', 'v5p'),
        ('tpu', 'TPU v6 lite', 'v6e'), ('tpu', 'TPU7x', 'tpu7x'), ('tpu', 'TPU v99', 'tpu'), ('cpu', 'cpu', 'cpu'),
        ('gpu', 'NVIDIA H100 80GB HBM3', 'gpu'), ('cuda', 'NVIDIA H100 80GB HBM3', 'gpu'), ('METAL', 'Apple', 'METAL'),
    ],
)  # fmt: skip
def test_hardware_by_the_names_of_jax(platform, kind, hardware):
    assert hardware_of(platform, kind) == hardware


@pytest.mark.parametrize(
    ('name', 'hardware', 'why'),
    [
        ('xla_gpu_enable_triton_gemm', 'v5p', 'for GPUs'), ('xla_tpu_scoped_vmem_limit_kib', 'gpu', 'for TPUs'),
        ('xla_cpu_enable_fast_math', 'v6e', 'for CPUs'), ('xla_sc_disable_megacore_partitioning', 'v5e', 'SparseCores'),
    ],
)  # fmt: skip
def test_an_option_for_other_hardware_is_seen(name, hardware, why):
    assert why in str(wrong_hardware(name, hardware))
    assert wrong_hardware('xla_enable_async_all_gather', hardware) is None


def test_the_page_has_the_table():
    rows = []
    for group in by_reason(TABLE):
        first, options = group[0], ', '.join(f'`{one}`' for one in group)
        rows.append(f'| {options} | {first.where()} | {first.reason} | {first.evidence} |')
    page = (Path(__file__).parents[2] / 'docs' / 'scaling.md').read_text()
    section = page.partition('\n## Compiler options\n')[2].partition('\n## ')[0]
    found = [line for line in section.splitlines() if line.startswith('| `')]
    assert found == rows, 'the table should be\n' + '\n'.join(rows)
