"""Every key of a configuration: name, type, default, effect, and meaning with its unit.

The sections `model`, `data`, `optimizer` and `schedule` choose a component by `name` and pass it their other keys
(`registry.py`). Types are strict: 'yes' is not a boolean, true is not 1, and 1.5 is not an integer.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from pretrax.config import registry
from pretrax.config.batch_sizes import BatchSize, batch_sizes, problems_of
from pretrax.config.one_of import OneOf
from pretrax.config.other_tools import advice_for, spelled
from pretrax.config.problems import ProblemsError, keys_by_last_name, known_keys, mistake, nearest, shown, unknown
from pretrax.errors import UserError
from pretrax.infer.sampling_settings import SETTINGS, Temperature, TopK, TopP
from pretrax.storage import BucketPath, locate
from pretrax.storage.locate import LONGEST_NAME, plain_name


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of a change of a key, declared with the type of the key or of a section that holds it."""

    # 'step' if the compiled step may differ; 'input' if only batches or first weights differ, on whose shapes the step
    # depends; 'nothing' otherwise
    on: Literal['step', 'input', 'nothing']
    resumable: bool = False  # whether a run may be resumed with another value


STEP = Effect('step')
STEP_RESUMABLE = Effect('step', resumable=True)
INPUT = Effect('input')
WEIGHTS = Effect('nothing')  # other weights, from the same step and batches of the same shapes
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
        raise mistake(
            (), f'is {shown(value)}; expected a number, or [[step, value], ...] by ascending steps, {example}'
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


def default(value: Any, description: str, **more: Any) -> Any:
    """A key of a section that may be left out. `more`: other arguments of `pydantic.Field`."""
    return Field(default=value, description=description, **more)


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, types are strict, and values are frozen."""

    model_config = ConfigDict(extra='forbid', frozen=True, strict=True, protected_namespaces=())


def _plain(name: str, example: str, more: str = '') -> str:
    """A name that is safe in paths and keys of objects. Raises the mistake if it is another one."""
    plain = plain_name(name)
    if name != plain or not name:
        raise mistake(
            (),
            f'is {shown(name)}; expected letters, digits, ".", "_" and "-", at most {LONGEST_NAME}',
            f'write {plain or example}{more}',
        )
    return name


def _located(directory: Any, without: str) -> Any:
    """A directory on a disk or in a bucket. Raises the mistake if it is none; `without`: how to leave the key out."""
    is_text = isinstance(directory, str) and directory.strip() and '\0' not in directory
    if not is_text and not isinstance(directory, Path | BucketPath):
        raise mistake((), f'is {shown(directory)}; expected a directory', without)
    if isinstance(directory, str) and directory.startswith('~'):
        raise mistake((), f'is {shown(directory)}; only a shell expands ~', 'write ${oc.env:HOME}/...')
    try:
        return locate(directory) if isinstance(directory, str) else directory
    except UserError as error:
        problem, _, fix = str(error).partition('\n')
        raise mistake((), problem, fix or 'write a local path, gs://BUCKET/PATH or s3://BUCKET/PATH') from None


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
            near = nearest(str(spelled(f'{cls.kind}.name', name)), registered)
            raise mistake(
                ('name',),
                f'is {shown(name)}, which is not a registered {cls.kind}{near}',
                f'registered: {", ".join(registered)}; a file in plugins: can add more',
            )
        model = registry.options_model(cls.kind, name)
        common = set(cls.model_fields) - {'options'}
        if reserved := common & set(model.model_fields):
            raise ValueError(f'the {cls.kind} {name!r} has options that pretrax applies itself: {sorted(reserved)}')
        options = {key: value for key, value in values.items() if key not in common}
        valid = common | set(model.model_fields)
        anywhere = [key for key in known_keys(RunConfig) if not key.startswith(f'{cls.kind}.')]
        nested = cls.nested_names(values)
        strangers = [
            unknown((key,), valid, anywhere, nested, advice_for(key, options[key], {}, keys_by_last_name(RunConfig)))
            for key in options
            if key not in valid
        ]
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
        """The dotted keys of options in sections, by the last name of each, and by its name in pretrax 0.1."""
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


class ParameterGroup(Section):
    """Weights with a learning rate or a decay of their own."""

    match: Annotated[
        tuple[str, ...],
        Field(min_length=1, strict=False),
        pydantic.BeforeValidator(
            lambda given: (given,) if isinstance(given, str) else given, json_schema_input_type=str | tuple[str, ...]
        ),
    ] = Field(description='a pattern for the names of weights, or several')
    learning_rate_scale: NotNegative = default(1.0, 'multiplies the learning rate; 0: frozen')
    weight_decay: NotNegative | None = default(
        None, 'weight decay of these weights; null: as optimizer.weight_decay and no_decay say'
    )


class Optimizer(Component):
    """The update rule; pretrax applies the rate, the decay and the clipping."""

    kind = 'optimizer'

    learning_rate: Positive = Field(description='peak learning rate; the schedule multiplies it')
    weight_decay: NotNegative = default(0.0, 'decoupled: each step shrinks matrices by rate * decay')
    no_decay: tuple[str, ...] = default(
        ('*norm*', '*bias'), 'patterns for the names of weights that do not decay', strict=False
    )
    cautious_decay: bool = default(False, 'decay only the values that the step shrinks too')
    clip_norm: Positive | None = default(1.0, 'largest global gradient norm; null: no clipping')
    groups: tuple[ParameterGroup, ...] = default(
        (), 'weights with another rate or decay; the first that matches counts', strict=False
    )
    freeze: tuple[str, ...] = default((), 'patterns for the names of weights that keep their values', strict=False)
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = default(
        None, 'keep a moving average of the weights, with this decay per step; null: none'
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
    micro: Count | Literal['auto'] | None = default(
        None, 'sequences per device in one forward pass; null: all at once; auto: measured'
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
    """How the devices are arranged. `mesh: auto` is auto for every axis. If only r or d is given, the other is 1;
    see `pretrax.config.mesh.resolve_mesh`, and `pretrax.plan.auto`, which plans e, c, t and p before the run starts.
    """

    r: Axis = default('auto', 'replicas: shard the batch; every replica has all weights')
    d: Axis = default('auto', 'fully sharded data: shard the batch and the weights')
    e: Axis = default(1, 'experts: shard the batch, and the experts of a mixture')
    c: Axis = default(1, 'context: shard each sequence')
    t: Axis = default(1, 'tensor: shard heads, feed-forward and vocabulary')
    p: Axis = default(1, 'pipeline: shard the layers into stages')

    @pydantic.model_validator(mode='before')
    @classmethod
    def _one_given(cls, values: Any) -> Any:
        if values == 'auto':
            return dict.fromkeys('rdectp', 'auto')
        if isinstance(values, dict) and ('r' in values) != ('d' in values):
            return {'r': 1, 'd': 1} | values
        return values

    @property
    def is_planned(self) -> bool:
        """Whether an axis needs a plan; auto for r and d does not."""
        return 'auto' in (self.e, self.c, self.t, self.p)

    def plain(self) -> 'Mesh':
        """The mesh with 1 for every axis that needs a plan."""
        return self.model_copy(update={axis: 1 for axis in 'ectp' if getattr(self, axis) == 'auto'})


class Precision(Section):
    """Weights, optimizer state, norms and loss are always f32."""

    compute: Literal['auto', 'bf16', 'fp16', 'f32'] = default(
        'auto', 'dtype of activations and matrix products; auto: bf16 if the device multiplies it fast, else f32'
    )
    loss_scale: Positive = default(65536.0, 'in fp16, what the loss is multiplied by at first; an overflow halves it')
    loss_scale_steps: Count = default(2000, 'in fp16, steps without an overflow that double the scale')
    matmul: Literal['compute', 'int8', 'fp8', 'mxfp8', 'nvfp4'] = default(
        'compute', 'operands of products with weights: the compute dtype, int8, fp8, mxfp8 or nvfp4'
    )
    exempt: tuple[str, ...] = default(
        ('head', 'first.*', 'last.*'),
        'patterns for products that stay in the compute dtype: layer.weight, weight, head',
        strict=False,
    )
    reduction: Literal['f32', 'bf16', 'bf16_r_d'] = default(
        'f32', 'dtype in which gradients are summed over mesh.r; bf16: half the bytes; bf16_r_d: over mesh.d too'
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
            raise mistake((given[0],), problem, 'leave it out, or give precision.compute=fp16')
        if self.compute == 'fp16' and self.matmul != 'compute':
            problem = f'is {self.matmul}, which is not tested with precision.compute=fp16'
            raise mistake(('matmul',), problem, 'use precision.compute=bf16')
        return self

    @pydantic.model_validator(mode='after')
    def _something_to_exempt(self) -> 'Precision':
        if self.matmul == 'compute' and self.exempt != type(self).model_fields['exempt'].default:
            raise mistake(
                ('exempt',),
                f'is {shown(list(self.exempt))}, but no product is in eight bits',
                'leave it out, or give precision.matmul=int8, fp8, mxfp8 or nvfp4',
            )
        return self


class Memory(Section):
    """What is kept in host memory instead of device memory. For activations, see model.save."""

    offload: tuple[Literal['optimizer', 'weights'], ...] = default(
        (), 'parts of the state to keep in host memory between steps', strict=False
    )


class Compiler(Section):
    """Options of XLA for the training step, besides those that pretrax chooses; see docs/scaling.md."""

    options: dict[Annotated[str, Field(min_length=1)], bool | int | float | str | None] = default(
        {}, 'options of XLA by name, which win over chosen ones; null: do not set a chosen one'
    )


class CheckpointMemory(Section):
    """The newest state in the memory of the machines; a launcher keeps it there while it starts processes again."""

    every: CountOrZero | None = default(
        None, 'steps between states in memory; 0: none; null: as often as it costs less than 1 % of the time'
    )
    copies: CountOrZero | None = default(
        None, 'copies of them in the memory of other machines; null: 1 if there are several machines'
    )


class Checkpoint(Section):
    """When the training state is saved. It is always saved at the end of a run and on Ctrl-C."""

    every: CountOrZero = default(100, 'steps between checkpoints; 0: none before the end')
    minutes: Positive | None = default(None, 'also save this many minutes after the last checkpoint')
    keep: Count = default(3, 'number of newest checkpoints to keep')
    keep_every: CountOrZero = default(0, 'also keep every step divisible by this; 0: none')
    keep_best: CountOrZero = default(0, 'also keep this many with the lowest val_loss; 0: none')
    memory: CheckpointMemory = default(CheckpointMemory(), 'states in the memory of machines, besides checkpoints')


class Replay(Section):
    """How devices that compute wrong numbers without an error are found; see docs/reliability.md."""

    every: CountOrZero = default(
        0, 'steps between two at which the gradient is computed twice, and replicas of the state compared; 0: never'
    )
    rotate: bool = default(True, 'also compute it with the rows of other devices, if the mesh axis d has several')
    quarantine_after: Count = default(2, 'differences of a device after which the run ends, to go on without its host')


class Faults(Section):
    """How faults are handled; see docs/reliability.md."""

    spike: Annotated[Positive | None, STEP] = default(
        None, 'skip a step whose loss is this many standard deviations above normal; null: never'
    )
    rollback_after: CountOrZero = default(
        10, 'skipped steps in a row before the run rolls back to a checkpoint; 0: never'
    )
    rollbacks: CountOrZero = default(2, 'rollbacks before the run fails')
    time_limit_minutes: Positive | None = default(
        None, 'save and exit with code 75 before the process reaches this age; null: no limit'
    )
    hang_seconds: Positive = default(1800.0, 'exit with code 75 and stack traces if a step takes longer than this')
    heartbeat_seconds: Annotated[int, Field(ge=2, le=LARGEST)] = default(
        20, 'with several processes, one that is silent for this long counts as lost; the others exit with code 75'
    )
    replay: Replay = default(Replay(), 'replays of steps, which find devices that compute wrong numbers')
    lease_seconds: Positive = default(
        60.0, 'with run_dir in a bucket, another process may take over the run if this one is silent for this long'
    )
    stack_trace_interval_seconds: NotNegative = default(
        0.0, 'write the stacks of all threads at this interval; 0: only on a fault'
    )
    stack_trace_to: str | None = default(
        None,
        'where stack_trace_interval_seconds writes: console, or a directory on a disk; null: stacks/ in '
        'the run directory',
        min_length=1,
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
        raise mistake(('stack_trace_to',), f'is {shown(where)}, {problem}', fix)


class Storage(Section):
    """How the buckets of gs:// and s3:// are reached; see docs/storage.md. Credentials come from the environment."""

    endpoint: str | None = default(
        None,
        'URL of an S3-compatible service, such as MinIO or R2; null: AWS_ENDPOINT_URL, or Amazon',
        json_schema_extra={'pattern': r'^https?://[^\s@]+$'},
    )
    region: str | None = default(None, 'region of the S3 bucket; null: AWS_REGION', min_length=1)
    profile: str | None = default(
        None, 'profile of ~/.aws/credentials and ~/.aws/config; null: AWS_PROFILE', min_length=1
    )
    retry_seconds: NotNegative | None = default(
        None, 'for how long a failing request is repeated; null: PRETRAX_STORAGE_RETRY_SECONDS, or 60'
    )

    @pydantic.field_validator('endpoint')
    @classmethod
    def _without_credentials(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r'https?://[^\s@]+', endpoint):
            what = 'must be a URL that begins with http:// or https:// and has no user or password'
            raise mistake((), what, 'credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY')
        return endpoint


class Federation(Section):
    """Runs, called islands, that train one model and share only a bucket; without one, there is no federation."""

    bucket: Annotated[_Directory | None, WEIGHTS] = default(
        None, 'gs://BUCKET/PATH, s3://BUCKET/PATH, or a directory that all islands share; null: no federation'
    )
    name: Annotated[str | None, WEIGHTS] = default(
        None, 'name of this island, another one for each; null: the name of the run'
    )
    islands: Annotated[Count, WEIGHTS] = default(
        1, 'largest number of islands; the data is divided into as many shares, in advance'
    )
    every: Annotated[Count, WEIGHTS] = default(
        100, 'steps that an island trains by itself between two averages of a weight'
    )
    fragments: Annotated[Count, WEIGHTS] = default(
        1, 'groups of layers that are averaged in turn, one each every / fragments steps; 1: all weights at once'
    )
    delay: Annotated[CountOrZero, WEIGHTS] = default(
        0, 'steps that an island goes on training while a fragment is sent and averaged; 0: it waits'
    )
    mixing: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, WEIGHTS] = default(
        None, 'share of its own weights that an island keeps when it takes an average; null: 0.5 with delay, else 0'
    )
    encoding: Annotated[Literal['f32', 'bf16', 'int8', 'int4'], WEIGHTS] = default(
        'bf16', 'dtype of the differences of weights that are sent; int8 and int4: what rounding loses is sent later'
    )
    outer_rate: Annotated[Positive, WEIGHTS] = default(
        0.7, 'learning rate of the outer optimizer, SGD on the mean difference of the islands'
    )
    outer_momentum: Annotated[Annotated[float, Field(ge=0, lt=1)], WEIGHTS] = default(
        0.9, 'Nesterov momentum of the outer optimizer'
    )
    wait_for: Annotated[Count, NOTHING] = default(
        1, 'islands for which the first round waits, however long that takes; 1: the first island trains alone'
    )
    patience: Annotated[Positive, NOTHING] = default(
        300.0,
        'seconds from the first difference of a round until the round is closed without the islands that are late',
    )
    keep: Annotated[Count, NOTHING] = default(
        10, 'rounds between the averages that stay in the bucket as whole weights'
    )

    @property
    def shares(self) -> int:
        """The number of shares of the data: one without a federation."""
        return 1 if self.bucket is None else self.islands

    @property
    def rounds_apart(self) -> int:
        """Steps between two rounds."""
        return self.every // self.fragments

    @property
    def kept_share(self) -> float:
        """The share of its own weights that an island keeps when it takes an average."""
        return (0.5 if self.delay else 0.0) if self.mixing is None else self.mixing

    @pydantic.field_validator('bucket', mode='plain', json_schema_input_type=str | None)
    @classmethod
    def _some_place(cls, bucket: Any) -> Any:
        return None if bucket is None else _located(bucket, 'leave it out for a run without a federation')

    @pydantic.field_validator('name')
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        return None if name is None else _plain(name, 'my-island')

    @pydantic.model_validator(mode='after')
    def _rounds_in_turn(self) -> 'Federation':
        if self.every % self.fragments:
            problem = f'is {self.fragments}, which does not divide federation.every ({self.every})'
            fix = f'write federation.every={-(-self.every // self.fragments) * self.fragments}, or other fragments'
            raise mistake(('fragments',), problem, fix)
        if self.delay >= self.rounds_apart:
            problem = f'is {self.delay}, but the next round begins {self.rounds_apart} steps after the last'
            raise mistake(('delay',), problem, 'write a smaller delay, a larger every, or fewer fragments')
        if self.wait_for > self.islands:
            problem = f'is {self.wait_for}, but there are at most {self.islands} islands'
            raise mistake(('wait_for',), problem, 'write a smaller number, or a larger federation.islands')
        if self.mixing and not self.delay:
            problem = f'is {self.mixing}, but without federation.delay an island has trained nothing since it sent'
            raise mistake(('mixing',), problem, 'leave it out, or give federation.delay')
        return self


