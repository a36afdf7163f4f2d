"""Searches for the best values of configuration keys: Optuna chooses them, and each trial is an ordinary run.

The directory of a search has `journal.jsonl`, in which Optuna keeps the trials, and `runs/N`, the run of trial N. After
a kill, a trial without an end in the journal continues: its values are in the journal, and its run resumes from its
newest checkpoint. Losses are read from `metrics.jsonl` of its run. The seed of the sampler is derived from the number
of the trial, so that a search that was killed draws the same values as one that was not.
"""

import contextlib
import io
import json
import math
import pathlib
import pickle
import time
from typing import TYPE_CHECKING, Any

from pretrax.config import resolved_yaml, upgraded
from pretrax.config.problems import leaves
from pretrax.errors import Report, UserError
from pretrax.experiments.search_file import Range, Search, Space
from pretrax.experiments.training import CONTINUES, StopRequest, Training, locked
from pretrax.experiments.trial_job import check_launch
from pretrax.launch.local import share_of
from pretrax.system.atomic import write_file
from pretrax.system.software import need_extra
from pretrax.view.search.report import parameter_text

if TYPE_CHECKING:
    import optuna

JOURNAL = 'journal.jsonl'
_LOOK = 0.2  # seconds between two checks of the trials
# What a pickled optimizer of CMA-ES consists of. Optuna keeps it in the journal; nothing else is unpickled.
_IN_AN_OPTIMIZER = {
    ('cmaes._cma', 'CMA'),
    ('numpy', 'dtype'),
    ('numpy', 'ndarray'),
    ('numpy._core.multiarray', '_reconstruct'),
    ('numpy._core.multiarray', 'scalar'),
}

type Trial = dict[str, Any]


