"""Every key of a configuration: name, type, default, effect, and meaning with its unit.

The sections `model`, `data`, `optimizer` and `schedule` choose a component by `name` and pass it their other keys
(`registry.py`). Types are strict: 'yes' is not a boolean, true is not 1, and 1.5 is not an integer.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from pretrax.config import registry
from pretrax.config.batch_sizes import BatchSize, batch_sizes, problems_of
from pretrax.config.one_of import OneOf
from pretrax.config.problems import Problem, ProblemsError, known_keys, nearest, shown, unknown
from pretrax.errors import UserError
from pretrax.infer.sampling_settings import SETTINGS, Temperature, TopK, TopP
from pretrax.storage import BucketPath, locate


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

LARGEST = 2**31 - 1  # devices hold counts as int32

Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Axis = Count | Literal['auto']


def _number_or_pairs(value: Any) -> Any:
    pairs = isinstance(value, list) and value and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    if isinstance(value, list) and not pairs:
        example = 'such as [[0, 1024], [100, 2048]]'
        raise ProblemsError(
            Problem((), f'is {shown(value)}; expected a number, or [[step, value], ...] by ascending steps, {example}')
        )
    return value


# A count, or [[step, the count from this step on], ...].
_StepAndCount = Annotated[tuple[CountOrZero, Count], Field(strict=False)]
CountByStep = Annotated[
    Count | Annotated[tuple[_StepAndCount, ...], Field(min_length=1, strict=False)],
    pydantic.BeforeValidator(_number_or_pairs),
]
_Directory = Annotated[
    Path | pydantic.InstanceOf[BucketPath],
    pydantic.PlainSerializer(str, when_used='json'),
    pydantic.WithJsonSchema({'type': 'string', 'format': 'path'}),
]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, types are strict, and values are frozen."""

    model_config = ConfigDict(extra='forbid', frozen=True, strict=True, protected_namespaces=())


class Component(Section):
    """A section whose `name` chooses a registered component. In YAML, its options are next to `name`."""

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
                    f'is {shown(name)}, which is not a registered {cls.kind}{nearest(str(name), registered)}',
                    f'registered: {", ".join(registered)}; a file in plugins: can add more',
                )
            )
        model = registry.options_model(cls.kind, name)
        common = set(cls.model_fields) - {'options'}
        if reserved := common & set(model.model_fields):
            raise ValueError(f'the {cls.kind} {name!r} has options that pretrax applies itself: {sorted(reserved)}')
        options = {key: value for key, value in values.items() if key not in common}
        valid = common | set(model.model_fields)
        anywhere = known_keys_elsewhere(cls)
        nested = cls.nested_names(values)
        strangers = [unknown((key,), valid, anywhere, nested) for key in options if key not in valid]
        if strangers:
            raise ProblemsError(*strangers)
        # In strict mode, JSON still converts a list to a tuple and a string to a path, and nothing else.
        checked = model.model_validate_json(json.dumps(options), strict=True)
        return {key: values[key] for key in common if key in values} | {'name': name, 'options': checked}

    @classmethod
    def options_of(cls, values: Mapping[str, Any]) -> type[BaseModel] | OneOf | None:
        """The model of the options of the component that these values name; None: there is no such component."""
        name = values.get('name', registry.DEFAULTS[cls.kind])
        return registry.options_model(cls.kind, name) if name in registry.names(cls.kind) else None

    @classmethod
    def nested_names(cls, values: Mapping[str, Any]) -> dict[str, str]:
        """The dotted keys of options in sections, by the last name of each,
        and by the one that pretrax 0.1 had for it.
        """
        names = registry.option_names(cls.kind, values.get('name', registry.DEFAULTS[cls.kind]))
        model = cls.options_of(values)
        if names is None or model is None:
            return {}
        keys = {key.rpartition('.')[2]: key for key in reversed(known_keys(model, f'{cls.kind}.'))}
        return keys | {name: f'{cls.kind}.{key}' for name, key in names.RENAMED.items()}

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