class Processes(Section):
    """The processes of the run, and which one this is. Missing values come from the environment, or from JAX."""

    count: Count | None = default(None, 'number of processes; null: JAX_NUM_PROCESSES, or as JAX detects, or 1')
    index: CountOrZero | None = default(None, 'index of this process, from 0; null: JAX_PROCESS_ID')
    coordinator: Annotated[str, Field(min_length=1)] | None = default(
        None, 'HOST:PORT of the first process; null: JAX_COORDINATOR_ADDRESS'
    )


class Eval(Section):
    """Loss on held-out text."""

    every: CountOrZero = default(100, 'steps between evaluations; 0: never')
    batches: Count = default(8, 'batches per evaluation')
    tasks: tuple[str, ...] = default((), 'names of tasks, see docs/evaluation.md', strict=False)
    tasks_every: CountOrZero = default(1000, 'steps between evaluations on tasks; 0: never')
    tasks_limit: Count = default(50, 'documents of each kind of a task')


class Notify(Section):
    """Notifications about a run; see docs/see.md."""

    url: str | None = default(
        None,
        'webhook that receives a JSON object; written to files as ${oc.env:...} only; null: none',
        json_schema_extra={'pattern': r'^(https?://\S+|\$\{.*)$'},
    )
    command: tuple[Annotated[str, Field(min_length=1)], ...] | None = default(
        None, 'program and arguments to run, with the JSON object as its input; null: none', min_length=1, strict=False
    )
    events: tuple[Literal['finished', 'stopped', 'failed', 'diverged', 'corrupted', 'stalled', 'recovered'], ...] = (
        default(
            ('finished', 'stopped', 'failed', 'diverged', 'corrupted', 'stalled', 'recovered'),
            'what to notify of',
            strict=False,
        )
    )
    stalled_seconds: Positive = default(600.0, 'a run without a step for this long has stalled')

    @pydantic.field_validator('url')
    @classmethod
    def _web_address(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r'https?://[^\s/]\S*', url):
            raise mistake((), 'must be a URL that begins with http:// or https:// and has no spaces')
        return url