class Searcher(contextlib.AbstractContextManager['Searcher']):
    """A search in its directory, which is locked inside the `with` block.

    Raises:
        UserError: Optuna is not installed, another process searches in the directory, or it has another search.
    """

    def __init__(self, space: Space, directory: pathlib.Path, say: Report = print):
        for package in ('cmaes', 'optuna'):  # Optuna imports the other one when it samples
            need_extra('search', 'pretrax search', package)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._space, self._search, self._directory, self._say = space, space.search, directory, say
        self._running: dict[int, tuple[optuna.trial.Trial, Training, int]] = {}
        self._unfinished: list[optuna.trial.FrozenTrial] = []
        self._refused = ''
        self._lock = locked(directory)
        try:
            self._study = self._opened(directory / JOURNAL)
        except BaseException:
            self._lock.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def run(self) -> bool:
        """Trains until all trials have ended, or a signal asks this process to stop. Returns whether all have ended.

        Raises:
            UserError: the engine starts no trials. The one that it has refused continues when the search does.
        """
        self._unfinished = [trial for trial in self._study.get_trials(deepcopy=False) if not trial.state.is_finished()]
        if self._has_more():
            first = self._space.config({}, **self._names(0))
            check_launch(self._search.launch, first, self._directory, self._say)
        with StopRequest().listening() as request:
            while self._running or (not self._stops(request) and self._has_more()):
                while not self._stops(request) and len(self._running) < self._search.at_once and self._has_more():
                    self._begin(self._next())
                for number in list(self._running):
                    stops = self._stops(request)
                    if stops:
                        self._running[number][1].stop(leave_jobs=True)
                    self._look_at(number, stops)
                time.sleep(_LOOK)
        if self._refused and request.number is None:
            raise UserError(f'{self._refused}\n{CONTINUES}')
        return request.number is None

    def trials(self) -> list[Trial]:
        """The trials: `number`, `state`, `value`, `values`, `steps`, `why`, and `curve`, [step, value] pairs."""
        return [
            {
                'number': trial.number,
                'state': trial.user_attrs.get('state', 'running'),
                'value': trial.user_attrs.get('value'),
                'values': dict(trial.params),
                'steps': trial.user_attrs.get('steps'),
                'why': trial.user_attrs.get('why', ''),
                'curve': [[step, value] for step, value in sorted(trial.intermediate_values.items())],
            }
            for trial in self._study.get_trials(deepcopy=False)
        ]

    def importances(self) -> dict[str, float]:
        """The part of each parameter in the variance of the best tenth of the trials, largest first; {} if unknown.

        PED-ANOVA. Watanabe et al. 2023, arXiv:2304.10255. It takes the trials that were trained to their end.
        """
        done = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        if len(done) < 4 or len({trial.value for trial in done}) < 2:
            return {}
        evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
        found = self._optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        return {key: float(value) for key, value in found.items() if math.isfinite(value)}

    def write_best(self) -> pathlib.Path | None:
        """Writes the configuration of the best trial that was trained to its end to `best.yaml`, if there is one."""
        done = [trial for trial in self.trials() if trial['state'] == 'done']
        if not done:
            return None
        best = min(done, key=lambda trial: trial['value'])
        path = self._directory / 'best.yaml'
        config = self._space.config(best['values'], name=f'{self._space.name}-best')
        write_file(path, resolved_yaml(config).encode())
        return path

    def _opened(self, journal: pathlib.Path) -> 'optuna.Study':
        optuna = self._optuna
        if journal.is_file() and (content := journal.read_bytes()) and not content.endswith(b'\n'):
            journal.write_bytes(
                content[: content.rfind(b'\n') + 1]
            )  # a line that a kill or a full disk left incomplete
        backend = optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=_NoLock())  # type: ignore[arg-type]
        try:
            study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name='search',
                direction='minimize',
                pruner=self._pruner(),
                load_if_exists=True,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{journal} is not the journal of a search: {error}\ngive another --out') from error
        known = study.user_attrs.get('search')
        if known is None:
            study.set_user_attr('search', self._space.identity)
            return study
        own, base = json.loads(known)
        known = json.dumps([own, upgraded(base)], sort_keys=True)
        if known != self._space.identity:
            raise UserError(
                f'{self._directory} has a search with other settings: {_changed(known, self._space.identity)}\n'
                'trials, at_once, devices, launch and retries may change; for other changes give another --out'
            )
        return study

    def _pruner(self) -> Any:
        asha = self._search.asha
        if asha is None:
            return self._optuna.pruners.NopPruner()
        first = asha.first or self._space.base.eval.every
        return self._optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=asha.reduction)

    def _stops(self, request: StopRequest) -> bool:
        return request.number is not None or bool(self._refused)

    def _names(self, number: int) -> dict[str, str]:
        """The keys that each trial has of its own."""
        return {'name': f'{self._space.name}-{number}', 'run_dir': str(self._directory / 'runs' / str(number))}

    def _has_more(self) -> bool:
        return bool(self._unfinished) or len(self._study.get_trials(deepcopy=False)) < self._search.number_of_trials

    def _next(self) -> 'optuna.trial.Trial':
        """A trial left unfinished, or a new one, whose values depend on the file, its number and the others."""
        earlier = self._unfinished.pop(0) if self._unfinished else None
        number = len(self._study.get_trials(deepcopy=False)) if earlier is None else earlier.number
        seed = (self._search.seed * 1_000_003 + number) % 2**32
        self._study.sampler = _sampler(self._optuna, self._search, seed)
        return self._study.ask() if earlier is None else self._optuna.trial.Trial(self._study, earlier._trial_id)

    def _begin(self, trial: 'optuna.trial.Trial') -> None:
        # A trial that was killed while values were chosen keeps those that are in the journal.
        values = {key: _value(trial, key, self._search) for key in self._search.parameters}
        try:
            config = self._space.config(values, **self._names(trial.number))
        except UserError as error:
            self._tell(trial, 'failed', None, 0, f'not a valid configuration: {" ".join(str(error).split())}')
            return
        taken = {slot for _, _, slot in self._running.values()}
        slot = next(slot for slot in range(self._search.at_once) if slot not in taken)
        share = share_of(slot, self._search.devices)
        training = Training(config, self._directory, self._search, share, self._say)
        self._running[trial.number] = trial, training, slot
        if done := training.steps_done:
            self._say(f'trial {trial.number} continues after step {done}')

    def _look_at(self, number: int, is_stopping: bool) -> None:
        """Reports new losses of a trial to Optuna, stops it if it is poor, and ends it if its run has ended."""
        trial, training, _ = self._running[number]
        verdict = self._study.get_trials(deepcopy=False)[number].user_attrs.get('verdict', '')
        if verdict:
            training.stop()
        is_over = training.is_over()
        metric, last = self._search.metric, training.config.steps
        column = training.metrics([metric]).get(metric)
        found = {} if column is None else dict(zip(column.steps.tolist(), column.values.tolist(), strict=True))
        known = self._study.get_trials(deepcopy=False)[number]
        for step in sorted(set(found) - set(known.intermediate_values)):
            if verdict:
                break
            trial.report(found[step], step)
            if not math.isfinite(found[step]):
                verdict = 'diverged'
            elif step < last and trial.should_prune():
                verdict = f'stopped after step {step}'
            if verdict:
                trial.set_user_attr('verdict', verdict)
                training.stop()
                is_over = training.is_over()  # a job that was left to itself has to stop now
        if training.refused and not self._refused:
            self._refused = f'trial {number} cannot be launched: {training.refused}'
        if not is_over or (last not in found and (training.refused or (is_stopping and not verdict))):
            if is_over:
                del self._running[number]  # it continues when the search does
            return
        del self._running[number]
        steps = training.steps_done
        if verdict and last not in found:  # one that ended before it could be stopped counts
            values = [value for step, value in sorted(found.items()) if math.isfinite(value)]
            self._tell(
                trial, 'diverged' if verdict == 'diverged' else 'pruned', values[-1] if values else None, steps, verdict
            )
        elif last in found and math.isfinite(found[last]):
            self._tell(trial, 'done', float(found[last]), steps, '')
        elif last in found:
            self._tell(trial, 'diverged', None, steps, 'diverged')
        else:
            why = training.why or f'it has no {metric} at its last step; is there a held-out part of the data?'
            self._tell(trial, 'failed', None, steps, why)

    def _tell(self, trial: 'optuna.trial.Trial', state: str, value: float | None, steps: int, why: str) -> None:
        """Records the end of a trial. The state in the journal is written last, and is what counts after a kill."""
        for key, given in {'state': state, 'value': value, 'steps': steps, 'why': why}.items():
            trial.set_user_attr(key, given)
        states = self._optuna.trial.TrialState
        if state == 'done':
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=states.FAIL if state == 'failed' else states.PRUNED)
        loss = '' if value is None else f' {self._search.metric} {value:.4f},'
        chosen = ' '.join(f'{key}={parameter_text(value)}' for key, value in trial.params.items())
        self._say(f'trial {trial.number} {state}:{loss} {steps} steps   {chosen}{f"   ({why})" if why else ""}')


