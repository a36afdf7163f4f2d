"""Scores of lm_eval against `pretrax serve`, and with its own `hf` backend on the export of the same checkpoint.

    python benchmarks/lm_eval_scores.py runs/quickstart --python ENV/bin/python

ENV is an environment of its own with `lm_eval[api]`, `accelerate`, `torch` and `transformers`. The tasks are made from
files of this repository, so there is no download: multiple choice (the real next line among those of other files), the
likelihood of a text, and generation until a stop string. Exit code 1 if a score differs by more than --tolerance.
"""

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / 'src' / 'pretrax'
PRETRAX = Path(sys.executable).with_name('pretrax')
TASKS = {
    'next_line': {
        'output_type': 'multiple_choice', 'doc_to_text': '{{context}}', 'doc_to_target': '{{label}}',
        'doc_to_choice': '{{choices}}', 'target_delimiter': '',
        'metric_list': [{'metric': 'acc', 'aggregation': 'mean'}, {'metric': 'acc_norm', 'aggregation': 'mean'}],
    },
    'likelihood': {
        'output_type': 'loglikelihood_rolling', 'doc_to_text': '', 'doc_to_target': '{{context}}',
        'metric_list': [
            {'metric': 'word_perplexity', 'aggregation': 'weighted_perplexity'},
            {'metric': 'bits_per_byte', 'aggregation': 'bits_per_byte'},
        ],
    },
    'generation': {
        'output_type': 'generate_until', 'doc_to_text': '{{context}}', 'doc_to_target': '{{choices[label]}}',
        'generation_kwargs': {'until': ['):'], 'max_gen_toks': 24, 'do_sample': False, 'temperature': 0},
        'metric_list': [{'metric': 'exact_match', 'aggregation': 'mean'}],
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='a run, or one of its checkpoints')
    parser.add_argument(
        '--python', type=Path, required=True, help='of an environment with lm_eval, torch and transformers'
    )
    parser.add_argument('--documents', type=int, default=40)
    parser.add_argument('--max-length', type=int, default=256)
    parser.add_argument('--tolerance', type=float, default=1e-4, help='relative')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tasks(directory, options.documents)
        subprocess.run([PRETRAX, 'export', options.run, directory / 'export'], check=True)
        length = options.max_length
        hf = f'pretrained={directory / "export"},dtype=float32,max_length={length}'
        wanted = evaluate(options.python, directory, 'hf', hf)
        with serving(options.run, length) as url:
            ours = (
                f'model={Path(options.run).name},base_url={url}/v1/completions,tokenizer={directory / "export"},'
                f'tokenizer_backend=huggingface,num_concurrent=4,max_length={length}'
            )
            found = evaluate(options.python, directory, 'local-completions', ours)
    print(f'{"task":<12} {"metric":<18} {"hf":>12} {"pretrax serve":>14}')
    for (task, metric), value in wanted['scores'].items():
        print(f'{task:<12} {metric:<18} {value:>12.6f} {found["scores"][task, metric]:>14.6f}')
    for key, value in wanted['samples'].items():
        if found['samples'][key] != value:
            print(f'document {key}: hf wrote {value!r}, pretrax {found["samples"][key]!r}')
    same = sum(found['samples'][key] == value for key, value in wanted['samples'].items())
    print(f'generated texts that are equal: {same} of {len(wanted["samples"])}')
    close = [
        math.isclose(value, found['scores'][key], rel_tol=options.tolerance) for key, value in wanted['scores'].items()
    ]
    return 0 if all(close) else 1


def write_tasks(directory: Path, count: int) -> None:
    """The tasks with their documents: functions of the source, and the line that follows."""
    draw, examples = random.Random(0), []
    for path in sorted(SOURCE.rglob('*.py')):
        lines = path.read_text().splitlines()
        examples += [
            ('\n'.join(lines[max(i - 3, 0) : i]) + '\n', lines[i]) for i in range(8, len(lines)) if len(lines[i]) > 20
        ]
    documents = []
    for context, line in draw.sample(examples, count):
        choices = [other for _, other in draw.sample(examples, 3)]
        label = draw.randrange(4)
        choices.insert(label, line)
        documents.append({'context': context, 'choices': choices, 'label': label})
    (directory / 'documents.jsonl').write_text(''.join(json.dumps(document) + '\n' for document in documents))
    for name, task in TASKS.items():
        dataset = {'data_files': {'test': str(directory / 'documents.jsonl')}}
        about = {
            'task': name,
            'dataset_path': 'json',
            'dataset_kwargs': dataset,
            'test_split': 'test',
            'metadata': {'version': 1},
        }
        (directory / f'{name}.yaml').write_text(json.dumps(about | task))  # YAML reads JSON


@contextlib.contextmanager
def serving(run: str, length: int) -> Iterator[str]:
    command = [PRETRAX, 'serve', run, '--port', '0', '--max-length', str(length)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = next(line for line in process.stdout if line.startswith('serving: '))
        try:
            yield line.split()[-1].removesuffix('/v1')
        finally:
            process.terminate()


def evaluate(python: Path, directory: Path, model: str, arguments: str) -> dict[str, Any]:
    """{(task, metric): score}, and {(task, document): generated text}."""
    out = directory / model
    command = [
        python, '-m', 'lm_eval', '--model', model, '--model_args', arguments, '--include_path', directory,
        '--tasks', ','.join(TASKS), '--output_path', out, '--log_samples', '--batch_size', '1', '--device', 'cpu',
    ]  # fmt: skip
    offline = {
        'HF_HUB_OFFLINE': '1',
        'HF_DATASETS_OFFLINE': '1',
        'HF_HOME': str(directory / 'cache'),
        'OPENAI_API_KEY': '-',
    }
    done = subprocess.run(
        command, env=os.environ | offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(done.stdout)
    (results,) = out.rglob('results_*.json')
    scores = {
        (task, metric.removesuffix(',none')): value
        for task, values in json.loads(results.read_text())['results'].items()
        for metric, value in values.items()
        if isinstance(value, float) and 'stderr' not in metric
    }
    (generated,) = out.rglob('samples_generation_*.jsonl')
    samples = [json.loads(line) for line in generated.read_text().splitlines()]
    return {'scores': scores, 'samples': {sample['doc_id']: sample['resps'][0][0] for sample in samples}}


if __name__ == '__main__':
    sys.exit(main())
