"""The start-up report: its essential lines in the terminal, all of it in `startup.txt`."""

from pathlib import Path

from pretrax import config_from_values, pretrain
from pretrax.run.startup import StartupLine, StartupReport
from runs import BIGRAM, Quiet


def start(values, **options):
    """The lines that a run shows before it compiles its step."""
    progress = Quiet()
    pretrain(config_from_values(values | {'steps': 1, 'schedule': {}}), progress=progress, **options)
    [end] = [i for i, line in enumerate(progress.said) if ' compiled step ' in line or line.startswith('compiled ')]
    return progress.said[:end]


def test_the_terminal_shows_ten_lines_and_the_file_has_all(values):
    shown = start(values)
    assert len(shown) <= 10, shown
    topics = [line.partition(':')[0] for line in shown]
    assert {'text', 'tokens', 'devices', 'mesh', 'batch', 'model', 'compute', 'memory', 'mfu'} == set(topics)
    lines = (Path(values['run_dir']) / 'startup.txt').read_text().splitlines()
    assert set(shown) < set(lines)
    assert {'tokenizer', 'documents', 'placement', 'architecture', 'attention', 'layers', 'activations'} <= {
        line.partition(':')[0] for line in lines
    }


def test_verbose_shows_all_lines(values):
    values |= {'model': BIGRAM}
    shown = start(values, verbose=True)
    assert (Path(values['run_dir']) / 'startup.txt').read_text().splitlines() == shown


def test_warnings_and_lines_without_a_topic_are_always_shown():
    shown = []
    startup = StartupReport(shown.append, verbose=False)
    for text in ('order: by seed', 'WARNING: order: odd', 'a sentence about the data: it is long', 'model: small'):
        startup.report(text)
    startup.extend([StartupLine('layers', 'SLOW: unrolled')])
    assert shown == [
        'WARNING: order: odd',
        'a sentence about the data: it is long',
        'model: small',
        'layers: SLOW: unrolled',
    ]
    assert len(startup.lines) == 5