class Log(Section):
    """Where metrics go, besides the terminal and metrics.jsonl."""

    every: CountOrZero = default(10, 'steps between lines of output; 0: none but the first and the last')
    stall_seconds: Positive = default(10.0, 'report a wait for data that is longer than this, with its cause')
    profile: CountOrZero = default(
        0, 'steps to trace, after three warm-up steps; the trace is written to <run_dir>/profile; 0: none'
    )
    profile_on_slow: Annotated[float, Field(gt=1)] | None = default(
        None, 'trace the next steps when a step takes this many times the usual time, three times at most; null: never'
    )
    layers: CountOrZero = default(
        0, 'steps between lines of statistics by layer, in <run_dir>/layer_statistics.jsonl; 0: none'
    )
    noise_scale: CountOrZero = default(
        0, 'steps between estimates of the gradient noise scale, in tokens; each costs two steps; 0: none'
    )
    peak_tflops: Positive | None = default(
        None,
        'peak TFLOP/s of a device in the compute dtype, for MFU; null: that of its vendor, or of a CPU as measured',
    )
    report: bool = default(True, 'write <run_dir>/report.html at the end of the run')
    graph: bool = default(False, 'write the compiled step to <run_dir>/program: a page, a picture (.svg) and its text')
    tensorboard: bool = default(False, 'write event files to <run_dir>/tb')
    wandb: str | None = default(None, 'Weights & Biases project; null: off', min_length=1)
    mlflow: str | bool | None = default(None, 'MLflow tracking URI; true: ./mlflow.db; null or false: off')
    trackio: str | None = default(None, 'Trackio project, in a local database; null: off', min_length=1)

    notify: Notify = default(Notify(), 'notifications by a webhook or a command')

    def trackers(self) -> dict[str, str | bool]:
        """The trackers that are on, by key."""
        keys = ('tensorboard', 'wandb', 'mlflow', 'trackio')
        return {key: choice for key in keys if (choice := getattr(self, key))}


