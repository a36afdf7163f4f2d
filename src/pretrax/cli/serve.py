"""Serve trained models over HTTP, with OpenAI's interface and a chat page.

Several runs or checkpoints are several models of one server. SIGTERM or Ctrl-C finishes the running requests first.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pretrax.cli._arguments import Dtype, Plugins, load_plugins
from pretrax.errors import UserError, warn
from pretrax.option import argument, option
from pretrax.weights.loaded import check_dtype

if TYPE_CHECKING:
    from pretrax.serve.service import ServedModel
    from pretrax.weights.trained import Trained

AXES = ('r', 'd', 'e', 't')  # of a mesh that serves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...] = argument(
        'runs/NAME, a checkpoint in it, or a Hugging Face directory; several are several models.', metavar='MODEL'
    )
    host: str = option('Address to listen on; others than 127.0.0.1 need --api-key-file.', default='127.0.0.1')
    port: int = option('Port to listen on; 0: any free port.', default=8000, min=0, max=65535)
    slots: int = option('Requests that run at once.', default=8, min=1)
    max_length: int | None = option(
        "Most tokens of a prompt and its answer. [default: an import's own length, or that in training]",
        metavar='N',
        min=2,
    )
    follow: bool = option('Use newer checkpoints of the run when they are written.', default=False)
    api_key_file: pathlib.Path | None = option('API keys that clients have to send, one on each line.', metavar='FILE')
    insecure: bool = option('Let anyone who reaches --host use the server.', default=False)
    allow_origin: tuple[str, ...] = option(
        'Pages of this origin may use the server; may be repeated.', default=(), metavar='ORIGIN'
    )
    queue: int = option('Requests that wait for a slot; more get 429.', default=64, min=0)
    rate: float | None = option('Requests a minute from one API key, or from one address.', metavar='N', min=0.001)
    proxy: tuple[str, ...] = option(
        'Address of a proxy that names its clients in X-Forwarded-For; may be repeated.', default=(), metavar='ADDRESS'
    )
    time_limit: float = option('Time limit of one request.', default=600, metavar='SECONDS', min=1)
    mesh: str | None = option('Sizes of mesh axes, such as d=2,t=4.', metavar='AXES')
    dtype: Dtype = None
    weights: str = option('compute, as in training; or int8.', default='compute')
    cache: str = option('Keys and values: compute, as in training; int8; or fp8.', default='compute')
    draft: str | None = option('A smaller model that proposes tokens; see --propose.', metavar='RUN_OR_CHECKPOINT')
    propose: int = option('Tokens to propose at a time; without --draft, from the text so far.', default=0, min=0)
    chat_template: pathlib.Path | None = option("A Jinja chat template, instead of the model's own.", metavar='FILE')
    pooling: str = option(
        'One vector from the hidden states of a text: mean, last, cls, min or max; requests may say otherwise.',
        default='mean',
    )
    normalize: bool = option('Whether embeddings have length 1; requests may say otherwise.', default=True)
    plugin: Plugins = ()

    @property
    def sizes(self) -> dict[str, int] | None:
        """{axis: size} of the mesh; None: as in training. Raises UserError."""
        return None if self.mesh is None else _sizes(self.mesh)


def serve(options: Options) -> None:
    from pretrax.serve.access import LOOPBACK, read_keys
    from pretrax.serve.application import make_application
    from pretrax.serve.connections import limits_for
    from pretrax.serve.limits import Limits, Refusals
    from pretrax.serve.listen import bind
    from pretrax.serve.listen import serve as listen
    from pretrax.serve.metrics import Metrics
    from pretrax.serve.service import Service

    _check(options)
    local, host = options.host in LOOPBACK, options.host
    keys = None if options.api_key_file is None else read_keys(options.api_key_file)
    load_plugins(options.plugin)
    with contextlib.ExitStack() as stack:
        # Before a model is loaded: a port in use is an error at once.
        opened = stack.enter_context(bind(host, options.port))
        models = {}
        for path in options.paths:
            loaded = _load(path, options)
            name = loaded.model.name
            if name in models:
                raise UserError(f'two models have the name {name}\n  give checkpoints of it: {path}/checkpoints/STEP')
            models[name] = loaded.model
            if options.follow:
                stack.enter_context(_following(loaded))
        limits = Limits(queue=options.queue, rate=options.rate, seconds=options.time_limit)
        service = Service(models, limits, Metrics(Refusals(warn)))
        application = make_application(service, keys=keys, local=local, origins=options.allow_origin)
        shown = f'[{host}]' if ':' in host else host
        url = f'http://{shown}:{opened.getsockname()[1]}'

        def listening() -> None:
            print(f'serving: the page is {url}/, OpenAI clients use {url}/v1', flush=True)

        requests = sum(model.admission.capacity for model in models.values())
        connections = limits_for(requests, options.proxy)
        asyncio.run(listen(application, service, opened, warn, listening=listening, limits=connections))


def _check(options: Options) -> None:
    """Raises UserError for options that cannot be, before anything is loaded."""
    from pretrax.infer.request import POOLINGS
    from pretrax.serve.access import LOOPBACK

    check_dtype(options.dtype)
    if options.host not in LOOPBACK and options.api_key_file is None and not options.insecure:
        raise UserError(
            f'--host {options.host}: anyone who reaches this machine could use the server\n'
            '  give --api-key-file FILE with the keys that clients have to send, one on each line\n'
            '  or --insecure if something else protects it'
        )
    if options.draft is not None and not options.propose:
        raise UserError('--draft proposes nothing without --propose\n  give both: --draft RUN --propose 4')
    _ = options.sizes
    choices = {'weights': ('compute', 'int8'), 'cache': ('compute', 'int8', 'fp8'), 'pooling': tuple(POOLINGS)}
    for name, known in choices.items():
        if getattr(options, name) not in known:
            raise UserError(f'--{name} is {getattr(options, name)}; expected one of {", ".join(known)}')
    for address in options.proxy:
        _check_address(address)
    if options.follow:
        _check_can_follow(options.paths)


class _Loaded(NamedTuple):
    """A model, its checkpoint, and how to give its engine other weights."""

    model: 'ServedModel'
    trained: 'Trained'
    swap: Callable[[Any, int], None]


def _load(path: str, options: Options) -> _Loaded:
    """Loads a model, and compiles the programs of its engine."""
    from pretrax.checkpoint import is_checkpoint
    from pretrax.infer.engine import Engine
    from pretrax.infer.programs import EngineOptions, Programs, fitting_length
    from pretrax.serve.engine_thread import EngineThread
    from pretrax.serve.limits import Admission
    from pretrax.serve.service import ServedModel
    from pretrax.storage import locate
    from pretrax.weights.loaded import LoadedModel
    from pretrax.weights.trained import open_trained, written_at

    loaded = LoadedModel(path, options.chat_template, options.dtype, options.sizes)
    trained, model = loaded.trained, loaded.model
    tokenizer: Any = loaded.tokenizer
    run, template = trained.run, loaded.template()
    length = options.max_length or loaded.length
    if model.max_length is not None and length > model.max_length:
        raise UserError(f'--max-length is {length}, but the model has {model.max_length} positions')
    choices: Any = options  # `_check` has seen them
    engine_options = EngineOptions(
        max_length=length,
        slots=options.slots,
        weights=choices.weights,
        cache=choices.cache,
        proposed=options.propose,
    )
    draft = None if options.draft is None else open_trained(options.draft, options.sizes, options.dtype)
    draft_weights = draft and draft.weights()
    drafting = draft and draft.run.recipe.model
    if options.max_length is None:
        engine_options = dataclasses.replace(
            engine_options, max_length=fitting_length(model, run.mesh, engine_options, drafting)
        )
    programs = Programs(model, run.mesh, engine_options, drafting)
    run_name = trained.run_dir.name
    name = f'{run_name}@{trained.step}' if is_checkpoint(locate(loaded.place)) else run_name
    print(f'{name}: step {trained.step}, {run.n_params:,} parameters', flush=True)
    print(f'{name}: attention to the cache by {programs.reader.kernel}; compiling', flush=True)
    engine = Engine(programs, trained.weights(), trained.step, draft_weights)
    status = engine.status()
    fits = (
        '' if engine_options.max_length == length else f' (the model reads {length:,}; the cache for these has no room)'
    )
    print(
        f'{name}: at most {engine_options.max_length:,} tokens{fits}, {status.slots} slots, '
        f'{"chat" if template else "base model"}, computes in {loaded.compute}',
        flush=True,
    )
    print(f'{name}: {tokenizer.shown_begin} begins a text', flush=True)
    admission = Admission(status.slots, options.queue)
    created = written_at(trained.directory, trained.step)
    served = ServedModel(
        name,
        EngineThread(engine, warn),
        tokenizer,
        admission,
        template,
        step=trained.step,
        created=created,
        pooling=choices.pooling,
        normalize=options.normalize,
        end_tokens=loaded.end,
    )

    def swap(weights: Any, step: int) -> None:
        served.swap(lambda: engine.swap(weights, step), step, written_at(trained.directory, step))

    return _Loaded(served, trained, swap)


def _check_can_follow(paths: Sequence[str]) -> None:
    from pretrax.checkpoint import is_checkpoint
    from pretrax.storage import locate

    for path in paths:
        if path.startswith('hf:') or (locate(path) / 'config.json').is_file():
            raise UserError(f'--follow: {path} is a Hugging Face checkpoint, which does not change\n  give a run')
        if is_checkpoint(place := locate(path)):
            raise UserError(f'--follow: {path} is one checkpoint\n  give its run: {place.parent.parent}')


@contextlib.contextmanager
def _following(loaded: _Loaded) -> Iterator[None]:
    """Gives an engine the newest weights of its run, in this context."""
    from pretrax.weights.trained import follow

    def use(weights: Any, step: int) -> None:
        loaded.swap(weights, step)
        print(f'{loaded.model.name}: step {step}', flush=True)

    stop = threading.Event()
    thread = threading.Thread(target=follow, args=(loaded.trained, use, warn, stop), name='follow', daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sizes(text: str) -> dict[str, int]:
    """{axis: size} from d=2,t=4."""
    sizes = {}
    for part in text.split(','):
        match = re.fullmatch(r'([a-z])=([1-9]\d*)', part.strip())
        if match is None or match[1] not in AXES or match[1] in sizes:
            raise UserError(
                f'--mesh {text}: {part!r} is not an axis with its size\n  expected some of {", ".join(AXES)}: d=2,t=4'
            )
        sizes[match[1]] = int(match[2])
    return sizes


def _check_address(address: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UserError(
            f'--proxy {address}: not an IP address\n  give the address from which the proxy connects: 127.0.0.1'
        ) from None
