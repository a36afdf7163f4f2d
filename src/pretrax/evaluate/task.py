"""What a task is: documents, each with requests to a language model and a measure of its answers. No JAX here."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence

from pretrax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Asks for the log probability of `continuation` after `context`. The answer is a `Score`."""

    context: str
    continuation: str


@dataclasses.dataclass(frozen=True)
class Rolling:
    """Asks for the log probability of a text after the token that ends the text before. The answer is a `Score`."""

    text: str


@dataclasses.dataclass(frozen=True)
class Generate:
    """Asks for the likeliest text after `context`, one token at a time. The answer is a `str`."""

    context: str
    tokens: int  # at most
    stop: tuple[str, ...] = ()  # the answer ends before the first of them


@dataclasses.dataclass(frozen=True)
class Score:
    """The natural logarithm of the probability, whether each token was the likeliest, and how many tokens there are."""

    logprob: float
    is_greedy: bool
    tokens: int


Request = Likelihood | Rolling | Generate
# metric -> (numerator, denominator): the value of the metric is the sum of the one over the sum of the other.
Measured = dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Document:
    """Some requests, and what their answers are worth. `length` names a group of documents by its size."""

    requests: tuple[Request, ...]
    measure: Callable[[Sequence], Measured]
    length: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How documents are made."""

    limit: int = 50  # documents of each kind
    seed: int = 0
    # Lengths of `copying` and `retrieval`; None: those of LENGTHS that fit the model.
    lengths: tuple[int, ...] | None = None

    def random(self, task: str) -> random.Random:
        """Random numbers for a task, the same on every machine."""
        return random.Random(f'{task} {self.seed}')


@dataclasses.dataclass(frozen=True)
class Task:
    """A task. The documents depend on the settings and, if they come from local text, on the Python version."""

    name: str
    description: str
    documents: Callable[[Settings], list[Document]]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A value with its standard error, which is NaN for a single document."""

    value: float
    stderr: float
    documents: int


def aggregate(measured: Sequence[Measured]) -> dict[str, Metric]:
    """Each metric over all documents that have it: the ratio R = sum(n) / sum(d) of N numerators and denominators.

    The standard error is that of the ratio estimator, sqrt(N / (N - 1) * sum((n - R d)^2)) / sum(d) (Cochran 1977,
    Sampling Techniques, section 6.4, without the finite population correction). With d = 1 it is s / sqrt(N), that of
    the mean.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for one in measured:
        for name, pair in one.items():
            pairs.setdefault(name, []).append(pair)
    return {name: _ratio(found) for name, found in pairs.items()}


def _ratio(pairs: Sequence[tuple[float, float]]) -> Metric:
    count, below = len(pairs), math.fsum(d for _, d in pairs)
    value = math.fsum(n for n, _ in pairs) / below
    if count < 2:
        return Metric(value, math.nan, count)
    squares = math.fsum((n - value * d) ** 2 for n, d in pairs)
    return Metric(value, math.sqrt(count / (count - 1) * squares) / below, count)


def choose(names: Sequence[str], tasks: Mapping[str, Task]) -> list[Task]:
    """The tasks of these names, once each. Raises UserError for an unknown one."""
    import difflib

    for name in names:
        if name not in tasks:
            near = difflib.get_close_matches(name, tasks, n=1)
            hint = f'  did you mean {near[0]}?\n' if near else ''
            raise UserError(f'there is no task {name!r}\n{hint}  tasks: {", ".join(tasks)}')
    return [tasks[name] for name in dict.fromkeys(names)]
