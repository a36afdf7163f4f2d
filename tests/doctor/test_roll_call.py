"""The roll call: processes that come late, never, or say something else."""

import contextlib
import socket
import threading
import time

import pytest

from pretrax.doctor import roll_call
from pretrax.doctor.roll_call import AbsentError, RollCall


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return f'127.0.0.1:{free.getsockname()[1]}'


def together(address, count, work, seconds=10.0, absent=(), before=lambda index: None):
    """The results of `work(call)` in threads, one per process; `before(index)` comes before a process connects."""
    found = {}

    def one(index):
        call = RollCall(address, index, count, seconds)
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

    assert together(address, 3, work)[0] == ({0: 5, 2: 5}, {1: 'ended during the check'})


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

    monkeypatch.setattr(roll_call, 'time', Time)

    def work(call):
        behind[threading.get_ident()] = {1: 30.0, 2: -5.0}.get(call.index, 0.0)
        return call.clocks()

    clocks = together(address, 4, work)[0]
    for index, ahead in {1: 30.0, 2: -5.0, 3: 0.0}.items():
        assert abs(clocks[index][0] - ahead) <= clocks[index][1] + 1e-3
        assert clocks[index][1] < 1.0


def test_a_first_process_that_is_silent_is_not_waited_for_without_a_limit(address, monkeypatch):
    """As when its host disappears: the connection stays."""
    monkeypatch.setattr(roll_call, '_SHARES', 1)
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
