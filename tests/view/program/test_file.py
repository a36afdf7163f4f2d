"""The text of a program in a run directory."""

import jax
import jax.numpy as jnp
import pytest

from pretrax.errors import UserError
from pretrax.view.program.file import TEXT, read_program, write_program


def test_a_program_is_read_as_it_was_written(tmp_path):
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    written = write_program(tmp_path / 'program', compiled, {'d': 4, 't': 2})
    read = read_program(tmp_path / 'program' / TEXT)
    assert read.mesh == {'d': 4, 't': 2}
    assert read.flops == written.flops == 2 * 8**3


def test_a_dump_of_xla_is_read(tmp_path):
    path = tmp_path / 'module_0001.jit_f.cpu_after_optimizations.txt'
    path.write_text(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text())
    assert read_program(path).flops == 2 * 8**3


@pytest.mark.parametrize('content', [b'', b'\x1f\x8b broken', b'\x00\xff', b'{"a": 1}'])
def test_other_files_are_errors_that_say_what_is_expected(tmp_path, content):
    path = tmp_path / 'file'
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'cannot be read|no compiled program'):
        read_program(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match='No such file'):
        read_program(tmp_path / 'none')