class Sample(Section):
    """Text written by the model while it trains."""

    every: CountOrZero = default(0, 'steps between samples; 0: never')
    prompts: tuple[str, ...] = default(('def ',), 'texts to continue', min_length=1, strict=False)
    tokens: Count = default(
        128, 'most tokens to generate after each prompt; fewer where the positions of the model end'
    )
    temperature: Temperature = default(0.8, SETTINGS['temperature'].meaning)
    top_k: Annotated[TopK, Field(le=LARGEST)] | None = default(None, f'{SETTINGS["top_k"].meaning}; null: all')
    top_p: TopP | None = default(None, f'{SETTINGS["top_p"].meaning}; null: all')


class InitFrom(Section):
    """What a run starts from, if that is more than the weights of a path."""

    path: str = Field(min_length=1, description='hf:DIR_OR_ID, or a run or checkpoint')
    optimizer: bool = default(False, 'also take the optimizer state, of a run of pretrax')
    step: bool = default(False, 'also continue the count of steps and batches, of a run of pretrax')
    partial: bool = default(False, 'take only the weights that fit, layer by layer, and initialize the others')
    layers: Annotated[tuple[CountOrZero, ...], Field(min_length=1)] | None = default(
        None, 'layers to take, by number from 0, for a model of fewer layers; null: all', strict=False
    )

    @pydantic.model_validator(mode='after')
    def _layers_alone(self) -> 'InitFrom':
        other = next((key for key in ('optimizer', 'partial') if getattr(self, key)), None)
        if self.layers is not None and other:
            problem = f'is given, and so is init_from.{other}, which counts the layers of the checkpoint'
            raise mistake(('layers',), problem, f'leave out init_from.{other}')
        return self


