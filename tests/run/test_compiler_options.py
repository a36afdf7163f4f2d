"""Options reach XLA, are refused in words before the step is compiled, and are recorded."""

import json
import os
import re
import subprocess

import jax
import pytest

from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.hlo.compiler_options import CompilerOption
from pretrax.run import compiler_options
from pretrax.run.compiled_step import compile_step, lower_step
from pretrax.run.setup import prepare, prepare_and_report
from runs import BIGRAM, Quiet

VALUES = {
    'name': 'options', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 2,
    'batch': {'tokens': 128, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2}, 'mesh': {'d': 8},
    'log': {'every': 1}, 'eval': {'every': 0},
}  # fmt: skip
# Real options of XLA for CPUs, and one that does not exist, in place of the table's.
ROWS = [
    CompilerOption(name, value, ('cpu',), f'reason {number}', 'evidence')
    for number, (name, value) in enumerate(
        {'xla_cpu_enable_fast_math': True, 'xla_cpu_prefer_vector_width': 256, 'xla_cpu_of_the_future': True}.items()
    )
]


def config(options=None, **changes):
    return config_from_values(VALUES | {'compiler': {'options': options or {}}} | changes)


def chosen(options=None) -> compiler_options.CompilerOptions:
    return prepare(config(options), lambda text: None).compiler_options


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(compiler_options, 'choose_options', lambda situation: ROWS)
    monkeypatch.setattr(compiler_options, 'TABLE', tuple(ROWS))


def test_an_option_changes_the_compiled_step():
    texts = []
    for options in ({}, {}, {'xla_cpu_enable_fast_math': True}):
        run = prepare(config(options), lambda text: None)
        with jax.set_mesh(run.mesh):
            text = compile_step(run, run.like).call.as_text()
            computations = text[text.index('\n%') :]  # tables of places in the source code come before them
            texts.append(re.sub(r', metadata=\{.*?\}', '', computations))
    assert texts[0] == texts[1] != texts[2]


def test_a_cpu_has_its_option_and_those_of_the_configuration():
    assert chosen().values == {'xla_cpu_prefer_vector_width': 512}
    assert str(chosen()) == '1 set for cpu, d=8'
    given = {'xla_cpu_prefer_vector_width': None, 'xla_cpu_enable_fast_math': True}
    assert chosen(given).values == {'xla_cpu_enable_fast_math': True}


@pytest.mark.usefixtures('rows')
def test_the_configuration_wins_and_what_xla_does_not_know_is_left_out():
    found = chosen()
    assert found.values == {'xla_cpu_enable_fast_math': True, 'xla_cpu_prefer_vector_width': 256}
    assert str(found) == '2 set for cpu, d=8; unknown to this XLA: xla_cpu_of_the_future'
    found = chosen({'xla_cpu_prefer_vector_width': 512, 'xla_cpu_enable_fast_math': None})
    assert found.values == {'xla_cpu_prefer_vector_width': 512}
    assert str(found) == (
        '1 from compiler.options: xla_cpu_prefer_vector_width=512; removed by compiler.options: '
        'xla_cpu_enable_fast_math; '
        'unknown to this XLA: xla_cpu_of_the_future'
    )
    assert chosen().lines()[:2] == ['    xla_cpu_enable_fast_math=true', '        reason 0']