def _patterns(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class ParameterGroup(Section):
    """Weights with a learning rate or a decay of their own."""

    match: Annotated[
        tuple[str, ...],
        Field(min_length=1, strict=False),
        pydantic.BeforeValidator(_patterns, json_schema_input_type=str | tuple[str, ...]),
    ] = Field(description='a pattern for the names of weights, or several')
    learning_rate_scale: NotNegative = Field(default=1.0, description='multiplies the learning rate; 0: frozen')
    weight_decay: NotNegative | None = Field(
        default=None, description='weight decay of these weights; null: as optimizer.weight_decay and no_decay say'
    )


class Optimizer(Component):
    """The update rule; pretrax applies the rate, the decay and the clipping."""

    kind = 'optimizer'

    learning_rate: Positive = Field(description='peak learning rate; the schedule multiplies it')
    weight_decay: NotNegative = Field(default=0.0, description='decoupled: each step shrinks matrices by rate * decay')
    no_decay: tuple[str, ...] = Field(
        default=('*norm*', '*bias'), strict=False, description='patterns for the names of weights that do not decay'
    )
    clip_norm: Positive | None = Field(default=1.0, description='largest global gradient norm; null: no clipping')
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), strict=False, description='weights with another rate or decay; the first that matches counts'
    )
    freeze: tuple[str, ...] = Field(
        default=(), strict=False, description='patterns for the names of weights that keep their values'
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description='keep a moving average of the weights, with this decay per step; null: none'
    )


class Schedule(Component):
    """The learning rate over the run, as a multiplier of optimizer.learning_rate."""

    kind = 'schedule'


class Batch(Section):
    """The tokens of one optimizer step. They never depend on the number of devices."""

    tokens: CountByStep = Field(
        description='tokens per step over all devices, a multiple of sequence_length; or [[step, tokens], ...]'
    )
    sequence_length: CountByStep = Field(description='tokens in one sequence; or [[step, length], ...]')
    micro: Count | Literal['auto'] | None = Field(
        default=None, description='sequences per device in one forward pass; null: all at once; auto: measured'
    )

    @property
    def sizes(self) -> dict[int, BatchSize]:
        """{number of a batch: the size of that batch and those after it}, ascending. The last size is the largest."""
        return batch_sizes(self.tokens, self.sequence_length, self.micro)

    def at(self, number: int) -> BatchSize:
        """The size of a batch, by its number: that of its step, unless a rollback has skipped batches."""
        return next(size for first, size in reversed(self.sizes.items()) if first <= number)

    @property
    def largest(self) -> BatchSize:
        """The last size, which no other exceeds in tokens or length."""
        return next(reversed(self.sizes.values()))

    @pydantic.model_validator(mode='after')
    def _possible(self) -> 'Batch':
        if problems := list(problems_of(self.tokens, self.sequence_length, self.micro)):
            raise ProblemsError(*problems)
        return self


class Mesh(Section):
    """How the devices are arranged. `mesh: auto` is auto for r, d, e, t and p. If only r or d is given, the other is 1;
    see `pretrax.config.mesh.resolve_mesh`, and `pretrax.ahead.auto`, which plans e, t and p before the run starts.
    """

    r: Axis = Field(default='auto', description='replicas: shard the batch; every replica has all weights')
    d: Axis = Field(default='auto', description='fully sharded data: shard the batch and the weights')
    e: Axis = Field(default=1, description='experts: shard the batch, and the experts of a mixture')
    c: Count = Field(default=1, description='context: shard each sequence')
    t: Axis = Field(default=1, description='tensor: shard heads, feed-forward and vocabulary')
    p: Axis = Field(default=1, description='pipeline: shard the layers into stages')

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
        """Whether an axis needs a plan; auto for r and d does not."""
        return 'auto' in (self.e, self.t, self.p)

    def plain(self) -> 'Mesh':
        """The mesh with 1 for every axis that needs a plan."""
        return self.model_copy(update={axis: 1 for axis in 'etp' if getattr(self, axis) == 'auto'})


