"""`pretrax compare`: verdicts on made-up runs whose answer is known, and what it says of runs that it cannot judge."""

import csv
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from chromium import launched, needs_chromium, observe
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.view.compare.comparison import Options, compare
from pretrax.view.compare.text import as_markdown, as_text, verdict_text
from pretrax.view.record.run_record import read_run
from view import compare_picture

BATCH, STEPS, FLOOR, SCALE = 1000, 200, 2.0, 50


def decay(steps, rate=1.0):
    """A loss that falls to FLOOR; with twice the rate it needs half of the tokens."""
    return FLOOR + 4 * np.exp(-rate * np.asarray(steps) / SCALE)


class Runs:
    """Writes runs as training leaves them."""

    def __init__(self, directory):
        self.directory = directory
        self.numbers = itertools.count()

    def write(self, name, *, seed=0, lr=0.1, loss=None, val=None, steps=STEPS, state='finished', **settings):
        """`loss`: one per step; `val`: {step: loss}."""
        path = self.directory / f'run-{next(self.numbers)}'
        path.mkdir(parents=True)
        more = ''.join(f'{key}: {value}\n' for key, value in settings.items())
        (path / 'config.yaml').write_text(
            f'# Every value\nname: {json.dumps(name)}\nseed: {seed}\nsteps: {steps}\nbatch:\n  tokens: {BATCH}\n'
            f'optimizer:\n  learning_rate: {lr}\n{more}'
        )
        lines = []
        for step in range(1, steps + 1):
            if loss is not None:
                lines.append({'step': step, 'loss': float(loss[step - 1]), 'tokens_per_second': 50.0})
            if val is not None and step in val:
                lines.append({'step': step, 'val_loss': float(val[step])})
        for line in lines:
            for key in [key for key, value in line.items() if not math.isfinite(value)]:
                line |= {key: None, 'nonfinite': {key: str(line[key])}}
        (path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
        ended = {'time': 9.0, 'event': state, 'step': steps}
        (path / 'attempts.jsonl').write_text(
            json.dumps({'time': 1.0, 'event': 'began', 'step': 0}) + '\n' + json.dumps(ended)
        )
        return read_run(path)

    def arm(self, name, finals, lr, rate=1.0, seeds=None):
        """A run for each final validation loss: `decay`, moved by what is missing."""
        evaluations = np.arange(10, STEPS + 1, 10)
        curve = decay(evaluations, rate)
        return [
            self.write(
                f'{name}-{seed}',
                seed=seed,
                lr=lr,
                val=dict(zip(evaluations.tolist(), curve + final - curve[-1], strict=True)),
            )
            for seed, final in zip(seeds or range(len(finals)), finals, strict=True)
        ]


@pytest.fixture
def made(tmp_path):
    return Runs(tmp_path / 'runs')


def only(result):
    (found,) = result.comparisons
    return found


def test_seeds_form_arms(made):
    runs = [*made.arm('base', [3, 3.1, 3.2], 0.1), *made.arm('new', [3, 3.1], 0.2)]
    result = compare([runs[0], runs[3], *runs[1:3], runs[4]])
    assert [(arm.letter, arm.name, list(arm.seeds)) for arm in result.arms] == [
        ('A', 'base', [0, 1, 2]),
        ('B', 'new', [0, 1]),
    ]
    assert [(one.section, one.key, one.values) for one in result.differences] == [
        ('configuration', 'seed', ['0, 1, 2', '0, 1']),
        ('configuration', 'optimizer.learning_rate', ['0.1', '0.2']),
    ]
    assert len(compare(runs, Options(separate=True)).arms) == 5
    with pytest.raises(UserError, match='differ only in their seed'):
        compare(runs[:3])
    with pytest.raises(UserError, match='give two or more'):
        compare(runs[:1])


def test_pairs_find_what_seeds_hide(made):
    """Seeds change both arms by up to 1, and B is lower by 0.1 and a little noise."""
    a = [3.0, 3.5, 4.0, 3.2]
    b = [value - 0.1 + noise for value, noise in zip(a, (0.01, -0.01, 0.02, -0.02), strict=True)]
    found = only(compare([*made.arm('a', a, 0.1), *made.arm('b', b, 0.2)]))
    assert found.verdict == 'better'
    assert found.difference == pytest.approx(-0.1)
    # Student's t of 3 degrees of freedom at 97.5 % is 3.182; the standard deviation of the noise is 0.01826.
    assert found.interval.half == pytest.approx(3.18245 * 0.0182574 / 2, rel=1e-4)
    assert found.method.startswith('paired t, 4 seeds')
    reverse = only(compare([*made.arm('b', b, 0.2), *made.arm('a', a, 0.1)]))
    assert (reverse.verdict, reverse.difference) == ('worse', pytest.approx(0.1))


def test_other_seeds_are_not_paired(made):
    a, b = [3.0, 3.5, 4.0, 3.2], [2.9, 3.4, 3.9, 3.1]
    found = only(compare([*made.arm('a', a, 0.1), *made.arm('b', b, 0.2, seeds=[4, 5, 6, 7])]))
    assert (found.verdict, found.method) == ('no difference shown', 'Welch, 4 and 4 seeds')
    found = only(compare([*made.arm('a', a, 0.1), *made.arm('b', [9.0], 0.2)]))
    assert found.verdict == 'worse'
    assert 'the same noise assumed for both' in found.method


def test_other_data_are_not_paired(made):
    a = made.arm('a', [3.0, 3.5], 0.1)
    b = [made.write(f'b-{seed}', seed=seed, lr=0.1, data='{vocab_size: 9}', val={200: 3.0 + seed}) for seed in (0, 1)]
    assert only(compare([*a, *b])).method == 'Welch, 2 and 2 seeds'


def test_equal_runs_are_equal(made):
    losses = decay(range(STEPS)) + np.random.default_rng(0).normal(size=STEPS)
    losses[7] = math.nan
    a, b = made.write('a', loss=losses), made.write('b', lr=0.2, loss=losses)
    found = only(compare([a, b]))
    assert (found.verdict, found.difference, found.earlier) == ('equal', 0, None)
    other = made.write('c', lr=0.3, loss=np.where(np.arange(STEPS) == 50, losses + 1e-6, losses))
    assert only(compare([a, other])).verdict == 'not decided'


def test_one_seed_each_is_not_decided(made):
    """However large the difference is, unless the noise between seeds is given."""
    random = np.random.default_rng(1)
    noise = random.normal(scale=0.2, size=STEPS)  # of the batches, the same for both
    a = made.write('a', loss=decay(range(STEPS)) + noise, val={200: 3.0})
    b = made.write(
        'b', lr=0.2, loss=decay(range(STEPS)) + noise - 0.5 + random.normal(scale=0.01, size=STEPS), val={200: 2.5}
    )
    found = only(compare([a, b]))
    assert (found.verdict, found.interval, found.difference) == ('not decided', None, -0.5)
    assert 'the noise between seeds is not known' in found.why
    assert found.within.estimate == pytest.approx(-0.5, abs=0.01)
    assert 0 < found.within.half < 0.02  # the noise of the batches cancels
    known = only(compare([a, b], Options(seed_noise=0.1)))
    assert known.verdict == 'better'
    assert known.interval.half == pytest.approx(1.959964 * 0.1 * math.sqrt(2))
    assert only(compare([a, b], Options(seed_noise=0.3))).verdict == 'no difference shown'


def test_seeds_without_any_noise_decide_nothing(made):
    found = only(compare([*made.arm('a', [3.0, 3.0], 0.1), *made.arm('b', [2.0, 2.0], 0.2)]))
    assert (found.verdict, found.interval.half) == ('not decided', 0)


def test_runs_of_one_seed_count_once(made):
    """Three copies of a run are no three seeds."""
    a = [made.write(f'a{i}', seed=0, val={200: 3.0 + i / 100}) for i in range(3)]
    b = [made.write(f'b{i}', seed=0, lr=0.2, val={200: 2.0 + i / 100}) for i in range(3)]
    found = only(compare([*a, *b]))
    assert (found.verdict, found.a) == ('not decided', [pytest.approx(3.01)])
    assert any('count as one' in note for note in found.notes)


def test_tokens_that_are_saved(made):
    """At twice the rate, B reaches the final loss of A after half of the tokens: its curve says where."""
    steps = np.arange(1, STEPS + 1)
    a = made.write('a', val=dict(zip(steps.tolist(), decay(steps), strict=True)))
    b = made.write('b', lr=0.2, val=dict(zip(steps.tolist(), decay(steps, 2.0), strict=True)))
    found = only(compare([a, b])).earlier
    assert (found.by, found.end) == ('B', STEPS * BATCH)
    assert found.at == pytest.approx(STEPS * BATCH / 2, rel=1e-6)
    assert found.saved == pytest.approx(0.5)
    reverse = only(compare([b, a])).earlier
    assert (reverse.by, reverse.at) == ('A', found.at)
    known = only(compare([a, b], Options(seed_noise=0.01))).earlier
    once = only(compare([made.write('c', lr=0.3, val={STEPS: 3.0}), made.write('d', lr=0.4, val={STEPS: 2.0})]))
    assert once.earlier is None  # one evaluation does not say where the other's loss was reached
    half = 1.959964 * 0.01 * math.sqrt(2)
    # decay(s, 2) = level + half, solved for s
    expected = -SCALE / 2 * math.log((decay(STEPS) + half - FLOOR) / 4) * BATCH
    assert known.low == pytest.approx(expected, rel=1e-3)
    assert known.high == pytest.approx(-SCALE / 2 * math.log((decay(STEPS) - half - FLOOR) / 4) * BATCH, rel=1e-3)


def test_training_losses_are_averaged_over_the_last_part(made):
    """The last 10 % of 200 steps: 20 losses, whose mean is computed here."""
    random = np.random.default_rng(2)
    a, b = random.normal(size=STEPS), random.normal(size=STEPS)
    found = only(compare([made.write('a', loss=a), made.write('b', lr=0.2, loss=b)]))
    assert (found.a[0], found.b[0]) == (pytest.approx(a[-20:].mean()), pytest.approx(b[-20:].mean()))
    found = only(compare([made.write('c', loss=a), made.write('d', lr=0.2, loss=b)], Options(window=0.5)))
    assert found.a[0] == pytest.approx(a[-100:].mean())


def test_runs_of_different_lengths_are_compared_at_the_shorter_end(made):
    steps = np.arange(1, STEPS + 1)
    a = made.write('long', val=dict(zip(steps.tolist(), decay(steps), strict=True)))
    b = made.write('short', lr=0.2, steps=60, state='failed', val={20: 4.0, 50: 3.0})
    found = only(compare([a, b]))
    assert found.end == 50 * BATCH
    assert found.a == [pytest.approx(decay(50))]
    assert any('compared at the end of short, 50,000 tokens' in note for note in found.notes)
    assert any('short (failed)' in note for note in found.notes)


@pytest.mark.parametrize('width', [60, 80])
def test_the_text_fits_the_terminal(made, monkeypatch, width):
    names = [f'llama-without-weight-decay-on-norms/warmup=2000-{end}/a-long-name' for end in 'ab']
    runs = [
        made.write(name, loss=decay(range(STEPS)), lr=rate, seed=seed)
        for name, rate in zip(names, (0.1, 0.2), strict=True)
        for seed in (0, 1)
    ]
    monkeypatch.setenv('COLUMNS', str(width))
    shown = as_text(compare(runs))
    assert max(map(len, shown.splitlines())) <= width
    assert {'arm', 'final', 'tokens/s', '50', '0.1'} <= set(shown.split()), shown
    assert 'not shown: end' in shown
    monkeypatch.delenv('COLUMNS')
    assert 'not shown' not in as_text(compare(runs))


@pytest.mark.parametrize('lost', [math.nan, 1e308], ids=['nan', 'squares-overflow'])
def test_losses_that_are_not_finite(made, lost):
    losses = decay(range(STEPS))
    dented = losses.copy()
    dented[-5] = lost
    a, b = made.write('a', loss=losses), made.write('b', lr=0.2, loss=dented)
    found = only(compare([a, b]))
    assert found.verdict == 'not decided'
    assert found.b[0] == pytest.approx(np.delete(dented[-20:], -5).mean())
    assert 'left out, not finite: 1 of b' in found.notes
    broken = losses.copy()
    broken[-50:] = lost
    found = only(compare([a, made.write('c', lr=0.2, loss=broken)]))
    assert (found.verdict, found.why) == ('not comparable', 'the last loss of c is not finite')
    all_nan = made.write('d', lr=0.3, loss=np.full(STEPS, math.inf))
    result = compare([a, all_nan])
    assert only(result).verdict == 'not comparable'
    assert 'not comparable' in as_text(result)
    assert 'nan' not in as_text(result)


def test_several_arms_share_the_confidence(made):
    a, b, c = ([3.0, 3.5, 4.0], [2.9, 3.45, 3.8], [3.2, 3.6, 4.3])
    result = compare([*made.arm('a', a, 0.1), *made.arm('b', b, 0.2), *made.arm('c', c, 0.3)])
    assert result.confidence == pytest.approx(0.975)
    assert [one.arm.letter for one in result.comparisons] == ['B', 'C']
    alone = only(compare([*made.arm('a', a, 0.1), *made.arm('b', b, 0.2)]))
    assert result.comparisons[0].interval.half > alone.interval.half


def test_verdicts_are_wrong_as_rarely_as_they_say(made):
    """200 comparisons of arms without a difference, of 3 seeds each: about 5 % may find one."""
    random = np.random.default_rng(3)
    template = {
        (lr, seed): made.write('x', seed=seed, lr=lr, val={100: 4.0, 200: 3.0})
        for lr in (0.1, 0.2)
        for seed in range(3)
    }
    wrong = 0
    for _ in range(200):
        for run in template.values():
            run.metrics['val_loss'].values[-1] = random.normal(3.0, 0.05)
        wrong += only(compare(list(template.values()))).verdict in ('better', 'worse')
    assert 2 <= wrong <= 20  # 10 expected; the standard deviation is 3.1


def test_a_missing_key_is_named(made):
    a, b = made.write('a', loss=decay(range(STEPS)), val={200: 3.0}), made.write('b', lr=0.2, loss=decay(range(STEPS)))
    assert compare([a, b]).key == 'loss'
    with pytest.raises(UserError, match=r"run-1 has no 'val_loss'\nit has: loss, tokens_per_second"):
        compare([a, b], Options(key='val_loss'))


def test_losses_of_different_tokenizers_are_compared_per_byte(tmp_path):
    runs = []
    for number, size in enumerate((9, 10)):
        path = tmp_path / str(number)
        path.mkdir()
        (path / 'config.yaml').write_text(
            f'name: {number}\nseed: 0\nbatch:\n  tokens: 10\ndata:\n  vocab_size: {size}\n'
        )
        (path / 'metrics.jsonl').write_text('{"step": 1, "val_loss": 3.0, "val_bits_per_byte": 1.5}\n')
        runs.append(read_run(path))
    assert compare(runs).key == 'val_bits_per_byte'


def called(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main(['compare', *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == code, err
    return out + err


HOSTILE = '<img src=x onerror="window.broken = 1"></script><script>window.broken = 1</script> $x$ a|b'


@pytest.fixture
def hostile(made):
    """Two arms of two seeds, whose names and values are written by an enemy."""
    runs = made.arm('base', [3.0, 3.1], 0.1) + [
        made.write(
            f'{HOSTILE}-{seed}', seed=seed, lr=json.dumps(HOSTILE), val={100: 4.0, 200: 2.0 + seed / 10 + seed / 99}
        )
        for seed in (0, 1)
    ]
    return [run.path for run in runs]


def test_files_say_what_the_terminal_says(hostile, tmp_path, capsys):
    text = called(capsys, *hostile)
    assert 'is better than A base' in text
    assert re.search(r'Where the time went\n.*\n +compilation +100.0% +100.0%\n +all time +16 s +16 s\n', text)
    for name in ('a.md', 'a.csv', 'a.json'):
        assert called(capsys, *hostile, '--out', tmp_path / 'deep' / name) == f'wrote {tmp_path}/deep/{name}\n'
    record = json.loads((tmp_path / 'deep' / 'a.json').read_text())
    (found,) = record['comparisons']
    assert (found['verdict'], found['runs_arm']) == ('better', 2)
    assert found['difference'] == pytest.approx(2.05 + 1 / 198 - 3.05)
    assert record['differences'][0]['key'] == 'optimizer.learning_rate'
    with (tmp_path / 'deep' / 'a.csv').open(newline='') as file:
        (row,) = csv.DictReader(file)
    assert float(row['low']) == pytest.approx(found['low'])
    page = (tmp_path / 'deep' / 'a.md').read_text()
    assert '<' not in page
    tables = [line for line in page.splitlines() if line.startswith('|')]
    assert {len(re.findall(r'(?<!\\)\|', line)) for line in tables} == {4, 5, 10}  # pipes in names are escaped


@needs_chromium
def test_the_page_in_a_browser(hostile, tmp_path, capsys):
    called(capsys, *hostile, '--out', tmp_path / 'a.html')
    with launched() as browser:
        page = browser.new_page()
        page.context.set_offline(True)
        requests, problems = observe(page)
        page.goto(f'file://{tmp_path}/a.html')
        page.locator('.legendtext').first.wait_for()
        assert 'is better than A base' in page.locator('section').first.inner_text()
        assert page.locator('h1').inner_text() == f'A base and B {HOSTILE}'
        drawn = page.evaluate('document.querySelector(".plot").calcdata.map(line => line.at(-1).y)')
        assert drawn == pytest.approx([3.0, 3.1, 2.0, 2.1 + 1 / 99])
        compare_picture.take(page, tmp_path / 'a.png')
        assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')
        assert not page.get_by_text('standard deviation of the final values').is_visible()
        page.locator('th', has_text='sd between seeds').locator('.info').click()
        assert page.get_by_text('standard deviation of the final values').is_visible()
        assert page.evaluate('window.broken') is None
        assert (problems, {url.partition('#')[0] for url in requests}) == ([], {f'file://{tmp_path}/a.html'})


def test_mistakes(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one, other = (str(Path(made.write(name, lr=lr, val={200: 3.0}).path)) for name, lr in (('a', 0.1), ('b', 0.2)))
    assert 'no run at runs/run-7' in called(capsys, 'runs/run-7', one, code=2)
    assert 'give two or more' in called(capsys, one, code=2)
    assert 'ends in .md, .html, .csv, .json' in called(capsys, one, other, '--out', 'a.txt', code=2)
    for flags in (['--seed-noise', '0'], ['--seed-noise', 'nan'], ['--confidence', 'nan'], ['--window', 'nan']):
        assert flags[0] in called(capsys, one, other, *flags, code=2)
    assert "has no 'los'" in called(capsys, one, other, '--key', 'los', code=2)
    Path(other, 'metrics.jsonl').write_text('')
    assert "has no 'loss'" in called(capsys, one, other, code=2)


def test_repeats_are_not_called_seeds(made):
    repeats = [made.write('a', val={200: 3.0}), made.write('again', val={200: 3.0})]
    with pytest.raises(UserError, match='2 runs differ in nothing that may change their losses'):
        compare(repeats)
    assert only(compare(repeats, Options(separate=True))).verdict == 'equal'


def test_runs_of_one_name_are_told_apart(made):
    short = made.write('same', val={100: 3.0}, steps=100)
    long = made.write('same', lr=0.2, val={100: math.nan, 200: 3.0})
    notes = only(compare([short, long])).notes
    assert 'they are compared at the end of same, 100,000 tokens' in notes[0]
    both = [made.write('same', lr=lr, val={100: math.nan, 200: 3.0}) for lr in (0.1, 0.2)]
    assert 'left out, not finite: 1 of same, 1 of same' in only(compare(both)).notes


def test_a_seed_that_is_not_a_number_is_not_known(made):
    runs = [made.write('a', seed=[1], lr=lr, val={200: 3.0}) for lr in (0.1, 0.2)]
    assert [len(arm.seeds) for arm in compare(runs).arms] == [1, 1]


def test_the_same_run_twice_is_one_run(made):
    run = made.write('a', val={200: 3.0})
    for separate in (False, True):
        with pytest.raises(UserError, match='cannot be compared with itself'):
            compare([run, run], Options(separate=separate))
    found = compare([run, made.write('b', lr=0.2, val={200: 3.0})])
    assert verdict_text(only(found), found)[0].startswith('B b and A a are equal')
    assert as_markdown(found).startswith('# A a and B b\n')
