"""`pretrax checkpoint verify`."""

from checkpoint_verbs import said
from pretrax.checkpoint import steps_in


def test_verify_reads_every_byte_and_names_the_file(run, capsys):
    code, out, err = said(capsys, 'verify', run)
    assert (code or 0, err) == (0, '')
    assert out.count('all as they were written') == len(steps_in(run / 'checkpoints'))
    array = next((run / 'checkpoints' / '6' / 'state' / 'weights.embed').glob('[0-9]*'))
    content = bytearray(array.read_bytes())
    content[7] ^= 1
    array.write_bytes(content)
    code, out, err = said(capsys, 'verify', run)
    assert code == 2
    assert f'state/weights.embed/{array.name} differs from what was written' in err
    assert out.count('all as they were written') == len(steps_in(run / 'checkpoints')) - 1
    assert said(capsys, 'verify', run / 'checkpoints' / '8')[0] in (0, None)
