"""The sizes of a batch: what divides what, which values an error suggests, and where a batch lies in the data."""

import pytest

from pretrax.config.batch import (
    check_batch,
    common_sequences,
    describe_batch,
    micro_batch_size,
    micro_batch_sizes,
    rows_of,
    same_until,
    sequences_per_device,
    tokens_before,
)
from pretrax.config.schema import Batch
from pretrax.errors import UserError


def batch_of(sequences: int, length: int = 16, micro: int | str | None = None) -> Batch:
    values = {'tokens': sequences * length, 'sequence_length': length, 'micro': micro}
    return Batch.model_validate(values)


def mesh_of(**sizes: int) -> dict[str, int]:
    return dict.fromkeys('rdectp', 1) | sizes


def test_r_d_and_e_shard_the_sequences_and_c_t_p_do_not() -> None:
    assert batch_of(24).largest.sequences == 24
    assert sequences_per_device(batch_of(24).largest, mesh_of(r=2, d=3, e=2, c=2, t=4, p=5)) == 2


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
    assert micro_batch_size(batch_of(sequences).largest, mesh) == micro


def test_micro_batches_divide_the_sequences_and_stages_divide_their_number() -> None:
    assert micro_batch_sizes(12, stages=1) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_sizes(12, stages=2) == [1, 2, 3, 6]
    assert micro_batch_sizes(3, stages=2) == []


@pytest.mark.parametrize(
    ('batch', 'mesh', 'message'),
    [
        (batch_of(12), mesh_of(d=5),
        r'r=1 x d=5 = 5 devices\nuse batch.tokens=160 or batch.tokens=240, .* r x d divides 12'),
        (batch_of(2), mesh_of(d=4), r'= 4 devices\nuse batch.tokens=64, or a mesh'),
        (batch_of(4), mesh_of(c=3),
        r'sequence_length = 16 is not divisible by mesh.c = 3\nuse mesh.c=1'),
        (batch_of(4, micro=3), mesh_of(), r'batch.micro = 3 does not divide the 4 .*\nuse batch.micro=4'),
        (batch_of(4, micro=4), mesh_of(p=2), r'makes 1 micro-batches per device, .*\nuse batch.micro=2'),
        (batch_of(6), mesh_of(d=2, p=2),
        r'3 sequences per device do not fill .*\nuse batch.tokens=128 for 8 sequences'),
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
        micro_batch_size(batch_of(4, micro='auto').largest, mesh_of())


def test_the_description_names_micro_batches_as_a_pipeline_does() -> None:
    assert describe_batch(batch_of(16), mesh_of(d=2)) == '256 tokens = 16 sequences x 16; 8 per device, 1 pass of 8'
    assert describe_batch(batch_of(16), mesh_of(p=2)).endswith('16 per device, 8 micro-batches of 2')


def growing(tokens: object, lengths: object = 16, micro: int | None = None) -> Batch:
    return Batch.model_validate({'tokens': tokens, 'sequence_length': lengths, 'micro': micro})


def test_batches_that_grow_follow_one_another_in_the_data_without_a_gap() -> None:
    batch = growing(((0, 64), (3, 96), (7, 256)), ((0, 8), (5, 32)))
    row = tokens = 0
    for number in range(12):
        n_tokens = 64 if number < 3 else 96 if number < 7 else 256
        assert rows_of(batch, number) == (row, n_tokens // 32, 4 if number < 5 else 1)
        assert tokens_before(batch, number) == tokens
        row, tokens = row + n_tokens // 32, tokens + n_tokens


def test_every_size_has_to_fit_the_mesh() -> None:
    check_batch(growing(((0, 64), (5, 128))), mesh_of(d=4))
    with pytest.raises(UserError, match=r'from step 5 on, batch: 6 sequences per step cannot be sharded evenly over'):
        check_batch(growing(((0, 64), (5, 96))), mesh_of(d=4))
    with pytest.raises(UserError, match=r'from step 5 on, batch.micro = 4 does not divide the 6 sequences per device'):
        check_batch(growing(((0, 64), (5, 96)), micro=4), mesh_of())
    with pytest.raises(UserError, match=r'from step 0 on, batch.sequence_length = 4 is not divisible by mesh.c = 8'):
        check_batch(growing(64, ((0, 4), (5, 16))), mesh_of(c=8))


def test_the_fix_of_one_size_keeps_the_others() -> None:
    with pytest.raises(UserError, match=r'use batch.tokens with \[5, 64\] or batch.tokens with \[5, 128\], or a mesh'):
        check_batch(growing(((0, 64), (5, 96))), mesh_of(d=4))
    with pytest.raises(UserError, match=r'mesh.c = 8\nuse mesh.c=2'):
        check_batch(growing(64, ((0, 4), (5, 16))), mesh_of(c=8))
    with pytest.raises(UserError, match=r'from step 5 on, (.|\n)*use batch.tokens=128, or a mesh'):  # it is no schedule
        check_batch(growing(64, ((0, 8), (5, 16))), mesh_of(d=8))


def test_a_micro_batch_for_every_size_divides_what_their_sequences_have_in_common() -> None:
    assert common_sequences(growing(((0, 64), (5, 96)))) == 2
    assert common_sequences(growing(64, ((0, 4), (5, 16)))) == 4


def test_a_description_names_every_size() -> None:
    assert describe_batch(growing(((0, 32), (5, 64))), mesh_of()) == (
        'from step 0: 32 tokens = 2 sequences x 16; 2 per device, 1 pass of 2; '
        'from step 5 (largest): 64 tokens = 4 sequences x 16; 4 per device, 1 pass of 4'
    )


def test_later_batches_may_change_but_no_earlier_one_and_not_the_rows_of_the_data() -> None:
    before = growing(((0, 32), (5, 64)))
    assert same_until(before, growing(((0, 32), (5, 64), (9, 128))), 9)
    assert not same_until(before, growing(((0, 32), (5, 64), (9, 128))), 10)
    assert same_until(growing(32), before, 5)
    assert not same_until(growing(32), before, 6)
    assert same_until(before, growing(((0, 32), (5, 64)), ((0, 8), (4, 16))), 0)
    assert not same_until(before, growing(((0, 32), (5, 64)), ((0, 16), (9, 32))), 9)
