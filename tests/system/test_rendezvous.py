"""The rendezvous: processes that come late, never, or say something else."""

import contextlib
import socket
import threading
import time

import pytest

from pretrax.system import rendezvous
from pretrax.system.rendezvous import AbsentError, Rendezvous, own_address
from side_by_side import free_port


@pytest.fixture
def address():
    return f'127.0.0.1:{free_port()}'


def together(address, count, work, seconds=10.0, absent=(), before=lambda index: None, **more):
    """The results of `work(call)` in threads, one per process; `before(index)` comes before a process connects."""
    found = {}

    def one(index):
        call = Rendezvous(address, index, count, seconds, **more)
        before(index)
        try:
            call.assemble()
            found[index] = work(call)
        except AbsentError as error:
            found[index] = error
        finally:
            call.close()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count) if index not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_hear_from_each_other(address):
    def work(call):
        return call.gather(10 * call.index), call.share({'all': 1} if call.index == 0 else None)

    found = together(address, 4, work)
    assert found[0] == ({0: 0, 1: 10, 2: 20, 3: 30}, {'all': 1})
    assert found[3] == ({3: 30}, {'all': 1})


def test_who_does_not_come_is_named_after_the_limit(address):
    began = time.monotonic()
    found = together(address, 4, lambda call: (call.gather(1), call.lost, call.share(2)), seconds=3.0, absent=(2,))
    assert time.monotonic() - began < 30
    values, lost, _ = found[0]
    assert values.keys() == {0, 1, 3}
    assert lost == {2: 'did not connect within 3 s'}
    assert found[3][2] == 2


def test_who_does_not_answer_is_named(address):
    answered = threading.Event()

    def work(call):
        if call.index == 1:
            answered.wait(30)
            return None
        values = call.gather(5, seconds=2.0)
        if call.index == 0:
            answered.set()
        return values, dict(call.lost)

    assert together(address, 3, work)[0] == ({0: 5, 2: 5}, {1: 'did not answer within 2 s'})


def test_who_ends_is_named_at_once(address):
    def work(call):
        return None if call.index == 1 else (call.gather(5), call.lost)

    assert together(address, 3, work)[0] == ({0: 5, 2: 5}, {1: 'has ended'})


def test_who_is_awaited_is_named_with_the_host_in_lines_that_become_rarer(address, monkeypatch):
    monkeypatch.setattr(rendezvous, '_PATIENCE', 0.1)
    said = []
    hosts = {0: 'node1', 2: 'node3', 3: 'node4'}
    together(address, 5, lambda call: call.share(''), seconds=4.0, absent=(2, 3, 4), hosts=hosts, say=said.append)
    line = 'process 0 of 5 waits for processes 2 (node3), 3 (node4) and 4'
    assert said[-1] == line
    assert 2 <= len(said) <= 6  # after 0.1, 0.2, 0.4, 0.8, 1.6 and 3.2 seconds at the earliest

    said.clear()
    together(address, 2, lambda call: None, seconds=0.5, absent=(0,), hosts=hosts, say=said.append)
    assert said[0] == f'process 1 of 2 waits for process 0 (node1) at {address}: Connection refused'


def test_who_ends_before_all_have_come_ends_the_wait_of_those_who_need_all(address):
    def work(call):
        return None if call.index == 1 else call.share(call.problem())

    began = time.monotonic()
    found = together(address, 3, work, seconds=60.0, absent=(2,), hosts={1: 'node2'}, needs_all=True)
    assert found[0] == 'process 1 (node2) has ended'
    assert time.monotonic() - began < 50


def test_without_the_first_the_others_say_why(address):
    found = together(address, 2, lambda call: call.gather(1), seconds=0.5, absent=(0,))
    assert 'Connection refused' in str(found[1])
    assert address in str(found[1])


def test_a_stranger_on_the_port_is_ignored(address):
    came = threading.Event()

    def stranger(index):
        host, port = address.split(':')
        while index and not came.wait(0.02):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(b'GET / HTTP/1.1\r\n\r\n')
                came.set()

    assert together(address, 2, lambda call: call.gather(1), before=stranger)[0] == {0: 1, 1: 1}
    assert came.is_set()


def test_the_port_is_free_for_jax_while_the_connections_stay(address):
    def work(call):
        if call.index == 0:
            with socket.create_server(('127.0.0.1', int(address.split(':')[1]))):
                return call.gather(1)
        return call.gather(1)

    assert together(address, 3, work)[0] == {0: 1, 1: 1, 2: 1}


def test_a_clock_that_is_ahead(address, monkeypatch):
    behind = {}

    class Time:
        monotonic, sleep = time.monotonic, time.sleep

        @staticmethod
        def time():
            return time.time() + behind.get(threading.get_ident(), 0.0)

    monkeypatch.setattr(rendezvous, 'time', Time)

    def work(call):
        behind[threading.get_ident()] = {1: 30.0, 2: -5.0}.get(call.index, 0.0)
        return call.clocks()

    clocks = together(address, 4, work)[0]
    for index, ahead in {1: 30.0, 2: -5.0, 3: 0.0}.items():
        assert abs(clocks[index][0] - ahead) <= clocks[index][1] + 1e-3
        assert clocks[index][1] < 1.0


def test_a_first_process_that_is_silent_is_not_waited_for_without_a_limit(address, monkeypatch):
    """As when its host disappears: the connection stays."""
    monkeypatch.setattr(rendezvous, '_SHARES', 1)
    over = threading.Event()

    def work(call):
        if call.index == 0:
            over.wait(30)
            return None
        try:
            return call.share()
        finally:
            over.set()

    assert 'does not answer any more' in str(together(address, 2, work, seconds=3.0)[1])


def test_a_process_knows_the_address_at_which_others_reach_it():
    assert own_address('node7:8476', 0) == 'node7', 'the others know it by this name'
    assert own_address('[fe80::1]:8476', 0) == 'fe80::1'
    assert own_address('127.0.0.1:8476', 3) == '127.0.0.1'
    if socket.has_dualstack_ipv6():
        assert own_address('[::1]:8476', 3) == '::1'
    with pytest.raises(OSError, match=r'nowhere\.invalid|known|resol'):
        own_address('nowhere.invalid:8476', 3)
