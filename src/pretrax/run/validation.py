"""Evaluation: the loss on held-out text, and tasks."""

import math
from collections.abc import Set as AbstractSet

import jax

from pretrax.errors import Report
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.results import TASKS, run_tasks
from pretrax.evaluate.task import Settings, choose
from pretrax.run.setup import Run
from pretrax.train.step import TrainState, Weights
from pretrax.train.validation import make_evaluate


class Evaluation:
    """Tasks, and the loss on `eval.batches` batches of held-out text: per part of a mixture, and the weighted mean."""

    def __init__(self, run: Run, report: Report = print):
        section = run.eval
        self._run, self._report = run, report
        self._terms = make_evaluate(run.recipe.model)
        self.has_losses = bool(section.every and run.source.validation_parts)
        self._tasks = choose(section.tasks, TASKS) if section.tasks_every else []
        self._model: LanguageModel | None = None
        self._without_targets: set[str] = set()  # parts that were reported to have none

    @classmethod
    def create(cls, run: Run, report: Report) -> 'Evaluation | None':
        """The evaluation of a run, if there is anything to evaluate. Raises UserError for an unknown task."""
        section = run.eval
        if section.every and not run.source.validation_parts:
            report('eval: the data has no held-out part, so there is no validation loss')
        evaluation = cls(run, report)
        return evaluation if evaluation.has_losses or evaluation._tasks else None

    def is_due(self, number: int) -> bool:
        """Whether there is something to evaluate after a step."""
        return self._are_losses_due(number) or self._are_tasks_due(number)

    def evaluate_if_due(self, state: TrainState, number: int) -> dict[str, float]:
        """What is due after a step: `losses_of_state`, and the metrics of tasks."""
        losses = self.losses_of_state(state) if self._are_losses_due(number) else {}
        return losses | (self._task_metrics(state.weights) if self._are_tasks_due(number) else {})

    def losses_of_state(self, state: TrainState) -> dict[str, float]:
        """`losses` of the weights, and `val_loss_ema` of their moving average if there is one."""
        average = {} if state.ema is None else self.losses(state.ema)
        return self.losses(state.weights) | ({'val_loss_ema': average['val_loss']} if 'val_loss' in average else {})

    def losses(self, weights: Weights, batches: int | None = None) -> dict[str, float]:
        """`val_loss`, `val_loss/<part>` and `val_bits_per_byte`, in nats per token and bits per byte.

        A part without a target in its batches has no loss, which is reported once, and the mean is that of the others.

        Args:
            batches: per part; None: `eval.batches`.
        """
        parts, count = self._run.source.validation_parts, batches or self._run.eval.batches
        losses = {part: self._loss(weights, part, count) for part in parts}
        by_part = {part: loss for part, loss in losses.items() if loss is not None}
        self._report_without_targets(parts.keys() - by_part.keys(), count)
        if not by_part:
            return {}
        nll = sum(parts[part][0] * loss for part, loss in by_part.items())
        if len(by_part) < len(parts):
            nll /= sum(parts[part][0] for part in by_part)
        named = {f'val_loss/{part}': loss for part, loss in by_part.items() if part}
        per_token = self._run.source.validation_bytes_per_token
        bits = {'val_bits_per_byte': bits_per_byte(nll, per_token)} if per_token and len(by_part) == len(parts) else {}
        return {'val_loss': nll, **named, **bits}

    def _are_losses_due(self, number: int) -> bool:
        return self.has_losses and self._is_at(self._run.eval.every, number)

    def _are_tasks_due(self, number: int) -> bool:
        return bool(self._tasks) and self._is_at(self._run.eval.tasks_every, number)

    def _is_at(self, every: int, number: int) -> bool:
        return number % every == 0 or number == self._run.steps

    def _task_metrics(self, weights: Weights) -> dict[str, float]:
        """The metrics of the tasks. A task that fails is reported, and training goes on."""
        run = self._run
        if self._model is None:
            tokenizer, length = getattr(run.source, 'tokenizer', None), run.size.sequence_length
            self._model = LanguageModel(run.recipe.model, weights, tokenizer, length=length)
        else:
            self._model.use(weights)
        try:
            return run_tasks(self._model, self._tasks, Settings(limit=run.eval.tasks_limit), self._report).flat()
        finally:
            self._model.forget()

    def _report_without_targets(self, parts: AbstractSet[str], batches: int) -> None:
        for part in sorted(parts - self._without_targets):
            name = f' of {part}' if part else ''
            self._report(
                f'WARNING: eval: the first {batches} batches of the held-out text{name} have no target: it has no '
                'validation '
                'loss; use a longer batch.sequence_length, larger eval.batches, or another data.validation'
            )
        self._without_targets |= parts

    def _loss(self, weights: Weights, part: str, batches: int) -> float | None:
        """The mean loss over a part's held-out targets, summed on the host in double precision; None: no targets."""
        sums: dict[str, tuple[float, float]] = {}
        for index in range(batches):
            terms = jax.device_get(self._terms(weights, self._run.validation(index, part)))
            for name, (numerator, denominator) in terms.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(numerator), before[1] + float(denominator)
        means = {name: top / bottom for name, (top, bottom) in sums.items() if bottom}
        if 'nll' in sums:
            return means.get('nll')
        return sum(means.values()) if means else None


def bits_per_byte(nll: float, bytes_per_token: float) -> float:
    """Nats per token -> bits per byte of text, which do not depend on the tokenizer."""
    return nll / math.log(2) / bytes_per_token
