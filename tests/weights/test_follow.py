"""Following a run: its newest checkpoint is used, also after a rollback or a removal;
one that does not fit is left out.
"""

import dataclasses
import threading

from pretrax.weights import trained as module
from pretrax.weights.trained import follow


@dataclasses.dataclass
class Trained:
    """A checkpoint whose weights are its step; that of step 4 is damaged."""

    step: int
    directory: str = 'run/checkpoints'

    @property
    def description(self):
        return {'config': {'model': {'n_layers': 2}}, 'tokenizer': 'another' if self.step == 7 else 'ours'}

    def at(self, step):
        return Trained(step)

    def weights(self):
        if self.step == 4:
            raise OSError('weights.0: No such file or directory\nmore')
        return f'weights {self.step}'


def test_the_newest_checkpoint_is_used_unless_it_cannot_be_read(monkeypatch):
    looks = iter([
        [2], [], [2, 3], [2, 3, 4], [2, 3, 4], [2, 3, 4, 5], [2], OSError('disk'), [2, 6], [], [], [6], [6, 7], [6, 8],
    ])  # fmt: skip
    stop, used, reported = threading.Event(), [], []

    def steps_in(directory):
        assert directory == 'run/checkpoints'
        found = next(looks, None)
        if found is None:
            stop.set()
            return [8]
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(module, 'steps_in', steps_in)
    monkeypatch.setattr(module, 'POLL_SECONDS', 0.001)
    follow(Trained(2), lambda weights, step: used.append((weights, step)), reported.append, stop)
    assert used == [(f'weights {step}', step) for step in (3, 5, 2, 6, 6, 8)]
    assert [line.removeprefix('run/checkpoints: cannot follow: ') for line in reported] == [
        'it has no checkpoint now; the weights of step 2 stay in use',
        'weights.0: No such file or directory',
        'disk',
        'it has no checkpoint now; the weights of step 6 stay in use',  # once for two looks
        'step 7 has another tokenizer; the weights of step 6 stay in use',
    ]
