"""`import pretrax`: a loaded model agrees with the command line and with plain JAX, and the page has every name."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pretrax
import reference
from pretrax.cli import main
from reference_maker.api import _definition, _signature
from runs import Quiet, small_values, write_documents

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / 'docs' / 'library.md').read_text()
SECTIONS = dict(re.findall(r'^## (\w+)\n(.*?)(?=^## |\Z)', PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope='module')
def result(tmp_path_factory):
    directory = tmp_path_factory.mktemp('library')
    values = small_values(write_documents(directory), directory) | {'eval': {'every': 3, 'batches': 2}}
    return pretrax.pretrain(values, progress=Quiet())


@pytest.fixture(scope='module')
def model(result):
    return pretrax.load(result)


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_logits_are_those_of_plain_jax(result, model):
    tokens = np.random.default_rng(0).integers(0, 300, (3, 7))
    found = model.logits(tokens)
    assert (found.shape, found.dtype, found.is_fully_replicated) == ((3, 7, 300), np.float32, True)
    weights = jax.device_get(result.state.weights)
    positions = np.broadcast_to(np.arange(7), tokens.shape)
    arch = result.run.recipe.model.arch
    expected = reference.logits(weights, tokens, np.ones_like(tokens), positions, arch)[..., :300]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(np.asarray(expected)).max() > 0.01


def test_texts_are_those_of_the_command(result, model, capsys):
    flags = ['--tokens', 8, '--temperature', 0.9, '--top-k', 50, '--seed', 4]
    run = result.run.run_dir
    shown = printed(capsys, 'generate', run, '--prompt', 'abc', '--prompt', 'fed cab', *flags)
    texts = model.generate(['abc', 'fed cab'], max_tokens=8, temperature=0.9, top_k=50, seed=np.int64(4))
    assert shown == f'abc{texts[0]}\nfed cab{texts[1]}\n'
    one = model.generate('abc', max_tokens=8, temperature=0.9, top_k=50, seed=4)
    assert one == texts[0]
    assert ''.join(model.stream('abc', max_tokens=8, temperature=0.9, top_k=50, seed=4)) == one
    assert (
        model.generate('abc', max_tokens=8, temperature=0.9, top_k=50, seed=4, stop=one[3]) == one[: one.index(one[3])]
    )
    assert model.generate([]) == []


def test_losses_are_those_of_training_of_the_command_and_of_the_logits(result, model, tmp_path, capsys):
    held_out = model.evaluate()
    assert held_out['loss'] == pytest.approx(result.validation['val_loss'], rel=1e-5)
    assert held_out['bits_per_byte'] == pytest.approx(result.validation['val_bits_per_byte'], rel=1e-5)
    text = 'abc fed'
    (tmp_path / 'mine.txt').write_text(text)
    found = model.evaluate(text)
    flags = ['--text', f'text={tmp_path}/mine.txt', '--json', tmp_path / 'out.json']
    printed(capsys, 'eval', result.run.run_dir, *flags)
    [by_command] = json.loads((tmp_path / 'out.json').read_text())['results'].values()
    assert found == {name: each['value'] for name, each in by_command['tasks']['text'].items()}
    ids = [model.tokenizer.end_of_text, *model.tokenizer.encode(text)]
    log_probs = jax.nn.log_softmax(model.logits([ids])[0])
    nats = -sum(float(log_probs[place, token]) for place, token in enumerate(ids[1:]))
    assert found['loss'] == pytest.approx(nats / len(ids[1:]), rel=1e-5)
    assert found['bits_per_byte'] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)


def test_an_export_and_a_name_are_the_same_model(result, model, tmp_path, capsys, monkeypatch):
    exported = tmp_path / 'exported'
    printed(capsys, 'export', result.run.run_dir, exported)
    tokens = [model.tokenizer.encode('abc fed')]
    for place in (exported, f'hf:{exported}'):
        other = pretrax.load(place)
        np.testing.assert_allclose(other.logits(tokens), model.logits(tokens), atol=1e-6)
        assert repr(other).startswith(f'model: {place}\n')
    with pytest.raises(pretrax.UserError, match='no held-out text'):
        other.evaluate()
    shown = printed(capsys, 'generate', f'hf:{exported}', '--prompt', 'abc', '--tokens', 4)
    assert shown == 'abc' + model.generate('abc', max_tokens=4) + '\n'
    for place in (str(exported), f'hf:{exported}'):
        with pytest.raises(SystemExit) as refused:
            main(['serve', place, '--follow'])
        assert refused.value.code == 2
        assert f'--follow: {place} is a Hugging Face checkpoint' in capsys.readouterr().err
    (tmp_path / 'runs').mkdir()
    (tmp_path / 'runs' / 'named').symlink_to(result.run.run_dir)
    monkeypatch.chdir(tmp_path)
    assert pretrax.load('named').trained.step == 6
    assert repr(model).splitlines()[1:3] == [
        f'transformer, {result.run.n_params:,} parameters, a tokenizer of 300 tokens',
        'reads 16 tokens, computes in f32 on 8 x cpu',
    ]
    assert (model.config.steps, model.config.mesh.t) == (6, 2)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda model: pretrax.load('nope'), r'^nope: no such run or checkpoint'),
        (lambda model: pretrax.load(5), r'^run is 5; expected a run, a checkpoint'),
        (lambda model: pretrax.load('nope', dtype='f64'), r'^dtype is f64; expected f32, bf16 or fp16$'),
        (lambda model: model.generate(5), r'^prompts is 5; expected a text, or a list of texts$'),
        (lambda model: model.stream(['a', 5]), r"^prompt is \['a', 5\]; expected"),
        (lambda model: model.generate(max_tokens=0), r'^max_tokens is 0; expected a number of tokens, 1 or more$'),
        (lambda model: model.generate(temperature=-1), r'^temperature is -1; expected a number, 0 or more$'),
        (lambda model: model.generate(temprature=1), r'^temprature is not a setting; did you mean temperature\?\n'),
        (lambda model: model.generate(stop=''), r"^stop is \[''\]; expected a string that is not empty"),
        (lambda model: model.logits([[1, 300]]), r'^tokens has the token 300\nthe vocabulary has the tokens 0 to 299$'),
        (lambda model: model.logits([[-1]]), r'^tokens has the token -1\n'),
        (lambda model: model.logits([1]), r'^tokens is int64 \[1\]; expected integers \[B, L\]\n'),
        (lambda model: model.logits([[0.5]]), r'^tokens is float64 \[1, 1\]; expected integers'),
        (lambda model: model.logits([[1], [2, 3]]), r'^tokens has rows of different lengths'),
        (lambda model: model.evaluate(5), r'^text is 5; expected a text'),
        (lambda model: model.evaluate(''), r'^the text has no text$'),
        (
            lambda model: pretrax.load_config('quickstart', 'steps=3'),
            r"expected a list of key=value\nwrite \['steps=3'\]",
        ),
        (lambda model: pretrax.pretrain('quickstart', {'steps': 3}), r"^overrides is .*\nwrite \['steps=3'\]"),
        (lambda model: pretrax.pretrain(5), r'^config is 5; expected a file, the values'),
        (lambda model: pretrax.pretrain({'modle': {}, 'name': 'x', 'steps': 1, 'data': {}}), r'modle is not a key'),
    ],
)
def test_a_wrong_use_is_an_error_of_few_lines(call, message, model):
    with pytest.raises(pretrax.UserError, match=message) as refused:
        call(model)
    assert len(str(refused.value).splitlines()) <= 10


def test_ipython_shows_the_message_only():
    program = [
        sys.executable,
        '-m',
        'IPython',
        '--no-banner',
        '--colors=NoColor',
        '-c',
        "import pretrax; pretrax.load_config('nope')",
    ]
    shown = subprocess.run(program, capture_output=True, text=True)
    assert (shown.stdout + shown.stderr).strip().startswith('UserError: nope does not exist')
    assert 'Traceback' not in shown.stdout + shown.stderr


def test_the_page_has_every_public_name_with_its_signature():
    assert sorted(SECTIONS) == sorted(pretrax.__all__)
    assert set(pretrax.__all__) <= set(dir(pretrax))
    for name in pretrax.__all__:
        assert getattr(pretrax, name).__doc__
        _, node = _definition('pretrax', name)
        if isinstance(node, ast.FunctionDef):
            assert _signature(node, name).strip() in SECTIONS[name], name
    _, node = _definition('pretrax', 'LoadedModel')
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}  # the last of overloads
    for name in ('generate', 'stream', 'logits', 'evaluate'):
        assert _signature(methods[name], f'LoadedModel.{name}').strip() in SECTIONS['LoadedModel'], name


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    from examples.test_notebooks import SMALL

    monkeypatch.chdir(tmp_path)
    Path('small.yaml').write_text(SMALL.format(quickstart=REPOSITORY / 'configs' / 'quickstart.yaml'))
    Path('text.py').write_text(Path(json.decoder.__file__).read_text() * 6)
    session = {'__name__': '__main__'}
    examples = [
        code
        for code in re.findall(r'^```python\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
        if not re.match(r'(LoadedModel\.)?\w+\(.*-> .*\n\Z', code, re.DOTALL)
    ]
    assert len(examples) == 14
    for code in examples:
        exec(
            compile(code.replace("'quickstart'", "'small.yaml'").replace('steps=100', 'steps=6'), code, 'exec'), session
        )
    shown = capsys.readouterr().out
    assert 'run: runs/library, done at step 6 of 6' in shown
    assert 'nowhere: no such run or checkpoint' in shown
    assert session['state'].step == 4


CONSUMER = """
import pretrax

