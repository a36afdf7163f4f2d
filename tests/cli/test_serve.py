"""`pretrax serve`: a real process that serves a run while it trains."""

import contextlib
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest

from launched import environment
from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.infer.generate import generate
from runs import Quiet, small_values, write_documents
from serve.calls import call, eventually, metric


def trained(values, steps):
    return pretrain(config_from_values(values | {'steps': steps}), progress=Quiet())


@contextlib.contextmanager
def serving(*arguments):
    """A process that serves, when it listens."""
    command = [programs() / 'pretrax', 'serve', *map(str, arguments), '--port', '0']
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        try:
            printed = []
            for line in process.stdout:
                printed.append(line)
                if line.startswith('serving: '):
                    break
            assert printed, 'it ended'
            assert printed[-1].startswith('serving: '), ''.join(printed)
            url = printed[-1].split()[-1].removesuffix('/v1')
            yield SimpleNamespace(url=url, process=process, printed=printed)
        finally:
            process.kill()


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run of four steps, with its configuration."""
    directory = tmp_path_factory.mktemp('run')
    values = small_values(write_documents(directory), directory) | {
        'mesh': {}, 'checkpoint': {'every': 2, 'keep': 1}, 'schedule': {'name': 'constant'},
    }  # fmt: skip
    return SimpleNamespace(values=values, result=trained(values, 4), directory=directory / 'run')


@pytest.mark.slow
def test_a_run_is_served_and_followed_while_it_trains(run):
    import openai

    with serving(run.directory, '--follow', '--max-length', 512, '--slots', 2) as server:
        assert 'attention to the cache by plain (no kernel for cpu)' in ''.join(server.printed)
        client = openai.OpenAI(base_url=f'{server.url}/v1', api_key='-', max_retries=0)
        model = client.models.list().data[0]
        assert (model.id, model.step, model.max_model_len) == ('run', 4, 512)
        tokenizer = run.result.run.source.tokenizer
        prompt = tokenizer.encode('abc fed')
        expected = generate(run.result.run.recipe.model, run.result.state.weights, [prompt], tokens=9, temperature=0)
        asked = {'model': 'run', 'prompt': 'abc fed', 'max_tokens': 9, 'temperature': 0}
        whole = client.completions.create(**asked, extra_body={'ignore_eos': True})
        assert whole.choices[0].text == tokenizer.decode([*prompt, *expected[0]]).removeprefix('abc fed')
        assert whole.system_fingerprint == 'step-4'

        stream = client.completions.create(
            model='run', prompt='abc', max_tokens=500, stream=True, extra_body={'ignore_eos': True}
        )
        first = next(stream)
        training = threading.Thread(target=trained, args=(run.values, 8))
        training.start()
        steps = [first.system_fingerprint, *(event.system_fingerprint for event in stream)]
        assert steps[0] == 'step-4'
        training.join()
        eventually(lambda: client.models.list().data[0].step == 8)
        assert client.completions.create(**asked).system_fingerprint == 'step-8'
        assert metric(server, 'pretrax_compilations_total') == 0
        assert metric(server, 'pretrax_requests_total', status='200') == 3

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_two_checkpoints_are_two_models_with_keys(run, tmp_path):
    trained(run.values, 6)
    keys = tmp_path / 'keys'
    keys.write_text('# of the team\nsecret\n')
    newest = sorted((run.directory / 'checkpoints').iterdir())[-1]
    with serving(run.directory, newest, '--slots', 1, '--host', '0.0.0.0', '--api-key-file', keys) as server:
        server.url = server.url.replace('0.0.0.0', '127.0.0.1')
        assert call(server, '/v1/models')[0] == 401
        models = call(server, '/v1/models', authorization='Bearer secret')[2]['data']
        assert [model['id'] for model in models] == ['run', f'run@{newest.name}']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            '--host 0.0.0.0',
            '--host 0.0.0.0: anyone who reaches this machine could use the server\n  give --api-key-file',
        ),
        ('--api-key-file nowhere', '--api-key-file: nowhere: No such file or directory'),
        ('--api-key-file empty', '--api-key-file: empty has no key'),
        (
            '--mesh d=2,x=3',
            "--mesh d=2,x=3: 'x=3' is not an axis with its size\n  expected some of r, d, e, t: d=2,t=4",
        ),
        ('--mesh d=2,d=2', '--mesh'),
        ('--draft runs/small', '--draft proposes nothing without --propose\n  give both'),
        ('--weights int4', '--weights is int4; expected one of compute, int8'),
        ('--cache int4', '--cache is int4; expected one of compute, int8, fp8'),
        ('--proxy nginx', '--proxy nginx: not an IP address\n  give the address'),
        ('', 'runs/nothing: no such run or checkpoint'),
    ],
)
def test_a_mistake_is_explained(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').write_text('\n# none\n')
    with pytest.raises(SystemExit) as ended:
        main(['serve', 'runs/nothing', '--port', '0', *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_cannot_be_followed(run, capsys, monkeypatch):
    checkpoint = sorted((run.directory / 'checkpoints').iterdir())[-1]
    monkeypatch.setattr('pretrax.cli.serve._load', lambda *_: pytest.fail('it is loaded first'))
    with pytest.raises(SystemExit) as ended:
        main(['serve', str(checkpoint), '--follow', '--port', '0'])
    assert ended.value.code == 2
    assert f'--follow: {checkpoint} is one checkpoint\n  give its run: {run.directory}' in capsys.readouterr().err