class Precision(Section):
    """Weights, optimizer state, norms and loss are always f32."""

    compute: Literal['auto', 'bf16', 'fp16', 'f32'] = Field(
        default='auto',
        description='dtype of activations and matrix products; auto: bf16 if the device multiplies it fast, else f32',
    )
    loss_scale: Positive = Field(
        default=65536.0, description='in fp16, what the loss is multiplied by at first; an overflow halves it'
    )
    loss_scale_steps: Count = Field(
        default=2000, description='in fp16, steps without an overflow that double the scale'
    )
    matmul: Literal['compute', 'int8', 'fp8'] = Field(
        default='compute', description='operands of products with weights: the compute dtype, int8 or fp8'
    )
    exempt: tuple[str, ...] = Field(
        default=('head', 'first.*', 'last.*'),
        strict=False,
        description='patterns for products that stay in the compute dtype: layer.weight, weight, head',
    )
    reduction: Literal['f32', 'bf16', 'bf16_r_d'] = Field(
        default='f32',
        description='dtype in which gradients are summed over mesh.r; bf16: half the bytes; bf16_r_d: over mesh.d too',
    )

    @pydantic.model_validator(mode='after')
    def _fp16_alone(self) -> 'Precision':
        given = [key for key in ('loss_scale', 'loss_scale_steps') if key in self.model_fields_set]
        if (
            self.compute != 'fp16'
            and given
            and any(getattr(self, k) != type(self).model_fields[k].default for k in given)
        ):
            problem = 'is given, but only the loss of fp16 is scaled'
            raise ProblemsError(Problem((given[0],), problem, 'leave it out, or give precision.compute=fp16'))
        if self.compute == 'fp16' and self.matmul != 'compute':
            problem = f'is {self.matmul}, which is not tested with precision.compute=fp16'
            raise ProblemsError(Problem(('matmul',), problem, 'use precision.compute=bf16'))
        return self

    @pydantic.model_validator(mode='after')
    def _something_to_exempt(self) -> 'Precision':
        if self.matmul == 'compute' and self.exempt != type(self).model_fields['exempt'].default:
            raise ProblemsError(
                Problem(
                    ('exempt',),
                    f'is {shown(list(self.exempt))}, but no product is in eight bits',
                    'leave it out, or give precision.matmul=int8 or fp8',
                )
            )
        return self


class Memory(Section):
    """What is kept in host memory instead of device memory. For activations, see model.save."""

    offload: tuple[Literal['optimizer', 'weights'], ...] = Field(
        default=(), strict=False, description='parts of the state to keep in host memory between steps'
    )


class Compiler(Section):
    """Options of XLA for the training step, besides those that pretrax chooses; see docs/scaling.md."""

    options: dict[Annotated[str, Field(min_length=1)], bool | int | float | str | None] = Field(
        default={}, description='options of XLA by name, which win over chosen ones; null: do not set a chosen one'
    )


class Checkpoint(Section):
    """When the training state is saved. It is always saved at the end of a run and on Ctrl-C."""

    every: CountOrZero = Field(default=100, description='steps between checkpoints; 0: none before the end')
    minutes: Positive | None = Field(default=None, description='also save this many minutes after the last checkpoint')
    keep: Count = Field(default=3, description='number of newest checkpoints to keep')
    keep_every: CountOrZero = Field(default=0, description='also keep every step divisible by this; 0: none')
    keep_best: CountOrZero = Field(default=0, description='also keep this many with the lowest val_loss; 0: none')


class Faults(Section):
    """How faults are handled; see docs/reliability.md."""

    spike: Annotated[Positive | None, STEP] = Field(
        default=None, description='skip a step whose loss is this many standard deviations above normal; null: never'
    )
    rollback_after: CountOrZero = Field(
        default=10, description='skipped steps in a row before the run rolls back to a checkpoint; 0: never'
    )
    rollbacks: CountOrZero = Field(default=2, description='rollbacks before the run fails')
    time_limit_minutes: Positive | None = Field(
        default=None, description='save and exit with code 75 before the process reaches this age; null: no limit'
    )
    hang_seconds: Positive = Field(
        default=1800.0, description='exit with code 75 and stack traces if a step takes longer than this'
    )
    heartbeat_seconds: Annotated[int, Field(ge=2, le=LARGEST)] = Field(
        default=20,
        description='with several processes, one that is silent for this long counts as lost; the others exit with '
        'code 75',
    )
    lease_seconds: Positive = Field(
        default=60.0,
        description='with run_dir in a bucket, another process may take over the run if this one is silent for this '
        'long',
    )
    stack_trace_interval_seconds: NotNegative = Field(
        default=0.0, description='write the stacks of all threads at this interval; 0: only on a fault'
    )
    stack_trace_to: str | None = Field(
        default=None,
        min_length=1,
        description='where stack_trace_interval_seconds writes: console, or a directory on a disk; null: stacks/ in '
        'the run directory',
    )

    @pydantic.model_validator(mode='after')
    def _stacks_go_somewhere(self) -> 'Faults':
        where = self.stack_trace_to
        if where is None:
            return self
        if not self.stack_trace_interval_seconds:
            problem, fix = 'but no stacks are written', 'give faults.stack_trace_interval_seconds=600 too'
        elif '://' in where:
            problem, fix = (
                'which is not on a disk',
                'leave it out: stacks in the run directory of a bucket are uploaded',
            )
        else:
            return self
        raise ProblemsError(Problem(('stack_trace_to',), f'is {shown(where)}, {problem}', fix))


