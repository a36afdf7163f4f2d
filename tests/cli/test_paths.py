"""Verbs take `../` and names with spaces, brackets and other alphabets; `.ci/run` tries all verbs (`every_verb.py`)."""

import every_verb

COMMANDS = """
    data tokenize|{}/text|data.tokenizer=bytes|--out|{}/tokens
    data inspect|{}/tokens
    data shuffle|{}/tokens|--out|{}/shuffled
    config show|{}/deep/er/run.yaml
    train|{}/deep/er/run.yaml|run_dir={}/runs/q|mesh.r=8|batch.tokens=128|model={name: bigram-of-tests}|sample.every=0
    checkpoint verify|{}/runs/q
    data show|{}/runs/q|--step|1
    plot|{}/runs/q|--out|{}/loss.svg
    runs|{}/runs
"""


def test_paths_above_the_working_directory(tmp_path):
    assert every_verb.run_all(tmp_path, COMMANDS) == {}
