"""Every key a run understands, as a table: name, type, default, meaning with its unit.

The four sections `model`, `data`, `optimizer` and `schedule` pick a component by `name` and pass it the rest of their
keys (`registry.py`). Values are checked strictly: 'yes' is no number, true is no 1, and 1.5 is no integer.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from pretrax.config import registry
from pretrax.config.problems import Problem, ProblemsError, known_keys, nearest, shown, unknown


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a change of a key affects. It is declared with the type of the key, or of a section that holds it.

    Attributes:
        on: 'step' if the compiled step may differ; 'input' if only batches or first weights differ, on whose shapes the
            step depends; 'nothing' otherwise.
        resumable: whether a run may be resumed with another value.
    """

    on: Literal['step', 'input', 'nothing']
    resumable: bool = False


STEP = Effect('step')
STEP_RESUMABLE = Effect('step', resumable=True)
INPUT = Effect('input')
NOTHING = Effect('nothing', resumable=True)

LARGEST = 2**31 - 1  # counts travel through int32 on the device

Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Axis = Count | Literal['auto']


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no conversions, no changes after it is read."""

    model_config = ConfigDict(extra='forbid', frozen=True, strict=True, protected_namespaces=())


class Component(Section):
    """A section whose `name` picks a registered component. In YAML the component's options stand beside `name`."""

    kind: ClassVar[str]

    name: str
    options: SerializeAsAny[BaseModel]

    @pydantic.model_validator(mode='before')
    @classmethod
    def _gather_options(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get('name', registry.DEFAULTS[cls.kind])
        registered = registry.names(cls.kind)
        if name not in registered:
            raise ProblemsError(
                Problem(
                    ('name',),
                    f'is {shown(name)}, which is no registered {cls.kind}{nearest(str(name), registered)}',
                    f'registered: {", ".join(registered)}; a file named in plugins: can add more',
                )
            )
        model = registry.options_model(cls.kind, name)
        common = set(cls.model_fields) - {'options'}
        if reserved := common & set(model.model_fields):
            raise ValueError(f'the {cls.kind} {name!r} has options that pretrax itself applies: {sorted(reserved)}')
        options = {key: value for key, value in values.items() if key not in common}
        valid = common | set(model.model_fields)
        strangers = [unknown((key,), valid, known_keys_elsewhere(cls)) for key in options if key not in valid]
        if strangers:
            raise ProblemsError(*strangers)
        # JSON is the strict mode in which a list may become a tuple and a string a path, and nothing else changes.
        checked = model.model_validate_json(json.dumps(options), strict=True)
        return {key: values[key] for key in common if key in values} | {'name': name, 'options': checked}

    @pydantic.model_serializer
    def _flat(self) -> dict[str, Any]:
        common = {key: getattr(self, key) for key in type(self).model_fields if key != 'options'}
        return common | self.options.model_dump(mode='json', include=set(type(self.options).model_fields))


class Model(Component):
    """The model and its sizes."""

    kind = 'model'


class Data(Component):
    """Where the text comes from."""

    kind = 'data'


class Optimizer(Component):
    """The update rule; pretrax itself applies the rate, the decay and the clipping."""

    kind = 'optimizer'

    learning_rate: Positive = Field(description='the peak that the schedule multiplies')
    weight_decay: NotNegative = Field(default=0.0, description='decoupled: each step shrinks matrices by rate * decay')
    no_decay: tuple[str, ...] = Field(
        default=('*norm*', '*bias'), strict=False, description='patterns on the names of weights that do not decay'
    )
    clip_norm: Positive | None = Field(default=1.0, description='largest global gradient norm; null: no clipping')


class Schedule(Component):
    """The learning rate over the run, as a multiplier of optimizer.learning_rate."""

    kind = 'schedule'


class Batch(Section):
    """How much text one optimizer step reads. Fixed here, never by the number of devices."""

    tokens: Count = Field(description='tokens a step over all devices; a multiple of sequence_length')
    sequence_length: Count = Field(description='tokens in one sequence')
    micro: Count | Literal['auto'] | None = Field(
        default=None, description='sequences a device takes in one forward pass; null: all at once; auto: measured'
    )

    @pydantic.model_validator(mode='after')
    def _whole_sequences(self) -> 'Batch':
        tokens, length = self.tokens, self.sequence_length
        if tokens % length:
            near = [n for n in (tokens // length * length, -(-tokens // length) * length) if n]
            raise ProblemsError(
                Problem(
                    ('tokens',),
                    f'is {tokens}; expected a multiple of batch.sequence_length ({length})',
                    f'nearest: {" or ".join(map(str, near))}',
                )
            )
        if isinstance(self.micro, int) and self.micro > tokens // length:
            raise ProblemsError(
                Problem(
                    ('micro',),
                    f'is {self.micro} sequences; expected at most {tokens // length}, all of a step',
                    f'a step has {tokens} tokens / {length} = {tokens // length} sequences',
                )
            )
        return self


class Mesh(Section):
    """How the devices are arranged; see `pretrax.config.mesh.resolve_mesh`. Giving r or d alone sets the other to 1.

    `mesh: auto`, or auto for e, t or p, is planned before the run begins; see `pretrax.ahead.auto`.
    """

    r: Axis = Field(default='auto', description='replicas: devices that share out the batch and each hold all weights')
    d: Axis = Field(default='auto', description='fully sharded data: devices that share out the batch and the weights')
    e: Axis = Field(default=1, description='expert: devices that share out the batch and the experts of a mixture')
    c: Count = Field(default=1, description='context: devices that share out each sequence')
    t: Axis = Field(default=1, description='tensor: devices that share out heads, feed-forward and vocabulary')
    p: Axis = Field(default=1, description='pipeline: devices that share out the layers')

    @pydantic.model_validator(mode='before')
    @classmethod
    def _one_given(cls, values: Any) -> Any:
        if values == 'auto':
            return dict.fromkeys('rdetp', 'auto')
        if isinstance(values, dict) and ('r' in values) != ('d' in values):
            return {'r': 1, 'd': 1} | values
        return values

    @property
    def is_planned(self) -> bool:
        """Whether something is left to the plan: r and d alone are shared out without one."""
        return 'auto' in (self.e, self.t, self.p)

    def plain(self) -> 'Mesh':
        """Without what is left to the plan: what the number of devices depends on."""
        return self.model_copy(update={axis: 1 for axis in 'etp' if getattr(self, axis) == 'auto'})


class Precision(Section):
    """Weights, optimizer state, norms and loss are always f32."""

    compute: Literal['auto', 'bf16', 'f32'] = Field(
        default='auto', description='dtype of activations and matrix products; auto: by device'
    )
    matmul: Literal['compute', 'int8', 'fp8'] = Field(
        default='compute', description='products with weights: in the compute dtype, or with operands in eight bits'
    )
    exempt: tuple[str, ...] = Field(
        default=('head', 'first.*', 'last.*'),
        strict=False,
        description='patterns on products that stay in the compute dtype: block.weight, weight, head',
    )

    @pydantic.model_validator(mode='after')
    def _something_to_exempt(self) -> 'Precision':
        if self.matmul == 'compute' and self.exempt != type(self).model_fields['exempt'].default:
            raise ProblemsError(
                Problem(
                    ('exempt',),
                    f'is {shown(list(self.exempt))}, and no product is in eight bits',
                    'leave it out, or give precision.matmul=int8 or fp8',
                )
            )
        return self


class Memory(Section):
    """What lies in the host's memory instead of the devices'. Activations are chosen by model.save."""

    offload: tuple[Literal['optimizer', 'weights'], ...] = Field(
        default=(), strict=False, description='parts of the state that lie in host memory between steps'
    )


class Checkpoint(Section):
    """When the training state is written. The end of a run and Ctrl-C always write one."""

    every: Count = Field(default=100, description='steps between checkpoints')
    minutes: Positive | None = Field(default=None, description='also when so many minutes have gone by since the last')
    keep: Count = Field(default=3, description='newest checkpoints kept')
    keep_every: CountOrZero = Field(default=0, description='those of steps that it divides stay for ever; 0: none')
    keep_best: CountOrZero = Field(default=0, description='those with the lowest val_loss stay; 0: none')


class Faults(Section):
    """What to do when something goes wrong; docs/reliability.md."""

    spike: Annotated[Positive | None, STEP] = Field(
        default=None, description='skip a step whose loss is so many standard deviations above the usual; null: never'
    )
    rollback_after: CountOrZero = Field(
        default=10, description='skipped steps in a row before the run goes back to a checkpoint; 0: never'
    )
    rollbacks: CountOrZero = Field(default=2, description='times it goes back before it gives up with a report')
    time_limit_minutes: Positive | None = Field(
        default=None, description='save and exit with code 75 before the process is so old; null: no limit'
    )
    hang_seconds: Positive = Field(
        default=1800.0, description='a step without end for so long ends the process with code 75 and stack traces'
    )
    heartbeat_seconds: Annotated[int, Field(ge=2, le=LARGEST)] = Field(
        default=20,
        description='one of several processes without a sign of life for so long is lost; all end with code 75',
    )
    stack_trace_interval_seconds: NotNegative = Field(
        default=0.0, description='write the stacks of all threads so often; 0: only on a fault'
    )


class Processes(Section):
    """Which of several processes this one is. What is left out, the environment says, or JAX finds it."""

    count: Count | None = Field(
        default=None, description='processes of the run; null: JAX_NUM_PROCESSES, or as JAX finds them, or one'
    )
    index: CountOrZero | None = Field(default=None, description='of this one, from 0; null: JAX_PROCESS_ID')
    coordinator: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description='HOST:PORT where the first one listens; null: JAX_COORDINATOR_ADDRESS'
    )


class Eval(Section):
    """Loss on held-out text."""

    every: CountOrZero = Field(default=100, description='steps between evaluations; 0: never')
    batches: Count = Field(default=8, description='batches averaged in one evaluation')


class Log(Section):
    """Where metrics go, besides the terminal and metrics.jsonl."""

    every: Count = Field(default=10, description='steps between lines')
    stall_seconds: Positive = Field(
        default=10.0, description='a wait for data longer than this is told, with its cause'
    )
    profile: CountOrZero = Field(
        default=0, description='steps to trace, after three that settle; the trace lands in <run_dir>/profile; 0: none'
    )
    tensorboard: bool = Field(default=False, description='write event files to <run_dir>/tb')
    wandb: str | None = Field(default=None, min_length=1, description='Weights & Biases project; null: off')
    mlflow: str | bool | None = Field(
        default=None, description='MLflow tracking URI; true: ./mlflow.db; null or false: off'
    )


class Sample(Section):
    """Text written by the model while it trains."""

    every: CountOrZero = Field(default=0, description='steps between samples; 0: never')
    prompts: tuple[str, ...] = Field(
        default=('def ',), min_length=1, strict=False, description='the beginnings to continue'
    )
    tokens: Count = Field(default=128, description='tokens written after each prompt')
    temperature: NotNegative = Field(default=0.8, description='0: always the likeliest token')
    top_k: Count | None = Field(default=None, description='choose among the k likeliest tokens; null: all')
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description='choose among the likeliest tokens that together reach this probability; null: all'
    )


class InitFrom(Section):
    """What a run begins with, where that is more than the weights of a path."""

    path: str = Field(min_length=1, description='hf:DIR_OR_ID, or a run or checkpoint')
    optimizer: bool = Field(default=False, description="also the optimizer's state; of a run of ours")
    step: bool = Field(default=False, description='also go on counting steps and batches from there; of a run of ours')
    partial: bool = Field(
        default=False, description='take the weights whose names and shapes fit, draw the others; of a run of ours'
    )


class RunConfig(Section):
    """One run. Read from YAML by `pretrax.config.load`, or from a dict by `pretrax.config.from_values`."""

    name: Annotated[str, NOTHING] = Field(description='the run; letters, digits, "." "_" "-"')
    run_dir: Annotated[Path, NOTHING] = Field(
        default_factory=lambda given: Path('runs') / given['name'], description='where everything lands; runs/<name>'
    )
    seed: Annotated[CountOrZero, STEP] = Field(default=0, description='all randomness folds in (seed, step, name)')
    steps: Annotated[Count, STEP_RESUMABLE] = Field(description='optimizer steps of the whole run')
    model: Annotated[Model, STEP] = Field(description='a preset or sizes, and the component that builds the model')
    init_from: Annotated[Annotated[str, Field(min_length=1)] | InitFrom | None, INPUT] = Field(
        default=None, description='weights to start from: hf:DIR_OR_ID, or a run or checkpoint; model: may be left out'
    )
    data: Annotated[Data, INPUT] = Field(description='the text to train on')
    batch: Annotated[Batch, STEP] = Field(description='tokens a step and sequence length')
    optimizer: Annotated[Optimizer, STEP] = Field(description='the update rule and its learning_rate')
    schedule: Annotated[Schedule, STEP] = Field(
        default_factory=lambda: Schedule.model_validate({}), description='the learning rate over the run'
    )
    mesh: Annotated[Mesh, STEP] = Field(default=Mesh(), description='how the devices are arranged')
    precision: Annotated[Precision, STEP] = Field(default=Precision(), description='dtypes of matrix products')
    memory: Annotated[Memory, STEP_RESUMABLE] = Field(default=Memory(), description='what lies in host memory')
    checkpoint: Annotated[Checkpoint, NOTHING] = Field(default=Checkpoint(), description='when the state is written')
    faults: Annotated[Faults, NOTHING] = Field(default=Faults(), description='spikes, hangs, time limits')
    processes: Annotated[Processes, NOTHING] = Field(default=Processes(), description='which of several this one is')
    eval: Annotated[Eval, NOTHING] = Field(default=Eval(), description='loss on held-out text')
    log: Annotated[Log, NOTHING] = Field(default=Log(), description='where metrics go')
    sample: Annotated[Sample, NOTHING] = Field(default=Sample(), description='text written while training')
    plugins: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], STEP] = Field(
        default=(), strict=False, description='Python files or module names, run before the rest is checked'
    )

    _origins: dict[tuple[str | int, ...], str] = pydantic.PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = pydantic.PrivateAttr(())

    def __eq__(self, other: object) -> bool:
        """Equal values; where they came from does not matter."""
        return isinstance(other, RunConfig) and self.model_dump() == other.model_dump()

    @property
    def origins(self) -> Mapping[tuple[str | int, ...], str]:
        """Where each key was given ('configs/a.yaml:3', 'override', ...); see `pretrax.config.origin` for the rest."""
        return self._origins

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided while reading that a user should see, one line each."""
        return self._notes

    @pydantic.field_validator('name')
    @classmethod
    def _plain_name(cls, name: str) -> str:
        plain = ''.join(c if c.isascii() and (c.isalnum() or c in '._-') else '-' for c in name).strip('.-')[:100]
        if name != plain or not name:
            raise ProblemsError(
                Problem(
                    (),
                    f'is {shown(name)}; expected letters, digits, ".", "_" and "-", at most 100',
                    f'write {plain or "my-run"}; run_dir says where the run lands',
                )
            )
        return name

    @pydantic.field_validator('run_dir', mode='before')
    @classmethod
    def _some_directory(cls, directory: Any) -> Any:
        if isinstance(directory, str) and directory.startswith('~'):
            raise ProblemsError(
                Problem((), f'is {shown(directory)}; only a shell expands ~', 'write ${oc.env:HOME}/...')
            )
        if isinstance(directory, str) and (not directory.strip() or '\0' in directory):
            raise ProblemsError(
                Problem((), f'is {shown(directory)}; expected a directory', 'leave it out for runs/<name>')
            )
        return directory

    @pydantic.model_validator(mode='after')
    def _warmup_ends(self) -> 'RunConfig':
        warmup = getattr(self.schedule.options, 'warmup', 0)
        if isinstance(warmup, int | float) and warmup > self.steps:
            raise ProblemsError(
                Problem(
                    ('schedule', 'warmup'),
                    f'is {warmup}, more than steps ({self.steps}): the learning rate would never be reached',
                    f'write a warmup of at most {self.steps}, or more steps',
                )
            )
        return self


def known_keys_elsewhere(section: type[Component]) -> list[str]:
    """Dotted keys outside a section, to tell a user who wrote a key in the wrong place."""
    return [key for key in known_keys(RunConfig) if not key.startswith(f'{section.kind}.')]