class Hidden(Section):
    """The hidden states of a teacher that a student learns."""

    layers: tuple[Annotated[tuple[CountOrZero, CountOrZero], Field(strict=False)], ...] = Field(
        min_length=1,
        strict=False,
        description='pairs of a layer of the student and a layer of the teacher, from 0: [[0, 1], [1, 3]]',
    )
    weight: Positive = default(0.1, 'weight of the loss of the hidden states, which is added to the others')


class Distill(Section):
    """Distillation: the model also learns from the probabilities of a teacher; see docs/research.md."""

    teacher: str | None = default(
        None, 'hf:DIR_OR_ID, or a run or checkpoint, with the same vocabulary; it runs in every step', min_length=1
    )
    cache: str | None = default(
        None,
        'directory of `pretrax distill prepare`, instead of teacher; also gs://BUCKET/PATH or s3://BUCKET/PATH',
        min_length=1,
    )
    weight: Annotated[float, Field(ge=0, le=1)] = default(
        0.5, 'weight of the distillation loss; the usual cross-entropy has the rest'
    )
    temperature: Positive = default(1.0, 'what both models divide their logits by')
    direction: Literal['forward', 'reverse'] = default(
        'forward', 'forward: KL(teacher || student); reverse: KL(student || teacher)'
    )
    chunks: Count = default(8, 'chunks of a sequence whose logits exist one at a time; at least model.loss_chunks')

    hidden: Hidden | None = default(
        None, 'hidden states of the teacher that the model learns too; not with cache; null: none'
    )

    @pydantic.model_validator(mode='after')
    def _one_teacher(self) -> 'Distill':
        if self.teacher is not None and self.cache is not None:
            raise mistake(('cache',), 'is given, but distill.teacher is given too', 'set one of them to null')
        if self.teacher is None and self.cache is None:
            raise mistake(('teacher',), 'is missing', 'give a teacher, or distill.cache')
        if self.hidden is not None and self.cache is not None:
            problem = 'needs a teacher that runs: distill.cache has no hidden states, only the most likely tokens'
            raise mistake(('hidden',), problem, 'leave it out, or use distill.teacher instead of the cache')
        return self


