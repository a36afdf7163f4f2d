"""The slots of the rows of experts."""

import pytest

from pretrax.model.expert_slots import block_length, number_of_blocks, room_of_round


@pytest.mark.parametrize('n_choices', [1, 7, 64, 1000, 10**6])
@pytest.mark.parametrize('n_experts', [2, 8, 128])
@pytest.mark.parametrize(('method', 'least'), [('blocks', 4), ('runs', 16)])
def test_blocks_leave_few_slots_empty(n_choices, n_experts, method, least):
    length = block_length(n_choices, n_experts, method)
    assert 8 <= length <= 512
    assert length == 8 or length <= n_choices / n_experts / least


def test_blocks_are_enough_for_every_routing():
    """Of 10 rows of 3 experts, the worst routing is 8, 1, 1 in blocks of 4: 2 + 1 + 1; of 7 rows 5, 1, 1."""
    assert number_of_blocks(10, 3, 4) == 4
    assert number_of_blocks(7, 3, 4) == 4


@pytest.mark.parametrize(('n_choices', 'n_devices', 'room'), [(1024, 4, 320), (1000, 4, 320), (8, 4, 8), (5, 8, 5)])
def test_a_round_has_a_quarter_of_room_in_multiples_of_eight(n_choices, n_devices, room):
    """1,000 choices over 4 devices are 250 to each, with a quarter more 312.5, and 320 as a multiple of 8."""
    assert room_of_round(n_choices, n_devices) == room
