"""Models as lm-evaluation-harness evaluates them (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness).

Importing this module needs the extra `harness`.
"""

import difflib
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from pretrax.errors import UserError, first_line
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.task import Generate, Likelihood, Rolling

_TOKENS = 256  # of an answer, if the task does not say how many: the default of the `hf` backend


class HarnessModel(LM):
    """A model of pretrax as an `LM`: all requests of a task are batched, and divided over the devices."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self._model = model

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log probability of each continuation, and whether each of its tokens was the likeliest."""
        found = self._model.answer([Likelihood(*one.args) for one in requests])
        return [(one.logprob, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log probability of each text."""
        return [one.logprob for one in self._model.answer([Rolling(one.args[0]) for one in requests])]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The likeliest text after each context. Raises UserError if a task wants random ones."""
        return self._model.answer([_generate(*one.args) for one in requests])


def _generate(context: str, choices: dict[str, Any]) -> Generate:
    if choices.get('do_sample') and choices.get('temperature', 1.0) > 0:
        raise UserError('the task samples its answers, but pretrax eval writes the likeliest text\nleave this task out')
    until = choices.get('until') or ()
    tokens = choices.get('max_gen_toks') or choices.get('max_tokens') or _TOKENS
    return Generate(context, int(tokens), (until,) if isinstance(until, str) else tuple(until))


def open_tasks(names: Sequence[str], directory: str | None) -> TaskManager:
    """The tasks of the package, and those of the user's task files in a directory.

    Args:
        names: names of the tasks, groups or tags that will be evaluated.
        directory: with task files; None: only the tasks of the package.

    Raises:
        UserError: there is no such task.
    """
    manager = TaskManager(include_path=directory)
    for name in names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            hint = f'; did you mean {near[0]}?' if near else ''
            raise UserError(
                f"--harness: there is no task '{name}'{hint}\nsee `lm_eval ls tasks`, or give --harness-tasks DIR"
            )
    return manager


def evaluate(
    model: LanguageModel, names: Sequence[str], manager: TaskManager, *, limit: int, seed: int
) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate` returns, without the documents.

    Args:
        limit: documents of each task.
        seed: seed of the choice of examples in the context.

    Raises:
        UserError: the data of a task cannot be loaded, or it cannot run on the model.
    """
    try:
        seeds = dict.fromkeys(('random_seed', 'numpy_random_seed', 'torch_random_seed', 'fewshot_random_seed'), seed)
        found = simple_evaluate(
            HarnessModel(model), tasks=list(names), limit=limit, task_manager=manager, log_samples=False, **seeds
        )
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as error:  # of `datasets`: the data cannot be downloaded or read
        raise UserError(f'--harness: {", ".join(names)}: {type(error).__name__}: {first_line(error)[:300]}') from error
    assert found is not None
    kept = ('results', 'groups', 'versions', 'n-samples', 'higher_is_better')
    return {key: value for key, value in found.items() if key in kept}
