"""Several hundred broken configurations: each is refused in at most ten lines that name the mistake, with no traceback.

A valid file with every key is broken in one place at a time: each value by values that its type excludes, each key by
misspelling or deletion, the text by corruption.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.config.problems import shown

BASE = """\
name: fuzz
run_dir: runs/fuzz
seed: 1
steps: 300
model:
  name: transformer
  n_layers: 2
  d_model: 64
  attention:
    n_heads: 2
  layers: scan
  z_loss: 0.1
data:
  name: text
  text: stdlib
  vocab_size: 1024
batch:
  tokens: 1024
  sequence_length: 128
  micro: 2
optimizer:
  name: adamw
  learning_rate: 0.001
  weight_decay: 0.1
  no_decay: [a]
  clip_norm: 1.0
  groups: []
  freeze: []
  ema_decay: 0.5
  b1: 0.9
  eps: 0.001
schedule:
  name: cosine
  warmup: 10
  final: 0.1
mesh:
  r: 1
  d: auto
  e: 1
  c: 1
  t: 1
  p: 1
precision:
  compute: f32
checkpoint:
  every: 100
  keep: 3
eval:
  every: 100
  batches: 8
log:
  every: 10
  layers: 50
  tensorboard: false
  wandb: project
  mlflow: uri
sample:
  every: 50
  prompts: [a, b]
  tokens: 64
  temperature: 0.8
  top_k: 5
  top_p: 0.9
