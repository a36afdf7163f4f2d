"""What is shown of a command line."""

from pretrax.system.command_line import without_secrets


def test_a_command_is_kept_without_secrets():
    given = [
        'pretrax',
        'train',
        'a.yaml',
        'batch.tokens=512',
        'log.notify=https://hook/x',
        'log.mlflow=http://me:pw@host/',
    ]
    assert without_secrets([*given, 'data.api_key=abc']) == [
        'pretrax', 'train', 'a.yaml', 'batch.tokens=512', 'log.notify=***', 'log.mlflow=http://***@host/',
        'data.api_key=***',
    ]  # fmt: skip


def test_variables_of_a_launch_are_not_shown():
    given = ['launch', 'ssh', '--env', 'WANDB_KEY=abc', '--env=A=b', '--env', 'HOME', 'steps=5']
    shown = ['launch', 'ssh', '--env', 'WANDB_KEY=***', '--env=A=***', '--env', 'HOME', 'steps=5']
    assert without_secrets(given) == shown