class Storage(Section):
    """How the buckets of gs:// and s3:// are reached; see docs/storage.md. Credentials come from the environment."""

    endpoint: str | None = Field(
        default=None,
        json_schema_extra={'pattern': r'^https?://[^\s@]+$'},
        description='URL of an S3-compatible service, such as MinIO or R2; null: AWS_ENDPOINT_URL, or Amazon',
    )
    region: str | None = Field(default=None, min_length=1, description='region of the S3 bucket; null: AWS_REGION')
    profile: str | None = Field(
        default=None, min_length=1, description='profile of ~/.aws/credentials and ~/.aws/config; null: AWS_PROFILE'
    )
    retry_seconds: NotNegative | None = Field(
        default=None,
        description='for how long a failing request is repeated; null: PRETRAX_STORAGE_RETRY_SECONDS, or 60',
    )

    @pydantic.field_validator('endpoint')
    @classmethod
    def _without_credentials(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r'https?://[^\s@]+', endpoint):
            what = 'must be a URL that begins with http:// or https:// and has no user or password'
            raise ProblemsError(Problem((), what, 'credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY'))
        return endpoint


class Processes(Section):
    """The processes of the run, and which one this is. Missing values come from the environment, or from JAX."""

    count: Count | None = Field(
        default=None, description='number of processes; null: JAX_NUM_PROCESSES, or as JAX detects, or 1'
    )
    index: CountOrZero | None = Field(default=None, description='index of this process, from 0; null: JAX_PROCESS_ID')
    coordinator: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description='HOST:PORT of the first process; null: JAX_COORDINATOR_ADDRESS'
    )


class Eval(Section):
    """Loss on held-out text."""

    every: CountOrZero = Field(default=100, description='steps between evaluations; 0: never')
    batches: Count = Field(default=8, description='batches per evaluation')
    tasks: tuple[str, ...] = Field(default=(), strict=False, description='names of tasks, see docs/evaluation.md')
    tasks_every: CountOrZero = Field(default=1000, description='steps between evaluations on tasks; 0: never')
    tasks_limit: Count = Field(default=50, description='documents of each kind of a task')


class Notify(Section):
    """Notifications about a run; see docs/see.md."""

    url: str | None = Field(
        default=None,
        json_schema_extra={'pattern': r'^(https?://\S+|\$\{.*)$'},
        description='webhook that receives a JSON object; written to files as ${oc.env:...} only; null: none',
    )
    command: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        description='program and arguments to run, with the JSON object as its input; null: none',
    )
    events: tuple[Literal['finished', 'stopped', 'failed', 'diverged', 'stalled', 'recovered'], ...] = Field(
        default=('finished', 'stopped', 'failed', 'diverged', 'stalled', 'recovered'),
        strict=False,
        description='what to notify of',
    )
    stalled_seconds: Positive = Field(default=600.0, description='a run without a step for this long has stalled')

    @pydantic.field_validator('url')
    @classmethod
    def _web_address(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r'https?://[^\s/]\S*', url):
            raise ProblemsError(Problem((), 'must be a URL that begins with http:// or https:// and has no spaces'))
        return url


