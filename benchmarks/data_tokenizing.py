"""Measures tokens/s from text files to flat-tokens, compared with `tokenizers` and `tiktoken`; also memory.

    uv run python benchmarks/data_tokenizing.py

The text is the sources of the Python standard library, repeated as needed, in a .jsonl file. The tokenizer is a
byte-level BPE of 50,257 tokens trained on it. pretrax reads the file, encodes it, and writes a verified directory. The
others encode the same text from memory into lists, and neither read nor write. All of them use all cores.
"""

import argparse
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from machine import QUIET, busy
from result_files import circumstances, write_result

from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.stdlib import stdlib_files
from pretrax.data.tokenize.prepare import prepare
from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from pretrax.data.tokenizers.tokenizer_files import byte_letters, load_tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.system.cores import usable_cores

HERE = Path(__file__).resolve().parent
VOCABULARY = 50_257
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
TARGET = 100e6 / 60  # tokens/s


def write_text(path: Path, texts: list[str], megabytes: float) -> int:
    """Writes the texts as lines of JSON, repeated. Returns the number of repetitions."""
    size = sum(len(text.encode()) for text in texts)
    times = max(1, round(megabytes * 1e6 / size))
    with path.open('w') as stream:
        for _ in range(times):
            stream.writelines(json.dumps({'text': text}) + '\n' for text in texts)
    return times


def to_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding:
    """The same tokenizer in tiktoken."""
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary: dict[str, int] = tokenizer.settings['model']['vocab']
    names = [name for name in sorted(vocabulary, key=vocabulary.__getitem__) if name != END_OF_TEXT]
    ranks = {bytes(byte_of[letter] for letter in name): rank for rank, name in enumerate(names)}
    return tiktoken.Encoding('ours', pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def speeds(directory: Path, megabytes: float, rounds: int) -> dict[str, Any]:
    """Median speeds over rounds in which each side has a turn, and the median of the rounds' ratios."""
    texts = [document.text for document in Corpus(stdlib_files()).documents()]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    (directory / 'tokenizer.json').write_bytes(tokenizer.content)
    times = write_text(directory / 'text.jsonl', texts, megabytes)
    reference = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    encoding = to_tiktoken(tokenizer)
    expected = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    n_tokens = (expected + len(texts)) * times
    found: dict[str, list[float]] = {'pretrax': [], 'tokenizers': [], 'tiktoken': []}
    elsewhere = []
    for number in range(rounds):
        elsewhere.append(busy())
        place = directory / f'tokens-{number}'
        taken = seconds(lambda place=place: run_ours(directory / 'text.jsonl', tokenizer, place))
        found['pretrax'].append(n_tokens / taken)
        if (counted := verify(place)['train'].tokens) != n_tokens:
            raise SystemExit(f'{counted:,} tokens, but tokenizers makes {n_tokens:,}')
        found['tokenizers'].append(expected / seconds(lambda: reference.encode_batch_fast(texts)))
        found['tiktoken'].append(
            expected / seconds(lambda: encoding.encode_ordinary_batch(texts, num_threads=usable_cores()))
        )
        print(f'  round {number + 1}/{rounds}: ' + ', '.join(f'{name} {v[-1] / 1e6:.2f}' for name, v in found.items()))
    return {
        'n_tokens': n_tokens,
        'distinct_megabytes': sum(len(text.encode()) for text in texts) / 1e6,
        'times': times,
        'tokens_per_second': {name: statistics.median(values) for name, values in found.items()},
        'rounds': found,
        'ratio': {
            name: statistics.median(a / b for a, b in zip(found['pretrax'], found[name], strict=True))
            for name in ('tokenizers', 'tiktoken')
        },
        'busy': statistics.median(elsewhere),
    }


def run_ours(text: Path, tokenizer: Tokenizer, place: Path) -> None:
    corpus = Corpus(find_files(str(text)))
    prepare(corpus, place.parent, lambda _: None, tokenizer=tokenizer, vocab_size=0, validation=0.0, out=place)


def memory(directory: Path, n_documents: int) -> dict[str, Any]:
    """Peak memory of a process that tokenizes `n_documents` short documents, and of its largest worker."""
    text = directory / f'{n_documents}.jsonl'
    with text.open('w') as stream:
        for n in range(n_documents):
            stream.write(f'{{"text": "Document {n} of many, with {n * n % 997} in it."}}\n')
    command = [sys.executable, __file__, '--child', str(text), str(directory / 'tokenizer.json')]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    text.unlink()
    return {'documents': n_documents, **json.loads(done.stdout.splitlines()[-1])}


def child(text: Path, tokenizer: Path) -> None:
    """Runs in a process of its own, so that the peak contains nothing else."""
    place = text.parent / f'tokens-of-{text.stem}'
    taken = seconds(lambda: run_ours(text, load_tokenizer(tokenizer), place))
    peaks = [resource.getrusage(of).ru_maxrss / 1024 for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({'mebibytes': peaks[0], 'worker_mebibytes': peaks[1], 'seconds': taken}))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    speed = result['speed']
    ours = speed['tokens_per_second']['pretrax']
    lines = [
        f'# Tokenizing, {result["date"]}', '', f'`{result["command"]}`', '',
        f'{result["processor"]}, {result["cores"]} cores; '
        + ', '.join(f'{name} {version}' for name, version in result['versions'].items()) + '.', '',
    ]  # fmt: skip
    if speed['busy'] > QUIET:
        lines += [f'**Not a fair comparison: other programs used {speed["busy"]:.0%} of the cores.**', '']
    lines += [
        f'{speed["n_tokens"] / 1e6:,.0f} M tokens of a byte-level BPE of {VOCABULARY:,}: '
        f'{speed["distinct_megabytes"]:.0f} MB '
        f'of source code, repeated {speed["times"]} times. pretrax reads .jsonl and writes flat-tokens; the others '
        'encode in memory.',
        '', '| | M tokens/s | M tokens/minute | pretrax is faster by |', '|---|---|---|---|',
    ]  # fmt: skip
    for name, value in speed['tokens_per_second'].items():
        ratio = f'{speed["ratio"][name]:.1f}x' if name in speed['ratio'] else ''
        lines.append(f'| {name} | {value / 1e6:.2f} | {value * 60 / 1e6:,.0f} | {ratio} |')
    lines += ['', f'Target: 100 M tokens/minute, {"reached" if ours >= TARGET else "not reached"}.', '']
    lines += ['| documents | seconds | MiB, main process | MiB, largest worker |', '|---|---|---|---|']
    for row in result['memory']:
        lines.append(
            f'| {row["documents"]:,} | {row["seconds"]:.0f} | {row["mebibytes"]:.0f} | {row["worker_mebibytes"]:.0f} |'
        )
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--megabytes', type=float, default=500, help='size of the text')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--documents', type=int, nargs='*', default=[1_000_000, 20_000_000], help='to compare memory')
    parser.add_argument('--out', type=Path, default=HERE / 'results')
    parser.add_argument('--child', type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(*arguments.child)
    with tempfile.TemporaryDirectory() as directory:
        speed = speeds(Path(directory), arguments.megabytes, arguments.rounds)
        rows = [memory(Path(directory), n) for n in arguments.documents]
    result = {
        **circumstances(),
        'versions': {
            name: importlib.metadata.version(name) for name in ('pretrax', 'fastokens', 'tokenizers', 'tiktoken')
        },
        'speed': speed, 'memory': rows,
    }  # fmt: skip
    write_result(result, table, arguments.out, 'data-tokenizing')
    return None


if __name__ == '__main__':
    main()
