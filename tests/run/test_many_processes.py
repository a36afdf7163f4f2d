"""What a start asks of a bucket or a shared disk does not grow with the number of processes."""

import pytest

from checkpoint.test_keep import Memory
from many_processes import Processes
from pretrax import config_from_values
from pretrax.checkpoint import restore_newest
from pretrax.checkpoint.manifest import manifest_content
from pretrax.errors import UnavailableError, UserError
from pretrax.run import resume
from pretrax.storage import BucketPath

RUN = BucketPath('s3://bucket/run')


def requests_of_a_start(n, saved, config, monkeypatch):
    memory, asked = Memory(), []
    monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: memory)
    for step in range(saved):
        description = {'config': config.model_dump(mode='json'), 'imported': True}
        memory.objects[f'run/checkpoints/{step}/manifest.json'] = manifest_content(step, description, {}, {})
    memory.request = lambda: asked.append(True)
    processes = Processes(n, monkeypatch)
    for index in range(n):
        with processes.turn(index):
            if saved:
                resume.check_init_from(RUN, 'gpt', 'another run')
                with pytest.raises(UserError, match='holds weights that were imported'):
                    resume.check_unchanged(config, False, print)
            else:
                resume.check_unchanged(config, False, print)
                assert restore_newest(RUN / 'checkpoints', {}, print) is None
    return len(asked)


@pytest.mark.parametrize('saved', [0, 3])
def test_a_start_asks_a_bucket_as_often_with_many_processes_as_with_few(saved, small, monkeypatch):
    config = config_from_values(small).model_copy(update={'run_dir': RUN})
    few, many = (requests_of_a_start(n, saved, config, monkeypatch) for n in (2, 500))
    assert 0 < few == many < 20


@pytest.mark.parametrize('kind', [UserError, UnavailableError])
def test_all_processes_raise_what_the_first_one_finds(kind, monkeypatch):
    def fail(directory):
        raise kind('the bucket is gone')

    monkeypatch.setattr(resume, 'steps_in', fail)
    processes = Processes(3, monkeypatch)
    for index in range(3):
        with processes.turn(index), pytest.raises(kind, match='the bucket is gone') as error:
            resume.check_init_from(RUN, 'gpt', 'another run')
        assert type(error.value) is kind