class Log(Section):
    """Where metrics go, besides the terminal and metrics.jsonl."""

    every: CountOrZero = Field(
        default=10, description='steps between lines of output; 0: none but the first and the last'
    )
    stall_seconds: Positive = Field(
        default=10.0, description='report a wait for data that is longer than this, with its cause'
    )
    profile: CountOrZero = Field(
        default=0,
        description='steps to trace, after three warm-up steps; the trace is written to <run_dir>/profile; 0: none',
    )
    profile_on_slow: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description='trace the next steps when a step takes this many times the usual time, three times at most; '
        'null: never',
    )
    layers: CountOrZero = Field(
        default=0,
        description='steps between lines of statistics by layer, in <run_dir>/layer_statistics.jsonl; 0: none',
    )
    noise_scale: CountOrZero = Field(
        default=0,
        description='steps between estimates of the gradient noise scale, in tokens; each costs two steps; 0: none',
    )
    peak_tflops: Positive | None = Field(
        default=None,
        description='peak TFLOP/s of a device in the compute dtype, for MFU; null: that of its vendor, or of a CPU as '
        'measured',
    )
    report: bool = Field(default=True, description='write <run_dir>/report.html at the end of the run')
    graph: bool = Field(
        default=False,
        description='write the compiled step to <run_dir>/program: a page, a picture (.svg) and its text',
    )
    tensorboard: bool = Field(default=False, description='write event files to <run_dir>/tb')
    wandb: str | None = Field(default=None, min_length=1, description='Weights & Biases project; null: off')
    mlflow: str | bool | None = Field(
        default=None, description='MLflow tracking URI; true: ./mlflow.db; null or false: off'
    )
    trackio: str | None = Field(
        default=None, min_length=1, description='Trackio project, in a local database; null: off'
    )

    notify: Notify = Field(default=Notify(), description='notifications by a webhook or a command')

    def trackers(self) -> dict[str, str | bool]:
        """The trackers that are on, by key."""
        keys = ('tensorboard', 'wandb', 'mlflow', 'trackio')
        return {key: choice for key in keys if (choice := getattr(self, key))}


class Sample(Section):
    """Text written by the model while it trains."""

    every: CountOrZero = Field(default=0, description='steps between samples; 0: never')
    prompts: tuple[str, ...] = Field(default=('def ',), min_length=1, strict=False, description='texts to continue')
    tokens: Count = Field(default=128, description='tokens to generate after each prompt')
    temperature: Temperature = Field(default=0.8, description=SETTINGS['temperature'].meaning)
    top_k: Annotated[TopK, Field(le=LARGEST)] | None = Field(
        default=None, description=f'{SETTINGS["top_k"].meaning}; null: all'
    )
    top_p: TopP | None = Field(default=None, description=f'{SETTINGS["top_p"].meaning}; null: all')


class InitFrom(Section):
    """What a run starts from, if that is more than the weights of a path."""

    path: str = Field(min_length=1, description='hf:DIR_OR_ID, or a run or checkpoint')
    optimizer: bool = Field(default=False, description='also take the optimizer state, of a run of pretrax')
    step: bool = Field(default=False, description='also continue the count of steps and batches, of a run of pretrax')
    partial: bool = Field(
        default=False, description='take only the weights that fit, layer by layer, and initialize the others'
    )
    layers: Annotated[tuple[CountOrZero, ...], Field(min_length=1)] | None = Field(
        default=None,
        strict=False,
        description='layers to take, by number from 0, for a model of fewer layers; null: all',
    )

    @pydantic.model_validator(mode='after')
    def _layers_alone(self) -> 'InitFrom':
        other = next((key for key in ('optimizer', 'partial') if getattr(self, key)), None)
        if self.layers is not None and other:
            problem = f'is given, and so is init_from.{other}, which counts the layers of the checkpoint'
            raise ProblemsError(Problem(('layers',), problem, f'leave out init_from.{other}'))
        return self


class Hidden(Section):
    """The hidden states of a teacher that a student learns."""

    layers: tuple[Annotated[tuple[CountOrZero, CountOrZero], Field(strict=False)], ...] = Field(
        min_length=1,
        strict=False,
        description='pairs of a layer of the student and a layer of the teacher, from 0: [[0, 1], [1, 3]]',
    )
    weight: Positive = Field(
        default=0.1, description='weight of the loss of the hidden states, which is added to the others'
    )


