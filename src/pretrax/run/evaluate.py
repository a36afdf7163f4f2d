"""Evaluation: the loss on held-out text."""

import math

import jax

from pretrax.errors import Report
from pretrax.run.setup import Run
from pretrax.train.step import Weights, make_evaluate


class Evaluation:
    """The loss on `eval.batches` batches of held-out text: for each part of a mixture, and their weighted mean."""

    def __init__(self, run: Run):
        self._run = run
        self._terms = make_evaluate(run.recipe.model)

    @classmethod
    def of(cls, run: Run, report: Report) -> 'Evaluation | None':
        """The evaluation of a run; None if `eval.every` is 0 or the data has no held-out part."""
        if not run.config.eval.every:
            return None
        if not run.source.validation_parts:
            report('eval: the data has no held-out part, so there is no evaluation')
            return None
        return cls(run)

    def losses(self, weights: Weights, batches: int | None = None) -> dict[str, float]:
        """`val_loss`, `val_loss/<part>` and `val_bits_per_byte`, in nats per token and bits per byte.

        Args:
            weights: to evaluate.
            batches: per part; None: `eval.batches`.
        """
        parts, count = self._run.source.validation_parts, batches or self._run.config.eval.batches
        by_part = {part: self._loss(weights, part, count) for part in parts}
        nll = sum(weight * by_part[part] for part, (weight, _) in parts.items())
        named = {f'val_loss/{part}': loss for part, loss in by_part.items() if part}
        per_token = self._run.source.validation_bytes_per_token
        bits = {'val_bits_per_byte': bits_per_byte(nll, per_token)} if per_token else {}
        return {'val_loss': nll, **named, **bits}

    def _loss(self, weights: Weights, part: str, batches: int) -> float:
        """The mean loss over the held-out tokens of a part, summed on the host in double precision."""
        sums: dict[str, tuple[float, float]] = {}
        for index in range(batches):
            terms = jax.device_get(self._terms(weights, self._run.validation(index, part)))
            for name, (numerator, denominator) in terms.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(numerator), before[1] + float(denominator)
        means = {name: top / bottom if bottom else math.nan for name, (top, bottom) in sums.items()}
        return means.get('nll', sum(means.values()))


def bits_per_byte(nll: float, bytes_per_token: float) -> float:
    """Nats per token -> bits per byte of text, which do not depend on the tokenizer."""
    return nll / math.log(2) / bytes_per_token
