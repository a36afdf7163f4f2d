"""Long campaigns go on where they were interrupted, with seeds that were not used before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark_scripts import benchmark_script

bit_flips, kills = benchmark_script('bit_flips'), benchmark_script('kills')
federation_kills = benchmark_script('federation_kills')


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(script, *arguments):
        monkeypatch.setattr(sys, 'argv', [script.__name__, *arguments])
        return script.main()

    return run


def test_bit_flips_continue_after_an_interruption_and_count_together(run, monkeypatch, tmp_path):
    draws = []

    def make(directory, size, chunks):
        for number, rng in chunks:
            draws.append((number, int(rng.integers(10**9))))
            if len(draws) == 3:
                raise KeyboardInterrupt
            yield {'injected': size, 'not seen': number}

    monkeypatch.setattr(bit_flips, 'PARTS', dict.fromkeys(('a', 'b', 'c', 'd'), (10, make)))
    counts = ['--flips', '45', '--state-flips', '0', '--file-flips', '0', '--clean', '0', '--directory', str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        run(bit_flips, *counts)
    run(bit_flips, *counts)
    assert [number for number, _ in draws] == [0, 1, 2, 2, 3, 4]
    assert draws[2] == draws[3]
    assert len(set(draws)) == 5
    [result] = tmp_path.glob('*.json')
    assert json.loads(result.read_text())['parts']['a'] == {'injected': 50, 'not seen': 10}


def test_clean_chunks_of_one_mesh_share_a_run(monkeypatch, tmp_path):
    started = []

    def tiny_run(directory, steps, seed, mesh, model):
        started.append((seed, steps, mesh))
        code = f"""
import json, pathlib, time
time.sleep(0.3)
pathlib.Path('run').mkdir()
for n in range(10, {steps} + 1, 10):
    line = json.dumps({{'step': n, 'replays': n, 'replay_differences': n // 30}})
    open('run/metrics.jsonl', 'a').write(line + '\\n')
    time.sleep(0.01)
"""
        directory.mkdir()
        return subprocess.Popen([sys.executable, '-c', code], cwd=directory)

    monkeypatch.setattr(bit_flips, 'tiny_run', tiny_run)
    monkeypatch.setattr(bit_flips.time, 'sleep', lambda seconds: None)
    chunks = iter([(number, None) for number in range(5, 9)])
    rows = list(bit_flips.chunks_of_clean_steps(tmp_path, 20, chunks))
    assert started == [(5, 20, {'d': 2, 'e': 2}), (6, 60, {'d': 2})]
    assert [sum(row[key] for row in rows) for key in ('replays', 'differences')] == [80, 2]
    assert sum(row.get('replays, d=2', 0) for row in rows) == 60


def test_kills_are_divided_among_features_and_continue_after_an_interruption(run, monkeypatch, tmp_path):
    done = []

    def campaign(feature, count, end, directory, processes, seed):
        if len(done) == 3:
            done.append(None)
            raise KeyboardInterrupt
        done.append((feature, count, seed))
        return {
            'feature': feature, 'kills': {'kill': count}, 'survived': count, 'steps': 9, 'different': 0,
            'lost': [seed] * count, 'recovered': [1.0],
        }  # fmt: skip

    monkeypatch.setattr(kills, 'campaign', campaign)
    arguments = ['dense', 'ema', '--kills', '25', '--each', '6', '--out', str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        run(kills, *arguments)
    assert run(kills, *arguments) == 0
    expected = [('dense', 6, 0), ('ema', 6, 0), ('dense', 6, 1), None, ('ema', 6, 1), ('dense', 1, 2)]
    assert done == expected
    [table] = tmp_path.glob('*.md')
    assert '| dense | 13 | 13 | 27 | 0 | 1, 2 | 1.0 |' in table.read_text()
    assert 'Steps lost, and after how many kills: 0: 12, 1: 12, 2: 1.' in table.read_text()


def test_federations_are_killed_in_turn_and_continue_after_an_interruption(run, monkeypatch, tmp_path):
    done = []

    def trained(name, directory, cache, seed, reference, kills=0):
        if len(done) == 5:
            done.append(None)
            raise KeyboardInterrupt
        done.append((name, seed, reference))
        row = {'case': name, 'seed': seed, 'kills': {'moment': 10} if reference else {}, 'problems': []}
        return {'learned': name}, row | {'rounds': 9, 'incomplete': 0, 'seconds': 20.0}

    monkeypatch.setattr(federation_kills, 'trained', trained)
    arguments = ['--only', 'gs-f32', 's3-bf16', '--kills', '35', '--out', str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        run(federation_kills, *arguments)
    assert run(federation_kills, *arguments) == 0
    whole = [('gs-f32', 'gs-f32', None), ('s3-bf16', 's3-bf16', None)]
    killed = [(name, f'{name}-{n}', {'learned': name}) for n in (0, 1) for name in ('gs-f32', 's3-bf16')]
    assert done == [whole[0], killed[0], whole[1], killed[1], killed[2], None, whole[1], killed[3]]
    [table] = tmp_path.glob('*.md')
    assert '| all | 4 | 40 | 36 | 0 | 0 | 2.0 |' in table.read_text()


@pytest.mark.nightly
def test_islands_that_are_killed_learn_what_others_learn(tmp_path):
    script = Path(str(federation_kills.__file__))
    command = [sys.executable, script, '--only', 's3-bf16', '--kills', '4', '--each', '4', '--out', tmp_path]
    assert subprocess.run(command, cwd=script.parent).returncode == 0
