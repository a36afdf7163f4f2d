"""Samples are written with their prompts, and those of steps that are trained again are removed."""

import json

from pretrax.observe.step_lines import SampleLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_are_written_in_the_order_of_prompts(tmp_path):
    log = SampleLog(tmp_path)
    assert not (tmp_path / 'samples.jsonl').exists()
    log.write(5, ['def ', 'class '], ['def f():\n', 'class \u2028</script>'])
    log.close()
    assert lines(tmp_path / 'samples.jsonl') == [
        {'step': 5, 'prompt': 'def ', 'text': 'def f():\n'},
        {'step': 5, 'prompt': 'class ', 'text': 'class \u2028</script>'},
    ]


def test_a_resumed_run_removes_samples_of_later_steps_and_a_torn_line(tmp_path):
    log = SampleLog(tmp_path)
    for step in (5, 10, 15):
        log.write(step, ['a'], [f'a {step}'])
    log.close()
    path = tmp_path / 'samples.jsonl'
    path.write_text(path.read_text() + '{"step": 4, "te')
    said = []
    log = SampleLog(tmp_path, 10, said.append)
    log.write(11, ['a'], ['again'])
    log.rewind(5)
    log.write(6, ['a'], ['once more'])
    log.close()
    assert [(line['step'], line['text']) for line in lines(path)] == [(5, 'a 5'), (6, 'once more')]
    assert said == [
        'samples.jsonl: removed 1 line left incomplete when the run was stopped',
        'samples.jsonl: removed 1 line after step 10; those steps are trained again',
        'samples.jsonl: removed 2 lines after step 5; those steps are trained again',
    ]