class RunConfig(Section):
    """One run. Read from YAML by `pretrax.config.load`, or from a dict by `pretrax.config.from_values`."""

    name: Annotated[str, NOTHING] = Field(description='name of the run: letters, digits, "." "_" "-"')
    run_dir: Annotated[_Directory, NOTHING] = Field(
        default_factory=lambda given: Path('runs') / given['name'],
        description='directory for everything the run writes, also gs://BUCKET/PATH or s3://BUCKET/PATH; runs/<name>',
    )
    seed: Annotated[CountOrZero, STEP] = default(
        0, 'of all random numbers: initial weights, the order of the data, dropout'
    )
    steps: Annotated[Count, STEP_RESUMABLE] = Field(description='optimizer steps of the whole run')
    model: Annotated[Model, STEP] = Field(description='a preset or sizes, and the component that builds the model')
    init_from: Annotated[Annotated[str, Field(min_length=1)] | InitFrom | None, INPUT] = default(
        None, 'weights to start from: hf:DIR_OR_ID, or a run or checkpoint; it also supplies what model leaves out'
    )
    distill: Annotated[Distill | None, STEP] = default(
        None, 'a teacher whose probabilities the model learns from; null: none'
    )
    data: Annotated[Data, INPUT] = Field(description='the text to train on')
    batch: Annotated[Batch, STEP] = Field(description='tokens per step and sequence length')
    optimizer: Annotated[Optimizer, STEP] = Field(description='the update rule and its learning_rate')
    schedule: Annotated[Schedule, STEP] = Field(
        default_factory=lambda: Schedule.model_validate({}), description='the learning rate over the run'
    )
    mesh: Annotated[Mesh, STEP] = default(Mesh(), 'how the devices are arranged')
    precision: Annotated[Precision, STEP] = default(Precision(), 'dtypes of matrix products')
    memory: Annotated[Memory, STEP_RESUMABLE] = default(Memory(), 'what is kept in host memory')
    compiler: Annotated[Compiler, STEP_RESUMABLE] = default(Compiler(), 'options of XLA for the step')
    checkpoint: Annotated[Checkpoint, NOTHING] = default(Checkpoint(), 'when the state is saved')
    faults: Annotated[Faults, NOTHING] = default(Faults(), 'spikes, hangs, time limits')
    storage: Annotated[Storage, NOTHING] = default(Storage(), 'how buckets are reached')
    federation: Annotated[Federation, WEIGHTS] = default(
        Federation(), 'clusters that share only a bucket and train one model'
    )
    processes: Annotated[Processes, NOTHING] = default(Processes(), 'the processes of the run')
    eval: Annotated[Eval, NOTHING] = default(Eval(), 'loss on held-out text')
    log: Annotated[Log, NOTHING] = default(Log(), 'where metrics go')
    sample: Annotated[Sample, NOTHING] = default(Sample(), 'text generated while training')
    plugins: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], STEP] = default(
        (), 'Python files or modules with your own components', strict=False
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
    def start(self) -> str | None:
        """The path in `init_from`."""
        return self.init_from.path if isinstance(self.init_from, InitFrom) else self.init_from

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions made while reading that the user should see, one line each."""
        return self._notes

    @pydantic.field_validator('name')
    @classmethod
    def _plain_name(cls, name: str) -> str:
        return _plain(name, 'my-run', '; run_dir sets the directory')

    @pydantic.field_validator('run_dir', mode='plain')
    @classmethod
    def _some_directory(cls, directory: Any) -> Any:
        return _located(directory, 'leave it out for runs/<name>')

    @pydantic.field_validator('init_from')
    @classmethod
    def _some_start(cls, start: str | InitFrom | None) -> str | InitFrom | None:
        path = start.path if isinstance(start, InitFrom) else start
        if path is not None and not path.startswith('hf:'):
            try:
                locate(path)
            except UserError as error:
                problem, _, fix = str(error).partition('\n')
                raise mistake((), problem, fix) from None
        return start

    @pydantic.model_validator(mode='after')
    def _warmup_ends(self) -> 'RunConfig':
        warmup = getattr(self.schedule.options, 'warmup', 0)
        if isinstance(warmup, int | float) and warmup > self.steps:
            raise mistake(
                ('schedule', 'warmup'),
                f'is {warmup}, more than steps ({self.steps}): the run would end before it reaches the learning rate',
                f'write a warmup of at most {self.steps}, or more steps',
            )
        return self

    @pydantic.model_validator(mode='after')
    def _averages_once(self) -> 'RunConfig':
        if self.optimizer.name != 'schedule_free':
            return self
        if self.optimizer.ema_decay is not None:
            problem = f'is {self.optimizer.ema_decay}, but the weights of optimizer.name=schedule_free are an average'
            raise mistake(('optimizer', 'ema_decay'), problem, 'leave it out')
        if self.schedule.name in registry.DECAYING:
            problem = (
                f'is {self.schedule.name}, but the average of optimizer.name=schedule_free takes the place of a decay'
            )
            raise mistake(('schedule', 'name'), problem, 'use schedule.name=constant, with a warmup')
        return self

    @pydantic.model_validator(mode='after')
    def _islands_fit(self) -> 'RunConfig':
        bucket = self.federation.bucket
        if bucket is None:
            return self
        inner, outer = (
            os.path.abspath(where) if isinstance(where, Path) else str(where) for where in (bucket, self.run_dir)
        )
        if f'{inner}/'.startswith(f'{outer}/'):
            problem = f'is {bucket}, inside run_dir ({outer}), which belongs to one island'
            raise mistake(('federation', 'bucket'), problem, 'write another directory, which all islands reach')
        if self.optimizer.name == 'schedule_free':
            problem = 'is schedule_free, whose state is an average of the weights, which islands replace'
            raise mistake(('optimizer', 'name'), problem, 'use another optimizer, or federation.bucket=null')
        if isinstance(self.init_from, InitFrom) and self.init_from.step:
            problem = 'is true, but the steps of a federation are counted from its first round'
            raise mistake(('init_from', 'step'), problem, 'leave it out, or write federation.bucket=null')
        return self

    @pydantic.model_validator(mode='after')
    def _batches_grow_in_time(self) -> 'RunConfig':
        for key in ('tokens', 'sequence_length'):
            value = getattr(self.batch, key)
            if not isinstance(value, int) and value[-1][0] >= self.steps:
                raise mistake(
                    ('batch', key),
                    f'changes at step {value[-1][0]}, but the run ends after {self.steps} steps',
                    'leave out this change, or write more steps',
                )
        return self