def _sampler(optuna: Any, search: Search, seed: int) -> Any:
    """The sampler for one trial."""
    if search.sampler == 'tpe':
        return optuna.samplers.TPESampler(seed=seed, constant_liar=search.at_once > 1)
    if search.sampler == 'random':
        return optuna.samplers.RandomSampler(seed=seed)
    if search.sampler == 'grid':

        class Grid(optuna.samplers.GridSampler):
            """Does not stop a loop of Optuna after the last trial, since there is none."""

            def after_trial(self, *_: Any) -> None:
                pass

        return Grid(search.grid, seed=search.seed)

    class Cmaes(optuna.samplers.CmaEsSampler):
        """Reads its optimizer from the journal without running what a stranger may have written there."""

        def _restore_optimizer(self, completed_trials: list[Any]) -> Any:
            for trial in reversed(completed_trials):
                parts = {k: v for k, v in trial.system_attrs.items() if k.startswith(self._attr_key_optimizer)}
                if parts:
                    return _Optimizers(io.BytesIO(bytes.fromhex(self._concat_optimizer_attrs(parts)))).load()
            return None

    return Cmaes(seed=seed, warn_independent_sampling=False)


class _Optimizers(pickle.Unpickler):
    """Loads an optimizer of CMA-ES, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _IN_AN_OPTIMIZER:
            raise UserError(
                f'{JOURNAL} has an object {module}.{name}, which is not part of a search\ngive another --out'
            )
        return super().find_class(module, name)


class _NoLock:
    """A lock that does nothing: the directory is locked, and a lock of Optuna's would survive a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _value(trial: 'optuna.trial.Trial', key: str, search: Search) -> Any:
    """The value of a parameter: that in the journal, or a new one."""
    given = search.parameters[key]
    if search.grid:
        return trial.suggest_categorical(key, search.grid[key])
    if not isinstance(given, Range):
        return trial.suggest_categorical(key, given)
    if given.is_integer:
        return trial.suggest_int(key, int(given.low), int(given.high), step=int(given.step or 1), log=given.log)
    return trial.suggest_float(key, given.low, given.high, step=given.step, log=given.log)


def _changed(known: str, now: str) -> str:
    """The keys in which two identities differ."""
    both = json.loads(known), json.loads(now)
    pairs = [
        [{'.'.join(map(str, path)): value for path, value in leaves(values)} for values in pair]
        for pair in zip(*both, strict=True)
    ]
    keys = [key for before, after in pairs for key in {**before, **after} if before.get(key) != after.get(key)]
    return ', '.join(keys[:5]) or 'the version of pretrax'
