"""Processes that do not come."""

import pytest

from doctored import doctored


@pytest.mark.nightly
def test_a_process_that_never_joins(tmp_path):
    found = doctored(tmp_path, processes=3, limit=15, absent=(1,))
    assert found.codes == [1, 1]
    [row] = found.bad('nodes')
    assert (row['nodes'], row['result']) == (['process 1'], 'did not connect within 15 s')
    assert found.bad('devices')[0]['result'].startswith('not checked')


@pytest.mark.nightly
def test_without_the_first_node_the_others_say_why(tmp_path):
    found = doctored(tmp_path, processes=2, limit=3, absent=(0,))
    assert found.codes == [1]
    [row] = found.bad('first node')
    assert 'does not answer within 3 s: Connection refused' in row['result']