class Distill(Section):
    """Distillation: the model also learns from the probabilities of a teacher; see docs/research.md."""

    teacher: str | None = Field(
        default=None,
        min_length=1,
        description='hf:DIR_OR_ID, or a run or checkpoint, with the same vocabulary; it runs in every step',
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description='directory of `pretrax distill prepare`, instead of teacher; also gs://BUCKET/PATH or '
        's3://BUCKET/PATH',
    )
    weight: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5, description='weight of the distillation loss; the usual cross-entropy has the rest'
    )
    temperature: Positive = Field(default=1.0, description='what both models divide their logits by')
    direction: Literal['forward', 'reverse'] = Field(
        default='forward', description='forward: KL(teacher || student); reverse: KL(student || teacher)'
    )
    chunks: Count = Field(
        default=8, description='chunks of a sequence whose logits exist one at a time; at least model.loss_chunks'
    )

    hidden: Hidden | None = Field(
        default=None, description='hidden states of the teacher that the model learns too; not with cache; null: none'
    )

    @pydantic.model_validator(mode='after')
    def _one_teacher(self) -> 'Distill':
        if self.teacher is not None and self.cache is not None:
            raise ProblemsError(
                Problem(('cache',), 'is given, but distill.teacher is given too', 'set one of them to null')
            )
        if self.teacher is None and self.cache is None:
            raise ProblemsError(Problem(('teacher',), 'is missing', 'give a teacher, or distill.cache'))
        if self.hidden is not None and self.cache is not None:
            problem = 'needs a teacher that runs: distill.cache has no hidden states, only the most likely tokens'
            raise ProblemsError(
                Problem(('hidden',), problem, 'leave it out, or use distill.teacher instead of the cache')
            )
        return self


