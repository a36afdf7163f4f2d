"""Tokenizes on a Ray cluster of several nodes, and removes one of them meanwhile."""

import random
import threading
import time

import pytest

from launched import environment
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.tokenize import prepare as prepare_module
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.errors import UserError
from pretrax.system.ray_connection import connect_ray
from ray_nodes import ray_nodes
from tokenizer_families import TEXTS, byte_level


@pytest.mark.nightly
@pytest.mark.filterwarnings('ignore::ResourceWarning')  # Ray leaves its log files open
@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function _at_fork:pytest.PytestUnraisableExceptionWarning')
def test_the_loss_of_a_node_does_not_change_the_tokens(tmp_path, monkeypatch, said, capsys):
    monkeypatch.setattr(prepare_module, 'SHARD_BYTES', 200_000)
    draw = random.Random(0)
    with (tmp_path / 'text.txt').open('w') as text:
        for _ in range(30_000):
            text.write(' '.join(draw.choices(TEXTS, k=8)).replace('\n', ' ') + '\n')
    corpus = Corpus(find_files(str(tmp_path / 'text.txt')))

    def made(directory, work):
        place = prepare(
            corpus, directory, said.append, tokenizer=byte_level(), validation=0.1, work=work, vocab_size=300
        )
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob('*') if path.is_file()}

    with ray_nodes(2, environment()) as cluster:
        monkeypatch.setenv('RAY_ADDRESS', cluster.address)
        removed = []

        def remove_a_node():
            while not list(tmp_path.glob('ray/.*/*')):
                time.sleep(0.01)
            cluster.remove(cluster.nodes[0])
            removed.append(time.monotonic())

        removing = threading.Thread(target=remove_a_node)
        removing.start()
        on_two = made(tmp_path / 'ray', Work('ray', 4))
        removing.join()
        with capsys.disabled():
            print(f'\nRay: tokenized, {time.monotonic() - removed[0]:.1f} s after a node was removed')
    assert 'by 4 tasks of Ray on 3 nodes' in said.text
    assert on_two == made(tmp_path / 'here', Work(workers=1))


def test_a_cluster_that_does_not_answer_is_noticed_soon(monkeypatch):
    pytest.importorskip('ray')
    monkeypatch.setenv('RAY_ADDRESS', '127.0.0.1:1')
    for address in (None, 'auto'):
        with pytest.raises(UserError, match=r'data.engine: no Ray cluster answers at 127.0.0.1:1: Connection refused'):
            connect_ray(address, 'data.engine: ')
    with pytest.raises(UserError, match=r'at ray://127.0.0.1:2: Connection refused'):
        connect_ray('ray://127.0.0.1:2')