@pytest.mark.usefixtures('rows')
def test_flags_of_the_environment_win_over_the_choice_and_lose_to_the_configuration(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_x=1 --xla_cpu_enable_fast_math=false')
    assert chosen().values == {'xla_cpu_prefer_vector_width': 256}
    assert 'left to XLA_FLAGS or LIBTPU_INIT_ARGS: xla_cpu_enable_fast_math' in str(chosen())
    assert chosen({'xla_cpu_enable_fast_math': True}).values['xla_cpu_enable_fast_math'] is True


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        ({'xla_cpu_enable_fast_moth': True}, r'has no such option; did you mean xla_cpu_enable_fast_math\?'),
        ({'fast_math': True}, 'has no such option; names of options begin with xla_'),
        ({'--xla_x': True}, 'has no such option; names of options begin with xla_, in lower case and without dashes'),
        ({'fdo_profile': 1}, 'refuses the value: '),
        ({'xla_cpu_parallel_codegen_split_count': 0}, 'refuses the value: '),
        ({'xla_cpu_enable_fast_math': 'banana'}, "refuses the value: .*'banana' is not a valid bool"),
        ({'xla_cpu_prefer_vector_width': 1.5}, "refuses the value: .*'1.5' is not a valid int32"),
        ({'optimization_level': 77}, 'refuses the value: .*77'),
        ({'xla_tpu_scoped_vmem_limit_kib': 8}, 'it is for TPUs, but this run is for cpu'),
        ({'xla_tpu_enable_sdc_checker': True}, 'it is for TPUs, but this run is for cpu'),
        ({'xla_gpu_enable_triton_gemm': False}, 'it is for GPUs, but this run is for cpu'),
        ({'xla_cpu_enable_fast_moth': None}, r'never sets; did you mean xla_cpu_enable_fast_math\?'),
    ],
)  # fmt: skip
@pytest.mark.usefixtures('rows')
def test_a_wrong_option_is_refused_before_the_step_is_lowered(options, said, monkeypatch):
    monkeypatch.setattr('pretrax.run.compiled_step.make_step', lambda recipe: pytest.fail('the step is lowered'))
    with pytest.raises(UserError, match=rf'compiler\.options\.{next(iter(options))} = .*{said}'):
        prepare_and_report(config(options), lambda text: None, False)
    with pytest.raises(UserError, match=said):
        pretrain(config(options), progress=Quiet())


def test_options_of_other_hardware_are_not_suggested():
    with pytest.raises(UserError, match=r'has no such option\nleave it out'):
        chosen({'xla_cpu_enable_fast_mat': True})


def test_an_answer_for_true_is_not_one_for_1():
    """As keys of a dict they are equal, and XLA accepts only one of them as an integer."""
    assert chosen({'xla_cpu_prefer_vector_width': 1}).values == {'xla_cpu_prefer_vector_width': 1}
    with pytest.raises(UserError, match='not a valid int32'):
        chosen({'xla_cpu_prefer_vector_width': True})


@pytest.mark.usefixtures('rows')
def test_a_run_reports_and_records_its_options(tmp_path):
    pretrain(config(run_dir=str(tmp_path / 'run')), progress=Quiet())
    line = 'compiler options: 2 set for cpu, d=8; unknown to this XLA: xla_cpu_of_the_future'
    assert line in (tmp_path / 'run' / 'startup.txt').read_text().splitlines()
    environment = json.loads((tmp_path / 'run' / 'environment.json').read_text())
    assert environment['compiler_options'] == {'xla_cpu_enable_fast_math': True, 'xla_cpu_prefer_vector_width': 256}


def test_a_model_is_used_elsewhere_although_its_options_are_for_other_hardware():
    """To generate from a run of a TPU on a CPU prepares it, and compiles no step."""
    run = prepare(config({'xla_tpu_scoped_vmem_limit_kib': 8}), lambda text: None)
    with jax.set_mesh(run.mesh):
        assert lower_step(run)


def test_the_configuration_wins_over_flags_of_the_process(tmp_path):
    """As `compile_step` passes them: XLA writes where its option says, and not where its flag says."""
    program = (
        'import sys\nimport jax\n'
        'jax.jit(lambda x: x * 2).lower(1.0).compile(compiler_options={"xla_dump_to": sys.argv[1] + "/option"})'
    )
    flag = {'XLA_FLAGS': f'--xla_dump_to={tmp_path}/flag', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    subprocess.run([programs() / 'python', '-c', program, str(tmp_path)], env=os.environ | flag, check=True)
    written = {path.parent.name for path in tmp_path.rglob('*after_optimizations.txt')}
    assert written == {'option'}