plugins: []
"""

NOT_A_NUMBER = [
    'abc',
    '"12"',
    '16k',
    '1,000',
    'true',
    'no',
    '[1]',
    '{a: 1}',
    '.nan',
    '-.inf',
    '""',
    '1:30',
    '??',
    '1e',
    '!!binary aGk=',
    '!!int y',
    '!!bool y',
    '!!timestamp y',
    '!!str 3',
    '! 3',
    '=',
    '2001-01-01',
    '${nowhere}',
    '???',
]
NOT_AN_INTEGER = [*NOT_A_NUMBER, '1.5', '1e3', '010', '99999999999999999999', '9' * 5000]
NOT_TEXT = [
    'on', 'yes', 'false', '3', '1e-3', '.inf', '{a: 1}', '${oc.env:PRETRAX_NOT_SET}', '!!python/name:os.system',
    '!!set {a}', '"\\ud800"', '*nowhere', '@x', '%x', '`x', '"open',
]  # fmt: skip
SECTION = ['null', 'abc', '3', 'true', '[]', '[1, 2]', '1.5']
BAD = {
    'name': [
        *NOT_TEXT, 'null', '[a]', 'a/b', '../a', '" "', '""', '.', '-a', '"a b"', '"a\\nb"', 'x' * 300, '\u00e9',
        '"a\\u202eb"',
    ],
    'run_dir': [*NOT_TEXT, '"\\0"', 'null', '[a]', '""', '" "', '~/runs'],
    'seed': [*NOT_AN_INTEGER, '-1', 'null'],
    'steps': [*NOT_AN_INTEGER, '-1', '0', 'null'],
    'model': SECTION,
    'model.name': [*NOT_TEXT, 'transformr', 'null', '[a]', '""'],
    'model.n_layers': [*NOT_AN_INTEGER, '-1', '0'],
    'model.d_model': [*NOT_AN_INTEGER, '-1', '0'],
    'model.layers': ['scann', '3', 'true', '[]', 'null', '{}'],
    'model.z_loss': [*NOT_A_NUMBER, '-1'],
    'data': SECTION,
    'data.name': ['txet', '3', 'true', '[]', 'null'],
    'data.text': ['3', 'true', '{a: 1}', '[1]', '[]', '""', '1.5'],
    'data.vocab_size': [*NOT_AN_INTEGER, '3', '0', '-1'],
    'batch': SECTION,
    'batch.tokens': [*NOT_AN_INTEGER, '-1', '0', 'null', '1000', '127', '129'],
    'batch.sequence_length': [*NOT_AN_INTEGER, '-1', '0', 'null', '1000'],
    'batch.micro': [*NOT_AN_INTEGER, '-1', '0', '9'],
    'optimizer': SECTION,
    'optimizer.name': ['adamv', '3', 'true', '[]', 'null', 'Adam W', '{}', 'os.system'],
    'optimizer.learning_rate': [*NOT_A_NUMBER, '-1', '0', 'null', '1e-400', '1e400'],
    'optimizer.weight_decay': [*NOT_A_NUMBER, '-0.1', 'null'],
    'optimizer.no_decay': ['a', '3', 'null', '[1]', 'true', '{a: 1}'],
    'optimizer.groups': ['a', '3', 'null', '[a]', '[{}]', '[{match: 3}]', '[{match: a, rate: 1}]', '[{match: []}]',
    '{match: a}'],
    'optimizer.freeze': ['a', '3', 'null', '[1]', 'true', '{a: 1}'],
    'optimizer.ema_decay': [*NOT_A_NUMBER, '0', '1', '-0.1', 'true'],
    'optimizer.clip_norm': [*NOT_A_NUMBER, '-1', '0'],
    'optimizer.b1': [*NOT_A_NUMBER, 'null'],
    'schedule': SECTION,
    'schedule.name': ['cosinus', '3', 'true', '[]', 'null'],
    'schedule.warmup': [*NOT_AN_INTEGER, 'null', '301'],
    'schedule.final': [*NOT_A_NUMBER, 'null'],
    'mesh': SECTION,
    'mesh.r': [*NOT_AN_INTEGER, '-1', '0', 'null', 'automatic'],
    'mesh.d': [*NOT_AN_INTEGER, '-1', '0', 'null', 'Auto'],
    **{f'mesh.{axis}': [*NOT_AN_INTEGER, '-1', '0', 'null', 'automatic'] for axis in 'ectp'},
    'precision': SECTION,
    'precision.compute': ['f16', 'bfloat16', '32', 'null', 'true', '[]'],
    'checkpoint': SECTION,
    'checkpoint.every': [*NOT_AN_INTEGER, '-1', 'null'],
    'checkpoint.keep': [*NOT_AN_INTEGER, '-1', '0', 'null'],
    'eval': SECTION,
    'eval.every': [*NOT_AN_INTEGER, '-1', 'null'],
    'eval.batches': [*NOT_AN_INTEGER, '-1', '0', 'null'],
    'log': SECTION,
    'log.every': [*NOT_AN_INTEGER, '-1', 'null'],
    'log.layers': [*NOT_AN_INTEGER, '-1', 'null'],
    'log.tensorboard': ['3', 'null', '1', '0', '[]', '{}', '"yes"', 'ja'],
    'log.wandb': [*NOT_TEXT, '[a]', '""'],
    'log.mlflow': ['3', '[a]', '{}', '1.5'],
    'sample': SECTION,
    'sample.every': [*NOT_AN_INTEGER, '-1', 'null'],
    'sample.prompts': ['a', '3', 'null', '[]', '[1]', '[null]', '[[a]]', '{a: 1}', 'true'],
    'sample.tokens': [*NOT_AN_INTEGER, '-1', '0', 'null'],
    'sample.temperature': [*NOT_A_NUMBER, '-0.1', 'null'],
    'sample.top_k': [*NOT_AN_INTEGER, '-1', '0'],
    'sample.top_p': [*NOT_A_NUMBER, '-0.1', '0', '1.1'],
    'plugins': [
        'a.py', '3', 'null', '[1]', '[null]', '[nowhere.py]', '[nowhere_module]', '{a: 1}', '[""]', '[.]', '[a b]',
    ],
}  # fmt: skip
REQUIRED = [
    'name', 'steps', 'model', 'data', 'batch', 'optimizer', 'batch.tokens', 'batch.sequence_length',
    'optimizer.learning_rate',
]  # fmt: skip
KEYS = [*BAD, 'model.attention.n_heads', 'optimizer.eps']


def lines_of(key: str) -> tuple[int, int]:
    """The lines of the valid file that a dotted key takes: [first, last)."""
    lines = BASE.splitlines()
    first, last = -1, len(lines)
    for depth, name in enumerate(key.split('.')):
        first = next(i for i in range(first + 1, last) if lines[i].startswith(f'{"  " * depth}{name}:'))
        inside = '  ' * depth + ' '
        last = next((i for i in range(first + 1, last) if not lines[i].startswith(inside)), last)
    return first, last


def edited(key: str, *new: str) -> str:
    """The valid file with the lines of a key replaced."""
    lines = BASE.splitlines()
    first, last = lines_of(key)
    return '\n'.join([*lines[:first], *new, *lines[last:]]) + '\n'


def with_value(key: str, value: str) -> str:
    *sections, name = key.split('.')
    return edited(key, f'{"  " * len(sections)}{name}: {value}')


def misspellings(key: str) -> list[str]:
    name = key.rpartition('.')[2]
    return [name + 'z', name.upper(), f'{name[0]}x{name[1:]}', f'"{name} "', f'{name}.{name}']


def misspelt(key: str, name: str) -> str:
    first, last = lines_of(key)
    lines = BASE.splitlines()[first:last]
    old = key.rpartition('.')[2]
    return edited(key, lines[0].replace(old, name, 1), *lines[1:])


BAD_VALUES = [(key, value) for key, values in BAD.items() for value in values]
BAD_NAMES = [(key, name) for key in KEYS for name in misspellings(key)]
# A line that is no line of a mapping, put between any two lines.
BAD_LINES = [
    '\tx: 1', '- a', '}', ']', 'x', ': :', '@', '"', 'x: {', 'x: [1', 'x: "', '? [a]', 'x: &', '*x', '...\nx: 1',
    '---\nx: 1', '!!python/object:os.system x', 'unknown: 1', 'name: again', '<<: 3', '1: 2', 'null: 3', 'true: 1',
    '"": 1', 'x: \0', 'x: \x1b[31m', 'extends: nowhere.yaml', 'extends: 3', 'extends: []', 'extends: [1]',
    'extends: null', 'extends: broken.yaml', 'extends: ${oc.env:PRETRAX_NOT_SET}', 'x: ${', 'x: ${oc.nothing:1}',
    'x: ${x}', 'x: ${y}\ny: ${x}',
]  # fmt: skip
BAD_FILES = {
    'empty': b'',
    'blank': b'\n\n  \n',
    'comment': b'# nothing\n',
    'end': b'---\n...\n',
    'list': b'- a\n- b\n',
    'number': b'3\n',
    'word': b'hello\n',
    'null': b'null\n',
    'nul': b'\0' * 100,
    'utf16': BASE.encode('utf-16'),
    'latin1': BASE.replace('fuzz', 'f\u00fczz').encode('latin-1'),
    'gzip': b'\x1f\x8b\x08\x00' + bytes(range(256)),
    'zip': b'PK\x03\x04' + bytes(64),
    'deep': b'x: ' + b'[' * 2000,
    'deep-closed': b'x: ' + b'[' * 2000 + b']' * 2000,
    'deep-mapping': b''.join(b' ' * i + b'x:\n' for i in range(600)),
    'huge': BASE.encode() + b'# ' + b'x' * 300_000,
    'laughs': b'a: &a [x, x, x, x, x, x, x, x, x]\n'
    + b''.join(b'%c: &%c [%s]\n' % (c, c, b', '.join([b'*%c' % (c - 1)] * 9)) for c in range(ord('b'), ord('j'))),
    'circle': b'x: &x [*x]\n',
    'json-cut': b'{"name": "x", "steps": ',
    'python': b'import os\nos.system("true")\n',
    'tabs': BASE.replace('  ', '\t').encode(),
    'crlf-cut': BASE.replace('\n', '\r\n')[:40].encode() + b'\r\n\tx',
    'bom-only': b'\xef\xbb\xbf',
    'long-key': b'x' * 5000 + b': 1\n',
    'long-value': BASE.encode() + b'z: ' + b'y' * 5000,
    'many-wrong': BASE.encode() + b''.join(b'z%d: 1\n' % i for i in range(500)),
    'terminal': BASE.encode() + b'"\\e[2J\\r\\n\\n\\n": 1\n',
}
BAD_OVERRIDES = [
    'foo', '=3', 'a..b=1', '.=1', 'steps', 'steps=', 'steps =3', 'a.b=1', 'steps.x=1', 'batch=1', 'batch.tokens=[',
    'steps=1 # 2', 'steps=1\nseed=2', 'sample.prompts.0=x', 'name[0]=x', '+steps=1', '~steps', 'steps==1', 'steps=${',
    'steps=*', 'name=*', 'extends=x.yaml', 'optimizer={name: lion, b9: 1}', 'model=null', 'plugins=[x.py]',
    'mesh={d: 1, d: 2}', 'steps=!!python/name:os.system', 'name="', "name='a", 'name=\0', 'STEPS=3',
    'batch.Tokens=1024', 'seed=-1', '\u00e9=1', '_origins=1', 'model_config=1', 'optimizer.options={}',
    'optimizer.kind=x', 'run_dir=\x00', 'steps=' + '[' * 1500,
]  # fmt: skip
BAD_PLUGINS = [
    '1 / 0', 'def f(:', 'import nowhere_at_all', 'raise SystemExit(0)', 'raise KeyError',
    'raise Exception("a\\n" * 50)', 'x = y', '\0', '\u00e9 = "\ud800"',
    'from pretrax.config import register\nregister("x", "y")',
    'from pretrax.config import register\n@register("data", "text")\ndef f(): ...',
    'from pretrax.config import register\n@register("data", "fuzz")\ndef f(*, x): ...',
    'from pretrax.config import register\n@register("data", "fuzz")\ndef f(*, x: object()): ...', 'assert False',
    'def f(): f()\nf()',
]  # fmt: skip


def refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *mentions: str, directory: Path | None = None
) -> str:
    """Runs `config show`, which has to exit with 2 after one to ten lines that mention one of the given texts."""
    with pytest.raises(SystemExit) as stopped:
        main(['config', 'show', *arguments])
    out, err = capsys.readouterr()
    return checked(stopped.value.code, out, err, mentions, str(directory or ''))


def checked(code: object, out: str, err: str, mentions: tuple[str, ...], directory: str = '') -> str:
    assert code == 2
    assert out == ''
    assert 1 <= len(err.splitlines()) <= 10, err
    assert max(map(len, err.splitlines())) < 400, err
    assert 'Traceback' not in err
    assert not set(err) & set(map(chr, [*range(9), *range(11, 32)])), err
    said = err.replace(directory, '') if directory else err  # the name of the directory is no answer
    assert any(mention in said for mention in mentions), (mentions, err)
    return err


def file(tmp_path: Path, content: str | bytes, name: str = 'broken.yaml') -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_the_file_that_is_broken_below_is_valid_and_there_are_hundreds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(['config', 'show', file(tmp_path, BASE)])
    assert stopped.value.code == 0, capsys.readouterr().err
    assert len(BAD_VALUES) + len(BAD_NAMES) + len(BAD_LINES) + len(BAD_FILES) + len(BAD_OVERRIDES) > 900


@pytest.mark.parametrize('key', BAD)
def test_wrong_values(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in BAD[key]:
        path = file(tmp_path, with_value(key, value))
        first, last = lines_of(key)
        places = [f'broken.yaml:{line + 1}: ' for line in range(first, last)]
        refused([path], capsys, key, f' {key.rpartition(".")[2]} ', *places, directory=tmp_path)


@pytest.mark.parametrize('key', KEYS)
def test_misspelt_keys(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in misspellings(key):
        path = file(tmp_path, misspelt(key, name))
        refused([path], capsys, name.strip('"').strip(), directory=tmp_path)


@pytest.mark.parametrize('key', REQUIRED)
def test_missing_keys(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 'missing' in refused([file(tmp_path, edited(key))], capsys, f' {key} ', directory=tmp_path)


@pytest.mark.parametrize('section', ['', *(key for key in BAD if '.' not in key and f'\n{key}:\n' in BASE)])
def test_unknown_keys_in_every_section(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if section:
        first, last = lines_of(section)
        content = edited(section, *BASE.splitlines()[first:last], '  unheard_of: 1')
    else:
        content = BASE + 'unheard_of: 1\n'
    err = refused([file(tmp_path, content)], capsys, f'{section}.unheard_of'.strip('.'), directory=tmp_path)
    assert 'not a key that exists' in err


@pytest.mark.parametrize('line', BAD_LINES)
def test_wrong_lines(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = BASE.splitlines()
    tops = [i for i, text in enumerate(lines) if not text.startswith(' ')]
    for at in [0, tops[len(tops) // 2], len(lines)]:
        path = file(tmp_path, '\n'.join([*lines[:at], line, *lines[at:]]) + '\n')
        refused([path], capsys, 'broken.yaml', directory=tmp_path)


@pytest.mark.parametrize('key', [key for key in BAD if '.' not in key])
def test_keys_given_twice(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = lines_of(key)
    path = file(tmp_path, BASE + '\n'.join(BASE.splitlines()[first:last]) + '\n')
    assert 'duplicate' in refused([path], capsys, key, directory=tmp_path)


@pytest.mark.parametrize('name', BAD_FILES)
def test_files_that_are_no_configuration(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused([file(tmp_path, BAD_FILES[name])], capsys, 'broken.yaml', directory=tmp_path)


def test_random_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    for _ in range(60):
        path = file(tmp_path, rng.randbytes(rng.randrange(1, 2000)))
        refused([path], capsys, 'broken.yaml', directory=tmp_path)


def test_random_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    for _ in range(60):
        text = ''.join(rng.choices('ab:-[]{}#&*!|>\'"%@`, \n0123?.$', k=rng.randrange(1, 80)))
        refused([file(tmp_path, text)], capsys, 'broken.yaml', directory=tmp_path)


def test_a_flipped_character_is_read_or_refused_but_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(2)
    for _ in range(60):
        at = rng.randrange(len(BASE))
        content = BASE[:at] + rng.choice(':-[]{}#&*!|>\'"%@`, \n0a\t$~') + BASE[at + rng.randrange(2) :]
        with pytest.raises(SystemExit) as stopped:
            main(['config', 'show', file(tmp_path, content)])
        out, err = capsys.readouterr()
        if stopped.value.code != 0:
            checked(stopped.value.code, out, err, ('broken.yaml',))


def test_paths_that_are_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    valid = file(tmp_path, BASE, 'quickstart.yaml')
    assert 'did you mean' in refused([str(tmp_path / 'quikstart.yaml')], capsys, 'quikstart.yaml')
    for path in [
        '',
        '.',
        '/',
        str(tmp_path),
        '/dev/zero',
        '/dev/null',
        f'{valid}/x',
        'x' * 5000,
        'a\0b',
        '\n\n\n',
        '\x1b[31m',
    ]:
        refused([path], capsys, path if path.isprintable() and len(path) < 50 else repr(path)[1:-1][:20])


@pytest.mark.parametrize('override', BAD_OVERRIDES)
def test_wrong_overrides(override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, _, value = override.partition('=')
    mentions = {key, value, key.partition('.')[0], shown(override)} - {''}
    refused([file(tmp_path, BASE), override], capsys, *mentions, directory=tmp_path)


@pytest.mark.parametrize('source', BAD_PLUGINS)
def test_wrong_plugins(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'plugin.py').write_bytes(source.encode('utf-8', 'surrogatepass'))
    path = file(tmp_path, with_value('plugins', '[plugin.py]'))
    refused([path], capsys, 'plugin.py', directory=tmp_path)


@pytest.mark.slow
def test_the_installed_command_does_the_same(tmp_path: Path) -> None:
    broken = {
        with_value('steps', 'many'): 'steps',
        misspelt('batch', 'bacth'): 'bacth',
        BASE + 'x: [': 'broken.yaml',
        '\0': 'broken.yaml',
    }
    for content, mention in broken.items():
        command = [
            sys.executable,
            '-c',
            'from pretrax.cli import main; main()',
            'config',
            'show',
            file(tmp_path, content),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {'NO_COLOR': '1'})
        checked(done.returncode, done.stdout, done.stderr, (mention,), str(tmp_path))
