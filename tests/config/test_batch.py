"""The sizes of a batch: what divides what, and which values an error suggests."""

import pytest

from pretrax.config.batch import (
    check_batch,
    describe_batch,
    micro_batch_size,
    micro_batch_sizes,
    n_sequences,
    sequences_per_device,
)
from pretrax.config.schema import Batch
from pretrax.errors import UserError


def batch_of(sequences: int, length: int = 16, micro: int | str | None = None) -> Batch:
    values = {'tokens': sequences * length, 'sequence_length': length, 'micro': micro}
    return Batch.model_validate(values)


def mesh_of(**sizes: int) -> dict[str, int]:
    return dict.fromkeys('rdectp', 1) | sizes


def test_r_d_and_e_shard_the_sequences_and_c_t_p_do_not() -> None:
    assert n_sequences(batch_of(24)) == 24
    assert sequences_per_device(batch_of(24), mesh_of(r=2, d=3, e=2, c=2, t=4, p=5)) == 2


@pytest.mark.parametrize(
    ('sequences', 'mesh', 'micro'),
    [
        (24, mesh_of(), 24),  # all at once
        (24, mesh_of(d=4, t=2), 6),
        (16, mesh_of(p=2), 2),  # 8 micro-batches: four per stage
        (4, mesh_of(p=2), 1),  # as many as there are
        (24, mesh_of(p=2), 3),
    ],
)
def test_the_default_micro_batch_keeps_the_pipeline_bubble_small(
    sequences: int, mesh: dict[str, int], micro: int
) -> None:
    assert micro_batch_size(batch_of(sequences), mesh) == micro


def test_micro_batches_divide_the_sequences_and_stages_divide_their_number() -> None:
    assert micro_batch_sizes(12, stages=1) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_sizes(12, stages=2) == [1, 2, 3, 6]
    assert micro_batch_sizes(3, stages=2) == []


@pytest.mark.parametrize(
    ('batch', 'mesh', 'message'),
    [
        (batch_of(12), mesh_of(d=5), r'r=1 x d=5 = 5 devices\nuse batch.tokens=160 or batch.tokens=240, .* r x d divides 12'),
        (batch_of(2), mesh_of(d=4), r'= 4 devices\nuse batch.tokens=64, or a mesh'),
        (batch_of(4), mesh_of(c=3), r'sequence_length = 16 is not divisible by mesh.c = 3\nuse batch.sequence_length=15'),
        (batch_of(4, micro=3), mesh_of(), r'batch.micro = 3 does not divide the 4 .*\nuse batch.micro=4'),
        (batch_of(4, micro=4), mesh_of(p=2), r'makes 1 micro-batches per device, .*\nuse batch.micro=2'),
        (batch_of(6), mesh_of(d=2, p=2), r'3 sequences per device do not fill .*\nuse batch.tokens=128 for 8 sequences'),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(
    batch: Batch, mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_batch(batch, mesh)


def test_a_micro_batch_to_be_measured_is_no_error_until_its_size_is_needed() -> None:
    check_batch(batch_of(4, micro='auto'), mesh_of())
    with pytest.raises(UserError, match='measures auto before the run'):
        micro_batch_size(batch_of(4, micro='auto'), mesh_of())


def test_the_description_names_micro_batches_as_a_pipeline_does() -> None:
    assert describe_batch(batch_of(16), mesh_of(d=2)) == '256 tokens = 16 sequences x 16; 8 per device, 1 pass of 8'
    assert describe_batch(batch_of(16), mesh_of(p=2)).endswith('16 per device, 8 micro-batches of 2')