result = pretrax.pretrain('quickstart', ['steps=1'], on_step=lambda number, metrics: print(number + 1, metrics['loss']))
model = pretrax.load(result)
reveal_type(result)
reveal_type(result.history)
reveal_type(model.generate('a', temperature=0.5))
reveal_type(model.generate(['a']))
reveal_type(model.stream('a'))
reveal_type(model.evaluate())
reveal_type(pretrax.load_config('quickstart'))
model.generate(5)
pretrax.nope
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_types_of_the_wheel(tmp_path):
    uv = ['uv', 'build', '--wheel', '--quiet', '--offline', '--out-dir', str(tmp_path / 'dist'), str(REPOSITORY)]
    subprocess.run(uv, check=True)
    [wheel] = (tmp_path / 'dist').glob('*.whl')
    options = ['--quiet', '--offline', '--no-deps', '--target', str(tmp_path / 'site')]
    subprocess.run(['uv', 'pip', 'install', *options, str(wheel)], check=True)
    assert (tmp_path / 'site' / 'pretrax' / 'py.typed').is_file()
    (tmp_path / 'consumer.py').write_text(CONSUMER)
    settings = {'extraPaths': ['site'], 'include': ['consumer.py'], 'typeCheckingMode': 'strict'}
    (tmp_path / 'pyrightconfig.json').write_text(json.dumps(settings))
    command = [sys.executable, '-m', 'pyright', '--outputjson', '--pythonpath', sys.executable, '-p', str(tmp_path)]
    environment = os.environ | {'PYTHONPATH': ''}
    found = json.loads(subprocess.run(command, capture_output=True, text=True, env=environment).stdout)
    told = found['generalDiagnostics']
    types = [re.findall(r'is "(.*)"$', each['message'])[0] for each in told if each['severity'] == 'information']
    arrays = 'dict[str, ndarray[tuple[Any, ...], dtype[Any]]]'
    assert types == ['Result', arrays, 'str', 'list[str]', 'Iterator[str]', 'dict[str, float]', 'RunConfig']
    errors = {(each['range']['start']['line'] + 1, each['rule']) for each in told if each['severity'] == 'error'}
    wrong_call = {(13, 'reportArgumentType'), (13, 'reportCallIssue')}
    assert errors == wrong_call | {(14, 'reportAttributeAccessIssue'), (14, 'reportUnknownMemberType')}
