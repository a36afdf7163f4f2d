"""A federation in every view: it is one run with islands, whose names and reasons are never markup."""

import json
import math
import re

import pytest

from chromium import launched, needs_chromium, observe
from hand_made_federations import closing, contribution, write_federation
from pretrax.cli import main
from pretrax.federation.objects import State, closing_path, contribution_path, island_path, table_path
from pretrax.view.compare.comparison import compare
from pretrax.view.live.prometheus import Gauges
from pretrax.view.live.runs import Places
from pretrax.view.record.run_record import read_run
from pretrax.view.report import write_report
from pretrax.view.run_list import list_runs

NASTY = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
CONFIG = """\
# Every value of this run
name: a  # override
steps: 100  # fed.yaml:1
batch:
  tokens: 10  # fed.yaml:2
federation:
  bucket: /shared/fed  # fed.yaml:3
  name: null  # default
"""


@pytest.fixture
def place(tmp_path):
    found = write_federation(tmp_path / 'runs' / 'fed')
    (island_path(found, 'a') / 'config.yaml').write_text(CONFIG)
    return found


def called(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == code, err
    return out if code == 0 else err


def test_status_shows_islands_rounds_and_what_is_waited_for(place, capsys):
    text = called(capsys, 'federation', 'status', place)
    lines = [re.split(' {2,}', line.strip()) for line in text.splitlines() if line]
    assert lines[0] == ['running, 2 of 3 islands train']
    held = 'process 71 on node-a since 2026-11-28 10:00:00 UTC'
    assert lines[2] == ['a', '0', 'training', '4', '40', '1.5000', '300', '0', '0', '0', held]
    assert lines[4] == ['c', '2', 'lost', '4', '30', '200', '200', '1', '1']
    assert [line[0] for line in lines[6:9]] == ['3', '2', '1']
    assert lines[6][2:] == [
        '2.2500', '2.0000', '400', '1.5 s', '3 kB', 'a, b', 'c (rejected: chunk 0 is not finite)'
    ]  # fmt: skip
    assert lines[-1] == ['round 4 is open: a contributed, it waits for b, c (lost)']
    newest = called(capsys, 'federation', 'status', place, '--rounds', '1')
    assert [line.split()[0] for line in newest.splitlines()[8:-2]] == ['3']
    for name in 'ab':
        lease = {'holder': 'process 9 on far', 'seconds': 0.2, 'token': name}
        (island_path(place, name) / 'lock').write_text(json.dumps(lease))
    assert 'silent' not in called(capsys, 'federation', 'status', place)
    assert 'it waits for b (silent), c (lost)' in called(capsys, 'federation', 'status', place, '--silent')
    record = json.loads(called(capsys, 'federation', 'status', place, '--json'))
    assert record['open'] == {'round': 4, 'contributed': ['a'], 'waits_for': ['b', 'c']}
    assert record['islands'][2]['left_out'] == 200
    assert math.isclose(record['rounds'][2]['distance'], 2.0)
    assert record['rounds'][1]['late'] == ['c']


@pytest.mark.parametrize(
    ('write', 'said'),
    [
        (lambda place: table_path(place).unlink(), 'has no federation.json'),
        (lambda place: table_path(place).write_bytes(b'{}'), 'cannot be read'),
        (lambda place: table_path(place).write_bytes(b'{"format": 9}'), 'it has format 9'),
        (lambda place: closing_path(place, 1).write_bytes(b'\xff'), '1/closed.json'),
        (lambda place: (closing_path(place, 1).unlink(), closing_path(place, 1).mkdir()), 'Is a directory'),
        (lambda place: [contribution_path(place, n, x).write_bytes(b'') for n in (1, 2) for x in 'ab'], '2/b.json'),
    ],
)
def test_what_cannot_be_read_is_said_in_a_few_lines(place, capsys, write, said):
    write(place)
    error = called(capsys, 'federation', 'status', place, code=2)
    assert said in error
    assert len(error.splitlines()) <= 10


def test_lists_show_one_run(place, capsys):
    (place / 'islands' / 'b' / 'metrics.jsonl').write_text('{"step": 1}\n')  # foreign
    (place.parent / 'other').mkdir()
    (place.parent / 'other' / 'federation.json').write_text('{"servers": []}')
    [run] = list_runs([str(place.parent)])
    assert (run.name, run.state, run.step, run.steps, run.loss, run.islands) == ('fed', 'running', 30, 100, 2.25, 3)
    assert (run.best_val_loss, run.best_step, run.tokens_per_second) == (2.0, 30, 100 / 2 + 300 / 2)
    assert run.written == 1.7e9 + 3
    assert 'running, 2 of 3 islands train' in called(capsys, 'runs', place.parent)


def test_a_record_has_the_tokens_of_the_rounds_and_the_settings_of_all_islands(place):
    record = read_run(place)
    assert (record.name, record.state.name, record.steps, record.setting('name')) == ('fed', 'running', 100, None)
    assert record.axis('tokens', record.metrics['val_loss']).tolist() == [400, 600, 1000]
    assert record.island == ''


def test_a_run_and_a_federation_are_compared_at_the_same_tokens(place, tmp_path):
    alone = tmp_path / 'alone'
    alone.mkdir()
    lines = [{'step': step, 'val_loss': 5.0 - step / 10} for step in (10, 20, 30)]
    (alone / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (alone / 'config.yaml').write_text('name: alone\nsteps: 30\nbatch:\n  tokens: 30\n')
    [found] = compare([read_run(alone), read_run(place)]).comparisons
    assert (found.end, found.a, found.b) == (900, [2.0], [2.25])  # the federation has 600 tokens at 3, 1000 at 2


def test_a_comparison_lists_nothing_that_only_a_machine_of_a_run_knows(place, tmp_path):
    alone = tmp_path / 'alone'
    alone.mkdir()
    (alone / 'metrics.jsonl').write_text('{"step": 10, "val_loss": 5.0}\n')
    (alone / 'config.yaml').write_text(CONFIG.replace('tokens: 10', 'tokens: 20'))
    environment = {'versions': {'jax': '0.12'}, 'device_kind': 'cpu', 'mesh': {'d': 8}}
    (alone / 'environment.json').write_text(json.dumps(environment))
    found = compare([read_run(alone), read_run(place)]).differences
    assert [(one.section, one.key, one.values) for one in found] == [('configuration', 'batch.tokens', ['20', '10'])]


@pytest.mark.parametrize(('verb', 'where'), [
    (['federation', 'status'], ''), (['runs'], ''), (['report'], ''), (['plot'], '/metrics.jsonl'),
    (['federation', 'replay', '--out', 'again'], ''),
])  # fmt: skip
def test_a_federation_in_a_bucket_is_shown_and_one_out_of_reach_is_said(
    place, bucket, verb, where, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for path in place.rglob('*'):
        if path.is_file():
            bucket.put(f'fed/{path.relative_to(place)}', path.read_bytes())
    url = f'{bucket.url}/fed'
    if 'replay' not in verb:
        assert 'wrote' in (text := called(capsys, *verb, url)) or '2 of 3 islands train' in text or 'loss' in text
    bucket.fault(times=math.inf, status=503)
    error = called(capsys, *verb, url, code=2)
    assert error.splitlines()[-1].startswith(f'{url}{where} cannot be re')
    assert 'The service does not answer (HTTP 503' in error


def test_what_is_between_backticks_in_a_definition_is_code(tmp_path):
    lines = [{'step': step, 'loss': 2.0, 'goodput': 0.5, 'val_loss_ema': 3.0} for step in (1, 2, 3)]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    page = re.sub('<(script|style).*?</(script|style)>', '', write_report(tmp_path).read_text(), flags=re.DOTALL)
    assert '`' not in page
    assert '<code>optimizer.ema_decay</code>' in page


def test_plots_draw_the_lines_of_the_rounds(place, capsys, tmp_path):
    out = tmp_path / 'out.csv'
    called(capsys, 'plot', place, '--key', 'loss', '--x', 'tokens', '--out', out)
    assert out.read_text().splitlines() == ['run,step,tokens,loss', 'fed,10,400.0,4.0', 'fed,20,600.0,3.5',
        'fed,30,1000.0,2.25']  # fmt: skip
    assert 'it has: ' in called(capsys, 'plot', place, '--key', 'los', code=2)


def test_those_who_watch_see_rounds_as_they_are_closed(place):
    [run], _ = Places([str(place.parent)]).look()
    run.poll()
    info = run.info()
    assert (info['state'], info['step'], info['steps'], info['last']['val_loss']) == ('running', 30, 100, 2.0)
    assert info['why'] == '2 of 3 islands train, round 4 is open: a contributed, it waits for b, c (lost)'
    four = [contribution(4, name, 100, 1.5, 2.0) for name in 'ab']
    contribution_path(place, 4, 'b').write_bytes(four[1].content())
    closing_path(place, 4).write_bytes(closing(4, four, ['a', 'b']).content())
    assert [event.kind for event in run.poll()] == ['curves', 'run']
    assert (run.info()['step'], run.info()['last']['tokens']) == (40, 1200)
    assert b'pretrax_run{key="island_loss/b",run="fed"} 1.5' in Gauges(lambda: [run]).text()
    closing_path(place, 5).write_bytes(b'{}')
    run.poll()
    assert any('5/closed.json' in text for text in run.info()['warnings'])


def test_the_report_of_an_island_names_its_federation(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / 'config.yaml').write_text(CONFIG)
    assert 'island a of the federation /shared/fed' in write_report(tmp_path).read_text()
    assert 'federation' not in write_report(write_federation(tmp_path / 'fed')).read_text().partition('<main')[0]


@needs_chromium
def test_a_browser_shows_the_islands_and_runs_nothing_of_theirs(place):
    three = [contribution(4, name, 100, 1.5, 2.0) for name in 'ab']
    contribution_path(place, 4, 'b').write_bytes(three[1].content())
    last = closing(4, three, ['b'], rejected={'a': NASTY})
    closing_path(place, 4).write_bytes(last.content())
    (island_path(place, 'b') / 'state.json').write_bytes(State(round=5, state='finished').content())
    lock = island_path(place, 'c') / 'lock'
    lock.write_bytes(json.dumps({'holder': NASTY, 'since': NASTY, 'token': 'x'}).encode())
    file = write_report(place)
    with launched() as browser:
        page = browser.new_page()
        seen = observe(page)
        page.goto(file.as_uri())
        page.wait_for_selector('#chart-0 .main-svg')
        assert page.evaluate('window.hacked') is None
        assert page.locator('main img').count() == 0
        cells = page.locator('#islands tbody tr').first.locator('td').all_text_contents()
        assert cells[:4] == ['a', '0', 'training', '4']
        assert f'a (rejected: {NASTY})' in page.locator('#rounds tbody tr').first.text_content()
        assert seen.problems == []
