"""Runs every verb once, in one process, with paths that begin with `../` and have spaces and other alphabets.

    python tests/every_verb.py

`.ci/run` does so with all extras and the plugins of all accelerators installed: what a verb does must not depend on
them.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

MODEL = {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}
RUN = {
    'name': 'small', 'steps': 2, 'model': MODEL, 'batch': {'tokens': 64, 'sequence_length': 16}, 'eval': {'every': 2},
    'optimizer': {'learning_rate': 0.01}, 'schedule': {'name': 'linear', 'warmup': 1}, 'precision': {'compute': 'f32'},
    'mesh': {'r': 1, 'd': 1}, 'log': {'every': 1}, 'sample': {'every': 2, 'tokens': 2, 'prompts': ['a']},
}  # fmt: skip
PLACE = 'Läufe 語 [1] 50%#x'  # beside the working directory
# Each as a shell would split it; {} is the place.
COMMANDS = """
    data train-tokenizer|{}/text|--out|{}/tok/tokenizer.json|--vocab-size|300
    data index|{}/text/one.jsonl
    data tokenize|{}/text|data.tokenizer={}/tok/tokenizer.json|--out|{}/tokens
    data tokenize|{}/text/one.jsonl|data.tokenizer={}/tok|--out|{}/more
    data inspect|{}/tokens|--plot|{}/lengths.svg
    data verify|{}/tokens
    data merge|{}/tokens|{}/more|--out|{}/merged
    data shuffle|{}/tokens|--out|{}/shuffled
    data split|{}/more|--out|{}/halves|--fraction|0.5
    data convert|{}/tokens|--out|{}/converted|--to|nanogpt
    config show|{}/deep/er/run.yaml
    config diff|{}/run.yaml|{}/deep/er/run.yaml
    train|{}/run.yaml|--dry-run|run_dir={}/runs/dry
    train|{}/deep/er/run.yaml|run_dir={}/runs/q|log.profile=2
    train|{}/deep/er/run.yaml|run_dir={}/runs/q|log.profile=2|steps=8
    train|{}/run.yaml|run_dir={}/runs/text|data.tokens=null|data.text={}/text|data.tokenizer={}/tok/tokenizer.json
    train|{}/run.yaml|run_dir={}/runs/warm|init_from={}/runs/q|data.validation_tokens={}/more
    train|{}/run.yaml|run_dir={}/runs/student|distill.teacher={}/runs/q
    distill prepare|{}/run.yaml|distill.teacher={}/runs/q|--out|{}/taught
    train|{}/run.yaml|run_dir={}/runs/taught|distill.cache={}/taught
    plan|{}/run.yaml|--topology|h200
    compile|{}/run.yaml|--save|{}/a.step
    generate|{}/runs/q|--prompt|a|--tokens|2
    generate|{}/runs/q/checkpoints/8|--prompts|{}/prompts.jsonl|--out|{}/answers.jsonl|--tokens|2
    eval|{}/runs/q|--text|t={}/text/one.jsonl|--limit|1|--json|{}/scores.json
    export|{}/runs/q|{}/exported
    import|{}/exported|--out|{}/runs/imported
    eval|{}/exported|--text|t={}/text/one.jsonl|--limit|1
    generate|{}/runs/imported|--prompt|a|--tokens|2
    checkpoint list|{}/runs/q
    checkpoint inspect|{}/runs/q
    checkpoint verify|{}/runs/q
    checkpoint diff|{}/runs/q/checkpoints/2|{}/runs/q/checkpoints/8
    checkpoint average|{}/runs/q|--last|2|--out|{}/runs/average
    checkpoint export-weights|{}/runs/q|{}/weights
    data show|{}/runs/q|--step|1
    data contamination|{}/runs/text|--file|{}/text/one.jsonl|--json|{}/contamination.json
    runs|{}/runs
    plot|{}/runs/q|--out|{}/loss.svg
    compare|{}/runs/q|{}/runs/warm
    report|{}/runs/q|--out|{}/q.html
    trace|{}/runs/q
    bench|{}/bench.yaml|--out|{}/bench
    scaling|{}/laws.yaml|--out|{}/laws
    search|{}/search.yaml|--out|{}/search
    mup check|{}/run.yaml|--widths|16,32|--steps|1|--seeds|1|--tolerance|9|-o|{}/mup.svg
    init|{}/fresh
    import-config|nanogpt|{}/nano.py
    launch local|{}/run.yaml|--processes|1|run_dir={}/runs/local
    launch status|{}/runs/local
    launch slurm|{}/run.yaml|run_dir={}/runs/slurm|--nodes|1|--time|1h|--dry-run
