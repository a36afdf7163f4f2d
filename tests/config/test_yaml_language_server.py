"""An editor completes, describes and checks configurations: the language server of VS Code's YAML extension, with our
schema.

It is installed with `npm install --global yaml-language-server`.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from messages import read_message, write_message
from pretrax.cli import main
from pretrax.config import registry

REPOSITORY = Path(__file__).parents[2]
SERVER = shutil.which('yaml-language-server')
SETTINGS = json.loads((REPOSITORY / '.vscode' / 'settings.json').read_text())

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(SERVER is None, reason='no yaml-language-server')]


class Client:
    """Speaks the Language Server Protocol over the server's standard streams, as an editor does."""

    def __init__(self, process):
        self._process, self._sent, self._diagnostics = process, 0, {}

    def request(self, method, **parameters):
        self._sent += 1
        self._write({'id': self._sent, 'method': method, 'params': parameters})
        while (message := self._read()).get('id') != self._sent or 'method' in message:
            pass
        return message['result']

    def notify(self, method, **parameters):
        self._write({'method': method, 'params': parameters})

    def open(self, file, text):
        """Opens a file in the editor; returns the messages of its problems."""
        document = {'uri': file.as_uri(), 'languageId': 'yaml', 'version': 1, 'text': text}
        self.notify('textDocument/didOpen', textDocument=document)
        while file.as_uri() not in self._diagnostics:
            self._read()
        return [problem['message'] for problem in self._diagnostics.pop(file.as_uri())]

    def at(self, method, file, line, character):
        place = {'line': line, 'character': character}
        return self.request(f'textDocument/{method}', textDocument={'uri': file.as_uri()}, position=place)

    def _write(self, message):
        write_message(self._process.stdin, {'jsonrpc': '2.0'} | message)

    def _read(self):
        message = read_message(self._process.stdout)
        if message.get('method') == 'textDocument/publishDiagnostics':
            self._diagnostics[message['params']['uri']] = message['params']['diagnostics']
        elif (
            'method' in message and 'id' in message
        ):  # what the server asks for: its settings, or nothing that matters here
            items = message['params'].get('items') if message['method'] == 'workspace/configuration' else None
            self._write({'id': message['id'], 'result': items and [self._section(item['section']) for item in items]})
        return message

    @staticmethod
    def _section(name):
        if name != 'yaml':
            return {}
        values = {key.removeprefix('yaml.'): value for key, value in SETTINGS.items() if key.startswith('yaml.')}
        return values | {'validate': True, 'completion': True, 'hover': True, 'schemaStore': {'enable': False}}


@pytest.fixture
def editor():
    with subprocess.Popen([SERVER, '--stdio'], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            client = Client(process)
            folder = {'uri': REPOSITORY.as_uri(), 'name': 'pretrax'}
            text = {'publishDiagnostics': {}, 'completion': {'completionItem': {'snippetSupport': True}}, 'hover': {}}
            client.request(
                'initialize', processId=None, rootUri=folder['uri'], workspaceFolders=[folder],
                capabilities={'textDocument': text, 'workspace': {'configuration': True, 'workspaceFolders': True}},
            )  # fmt: skip
            client.notify('initialized')
            client.notify('workspace/didChangeConfiguration', settings={})
            yield client
            client.request('shutdown')
            client.notify('exit')
        finally:
            process.kill()


REST = 'name: x\nsteps: 1\ndata: {text: stdlib}\nbatch: {tokens: 8, sequence_length: 8}\n'
OPTIMIZERS = ', '.join(f'"{name}"' for name in registry.names('optimizer'))
RIGHT = REST + 'model: {n_layers: 1}\noptimizer:\n  name: muon\n  learning_rate: 1\n'


def test_the_files_of_the_repository_have_no_problems(editor):
    files = [path for name in ('configs', 'examples') for path in sorted((REPOSITORY / name).rglob('*.yaml'))]
    assert len(files) > 15
    assert not {str(file): problems for file in files if (problems := editor.open(file, file.read_text()))}


@pytest.mark.parametrize(('text', 'problems'), [
    (RIGHT + 'stepps: 2\n', ['Property stepps is not allowed.']),
    (RIGHT + '  lr: 2\n', ['Property lr is not allowed.']),
    (RIGHT.replace('n_layers', 'n_layer'), ['Property n_layer is not allowed.']),
    (RIGHT.replace('muon', 'muno'), [f'Value is not accepted. Valid values: {OPTIMIZERS}.']),
    (RIGHT.replace('name: muon', 'iterations: 3'), ['Property iterations is not allowed.']),
    (RIGHT.replace('steps: 1', 'steps: ${batch.tokens}'), []),
])  # fmt: skip
def test_a_wrong_key_is_marked(editor, text, problems):
    assert editor.open(REPOSITORY / 'configs' / 'new.yaml', text) == problems


def test_keys_and_values_are_completed_and_described(editor):
    file = REPOSITORY / 'configs' / 'new.yaml'
    editor.open(file, RIGHT + '  ')
    items = editor.at('completion', file, line=8, character=2)['items']
    assert {'iterations', 'weight_decay'} <= {item['label'] for item in items}
    assert 'nesterov' not in {item['label'] for item in items}  # an option of sgd
    [found] = [item['documentation'] for item in items if item['label'] == 'iterations']
    assert found == 'Newton-Schulz iterations'
    assert 'optimizer steps of the whole run' in editor.at('hover', file, line=1, character=1)['contents']['value']


def test_the_file_that_init_writes_names_its_schema(editor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(['init', 'mine'])
    file = tmp_path / 'mine.yaml'
    assert editor.open(file, file.read_text()) == []
    assert editor.open(tmp_path / 'other.yaml', file.read_text() + 'stepps: 1\n') == ['Property stepps is not allowed.']