class RunConfig(Section):
    """One run. Read from YAML by `pretrax.config.load`, or from a dict by `pretrax.config.from_values`."""

    name: Annotated[str, NOTHING] = Field(description='name of the run: letters, digits, "." "_" "-"')
    run_dir: Annotated[_Directory, NOTHING] = Field(
        default_factory=lambda given: Path('runs') / given['name'],
        description='directory for everything the run writes, also gs://BUCKET/PATH or s3://BUCKET/PATH; runs/<name>',
    )
    seed: Annotated[CountOrZero, STEP] = Field(
        default=0, description='of all random numbers: initial weights, the order of the data, dropout'
    )
    steps: Annotated[Count, STEP_RESUMABLE] = Field(description='optimizer steps of the whole run')
    model: Annotated[Model, STEP] = Field(description='a preset or sizes, and the component that builds the model')
    init_from: Annotated[Annotated[str, Field(min_length=1)] | InitFrom | None, INPUT] = Field(
        default=None,
        description='weights to start from: hf:DIR_OR_ID, or a run or checkpoint; it also supplies what model leaves '
        'out',
    )
    distill: Annotated[Distill | None, STEP] = Field(
        default=None, description='a teacher whose probabilities the model learns from; null: none'
    )
    data: Annotated[Data, INPUT] = Field(description='the text to train on')
    batch: Annotated[Batch, STEP] = Field(description='tokens per step and sequence length')
    optimizer: Annotated[Optimizer, STEP] = Field(description='the update rule and its learning_rate')
    schedule: Annotated[Schedule, STEP] = Field(
        default_factory=lambda: Schedule.model_validate({}), description='the learning rate over the run'
    )
    mesh: Annotated[Mesh, STEP] = Field(default=Mesh(), description='how the devices are arranged')
    precision: Annotated[Precision, STEP] = Field(default=Precision(), description='dtypes of matrix products')
    memory: Annotated[Memory, STEP_RESUMABLE] = Field(default=Memory(), description='what is kept in host memory')
    compiler: Annotated[Compiler, STEP_RESUMABLE] = Field(default=Compiler(), description='options of XLA for the step')
    checkpoint: Annotated[Checkpoint, NOTHING] = Field(default=Checkpoint(), description='when the state is saved')
    faults: Annotated[Faults, NOTHING] = Field(default=Faults(), description='spikes, hangs, time limits')
    storage: Annotated[Storage, NOTHING] = Field(default=Storage(), description='how buckets are reached')
    processes: Annotated[Processes, NOTHING] = Field(default=Processes(), description='the processes of the run')
    eval: Annotated[Eval, NOTHING] = Field(default=Eval(), description='loss on held-out text')
    log: Annotated[Log, NOTHING] = Field(default=Log(), description='where metrics go')
    sample: Annotated[Sample, NOTHING] = Field(default=Sample(), description='text generated while training')
    plugins: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], STEP] = Field(
        default=(), strict=False, description='Python files or modules with your own components'
    )

    _origins: dict[tuple[str | int, ...], str] = pydantic.PrivateAttr(default_factory=dict)
    _references: dict[tuple[str | int, ...], str] = pydantic.PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = pydantic.PrivateAttr(())

    def __eq__(self, other: object) -> bool:
        """Whether the values are equal, whatever their origins."""
        return isinstance(other, RunConfig) and self.model_dump() == other.model_dump()

    @property
    def origins(self) -> Mapping[tuple[str | int, ...], str]:
        """Where each key was given ('configs/a.yaml:3', 'override', ...); see `pretrax.config.origin` for the rest."""
        return self._origins

    @property
    def references(self) -> Mapping[tuple[str | int, ...], str]:
        """The text of each value that comes from the environment, such as '${oc.env:SCRATCH}/run'."""
        return self._references

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions made while reading that the user should see, one line each."""
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
                    f'write {plain or "my-run"}; run_dir sets the directory',
                )
            )
        return name

    @pydantic.field_validator('run_dir', mode='plain')
    @classmethod
    def _some_directory(cls, directory: Any) -> Any:
        if not isinstance(directory, str | Path | BucketPath):
            raise ProblemsError(
                Problem((), f'is {shown(directory)}; expected a directory', 'leave it out for runs/<name>')
            )
        if isinstance(directory, str) and directory.startswith('~'):
            raise ProblemsError(
                Problem((), f'is {shown(directory)}; only a shell expands ~', 'write ${oc.env:HOME}/...')
            )
        if isinstance(directory, str) and (not directory.strip() or '\0' in directory):
            raise ProblemsError(
                Problem((), f'is {shown(directory)}; expected a directory', 'leave it out for runs/<name>')
            )
        try:
            return locate(directory) if isinstance(directory, str) else directory
        except UserError as error:
            problem, _, fix = str(error).partition('\n')
            raise ProblemsError(
                Problem((), problem, fix or 'write a local path, gs://BUCKET/PATH or s3://BUCKET/PATH')
            ) from None

    @pydantic.field_validator('init_from')
    @classmethod
    def _some_start(cls, start: str | InitFrom | None) -> str | InitFrom | None:
        path = start.path if isinstance(start, InitFrom) else start
        if path is not None and not path.startswith('hf:'):
            try:
                locate(path)
            except UserError as error:
                problem, _, fix = str(error).partition('\n')
                raise ProblemsError(Problem((), problem, fix)) from None
        return start

    @pydantic.model_validator(mode='after')
    def _warmup_ends(self) -> 'RunConfig':
        warmup = getattr(self.schedule.options, 'warmup', 0)
        if isinstance(warmup, int | float) and warmup > self.steps:
            raise ProblemsError(
                Problem(
                    ('schedule', 'warmup'),
                    f'is {warmup}, more than steps ({self.steps}): the run would end before it reaches the learning '
                    'rate',
                    f'write a warmup of at most {self.steps}, or more steps',
                )
            )
        return self

    @pydantic.model_validator(mode='after')
    def _averages_once(self) -> 'RunConfig':
        if self.optimizer.name != 'schedule_free':
            return self
        if self.optimizer.ema_decay is not None:
            problem = f'is {self.optimizer.ema_decay}, but the weights of optimizer.name=schedule_free are an average'
            raise ProblemsError(Problem(('optimizer', 'ema_decay'), problem, 'leave it out'))
        if self.schedule.name in registry.DECAYING:
            problem = (
                f'is {self.schedule.name}, but the average of optimizer.name=schedule_free takes the place of a decay'
            )
            raise ProblemsError(Problem(('schedule', 'name'), problem, 'use schedule.name=constant, with a warmup'))
        return self

    @pydantic.model_validator(mode='after')
    def _batches_grow_in_time(self) -> 'RunConfig':
        for key in ('tokens', 'sequence_length'):
            value = getattr(self.batch, key)
            if not isinstance(value, int) and value[-1][0] >= self.steps:
                raise ProblemsError(
                    Problem(
                        ('batch', key),
                        f'changes at step {value[-1][0]}, but the run ends after {self.steps} steps',
                        'leave out this change, or write more steps',
                    )
                )
        return self


def known_keys_elsewhere(section: type[Component]) -> list[str]:
    """Dotted keys outside a section, to suggest for a key in the wrong section."""
    return [key for key in known_keys(RunConfig) if not key.startswith(f'{section.kind}.')]