"""


def prepare(place: Path) -> None:
    (place / 'text').mkdir(parents=True)
    (place / 'deep' / 'er').mkdir(parents=True)
    words = [f'{chr(97 + i % 26)}{chr(97 + i % 7)}{i % 9}' for i in range(400)]
    rows = [' '.join(words[i : i + 40]) for i in range(0, 360, 5)]
    for name in ('one.jsonl', 'two.jsonl'):
        (place / 'text' / name).write_text(''.join(json.dumps({'text': f'{name} {row}'}) + '\n' for row in rows))
    tokens = f'../{PLACE}/tokens'
    (place / 'run.yaml').write_text(json.dumps(RUN | {'data': {'tokens': tokens}}))
    # Relative to the file: the base and the plugin. Relative to the working directory: data.
    (place / 'plugin.py').write_text('')
    (place / 'deep' / 'er' / 'run.yaml').write_text(
        json.dumps({'extends': '../../run.yaml', 'plugins': ['../../plugin.py']})
    )
    (place / 'prompts.jsonl').write_text('{"prompt": "a"}\n')
    (place / 'bench.yaml').write_text(
        json.dumps({'base': 'deep/../run.yaml', 'grid': {'batch.tokens': [64]}, 'steps': 1, 'warmup': 1})
    )
    (place / 'search.yaml').write_text(
        json.dumps(
            {
                'base': 'deep/../run.yaml',
                'parameters': {'optimizer.learning_rate': {'low': 0.01, 'high': 0.1}},
                'trials': 1,
            }
        )
    )
    (place / 'points.csv').write_text(
        'params,tokens,loss\n'
        + ''.join(
            f'{n},{tokens * n},{2 + 90 / n**0.3 + 90 / (tokens * n) ** 0.3}\n'
            for n in (10**5, 10**6, 10**7)
            for tokens in (10, 20, 40)
        )
    )
    (place / 'laws.yaml').write_text(json.dumps({'points': 'deep/../points.csv', 'approaches': [3], 'bootstrap': 0}))
    (place / 'nano.py').write_text('n_layer = 1\nn_head = 1\nn_embd = 8\n')


def run_all(directory: Path, commands: str = COMMANDS) -> dict[str, str]:
    """What each verb that failed printed, by command."""
    from pretrax.cli import main

    here = directory / 'here'
    here.mkdir()
    prepare(directory / PLACE)
    failed = {}
    for line in filter(None, map(str.strip, commands.splitlines())):
        words = [word.replace('{}', f'../{PLACE}') for word in line.split('|')]
        began = time.process_time()
        output = directory / 'output.txt'
        with (
            output.open('w') as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
            contextlib.chdir(here),
        ):
            try:
                main([*words[0].split(), *words[1:]])
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
        print(f'{time.process_time() - began:5.1f} s  {line}', flush=True)
        if code != 0:
            failed[line] = f'exit code {code}\n{output.read_text()[-3000:]}'
    return failed


if __name__ == '__main__':
    os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')  # programs that run twice need none
    with tempfile.TemporaryDirectory() as scratch:
        os.environ['XDG_CACHE_HOME'] = f'{scratch}/cache'
        found = run_all(Path(scratch))
    print('\n'.join(f'{line}: {text}' for line, text in found.items()) or 'every verb: done')
    sys.exit(bool(found))
