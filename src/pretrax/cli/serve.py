"""Serve trained models over HTTP, with OpenAI's interface and a chat page.

Several runs or checkpoints are several models of one server. SIGTERM or Ctrl-C finishes the running requests first.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import ipaddress
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pretrax.cli._arguments import Dtype, Plugins, check_dtype, load_plugins
from pretrax.errors import UserError, install_extra, printable

if TYPE_CHECKING:
    from pretrax.serve.service import ServedModel
    from pretrax.weights.trained import Trained

AXES = ('r', 'd', 'e', 't')  # of a mesh that serves


def serve(
    paths: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="RUN_OR_CHECKPOINT", help='runs/NAME, or a checkpoint in it; several are several models.'),
    ],
    host: Annotated[str, typer.Option(help='Address to listen on; others than 127.0.0.1 need --api-key-file.')] = '127.0.0.1',
    port: Annotated[int, typer.Option(min=0, max=65535, help='Port to listen on; 0: any free port.')] = 8000,
    slots: Annotated[int, typer.Option(min=1, help='Requests that run at once.')] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(metavar='N', min=2, help="Most tokens of a prompt and its answer. [default: an import's own length, or that in training]"),
    ] = None,
    follow: Annotated[bool, typer.Option('--follow', help='Use newer checkpoints of the run when they are written.')] = False,
    api_key_file: Annotated[
        pathlib.Path | None, typer.Option(metavar='FILE', help='API keys that clients have to send, one on each line.')
    ] = None,
    insecure: Annotated[bool, typer.Option('--insecure', help='Let anyone who reaches --host use the server.')] = False,
    allow_origin: Annotated[
        tuple[str, ...], typer.Option(metavar='ORIGIN', help='Pages of this origin may use the server; may be repeated.')
    ] = (),
    queue: Annotated[int, typer.Option(min=0, help='Requests that wait for a slot; more get 429.')] = 64,
    rate: Annotated[
        float | None, typer.Option(metavar='N', min=0.001, help='Requests a minute from one API key, or from one address.')
    ] = None,
    proxy: Annotated[
        tuple[str, ...],
        typer.Option(metavar='ADDRESS', help='Address of a proxy that names its clients in X-Forwarded-For; may be repeated.'),
    ] = (),
    time_limit: Annotated[float, typer.Option(metavar='SECONDS', min=1, help='Time limit of one request.')] = 600,
    mesh: Annotated[str | None, typer.Option(metavar='AXES', help='Sizes of mesh axes, such as d=2,t=4.')] = None,
    dtype: Dtype = None,
    weights: Annotated[str, typer.Option(help='compute, as in training; or int8.')] = 'compute',
    cache: Annotated[str, typer.Option(help='Keys and values: compute, as in training; int8; or fp8.')] = 'compute',
    draft: Annotated[
        str | None, typer.Option(metavar='RUN_OR_CHECKPOINT', help='A smaller model that proposes tokens; see --propose.')
    ] = None,
    propose: Annotated[
        int, typer.Option(min=0, help='Tokens to propose at a time; without --draft, from the text so far.')
    ] = 0,
    chat_template: Annotated[
        pathlib.Path | None, typer.Option(metavar='FILE', help="A Jinja chat template, instead of the model's own.")
    ] = None,
    pooling: Annotated[
        str, typer.Option(help='One vector from the hidden states of a text: mean, last, cls, min or max; requests may say otherwise.')
    ] = 'mean',
    normalize: Annotated[bool, typer.Option(help='Whether embeddings have length 1; requests may say otherwise.')] = True,
    plugin: Plugins = (),
) -> None:  # fmt: skip
    for package in ('starlette', 'uvicorn', 'prometheus_client', 'jinja2'):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'`pretrax serve` needs the package {package}\n  {install_extra("serve")}')
    from pretrax.infer.request import POOLINGS
    from pretrax.serve.access import LOOPBACK, read_keys
    from pretrax.serve.application import make_application
    from pretrax.serve.connections import limits_for
    from pretrax.serve.limits import Limits, Refusals
    from pretrax.serve.listen import bind
    from pretrax.serve.listen import serve as listen
    from pretrax.serve.metrics import Metrics
    from pretrax.serve.service import Service

    check_dtype(dtype)
    is_local = host in LOOPBACK
    if not is_local and api_key_file is None and not insecure:
        raise UserError(
            f'--host {host}: anyone who reaches this machine could use the server\n'
            '  give --api-key-file FILE with the keys that clients have to send, one on each line\n'
            '  or --insecure if something else protects it'
        )
    keys = None if api_key_file is None else read_keys(api_key_file)
    if draft is not None and not propose:
        raise UserError('--draft proposes nothing without --propose\n  give both: --draft RUN --propose 4')
    how = _How(
        max_length=max_length,
        slots=slots,
        queue=queue,
        mesh=None if mesh is None else _sizes(mesh),
        dtype=dtype,
        weights=_one_of('--weights', weights, ('compute', 'int8')),
        cache=_one_of('--cache', cache, ('compute', 'int8', 'fp8')),
        proposed=propose,
        draft=draft,
        template=chat_template,
        pooling=_one_of('--pooling', pooling, tuple(POOLINGS)),
        normalize=normalize,
    )
    for address in proxy:
        _check_address(address)
    load_plugins(plugin)
    if follow:
        _check_can_follow(paths)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(bind(host, port))  # before a model is loaded: a port in use is an error at once
        models = {}
        for path in paths:
            loaded = _load(path, how)
            name = loaded.model.name
            if name in models:
                raise UserError(f'two models have the name {name}\n  give checkpoints of it: {path}/checkpoints/STEP')
            models[name] = loaded.model
            if follow:
                stack.enter_context(_following(loaded))
        service = Service(models, Limits(queue=queue, rate=rate, seconds=time_limit), Metrics(Refusals(_report)))
        application = make_application(service, keys=keys, local=is_local, origins=allow_origin)
        shown = f'[{host}]' if ':' in host else host
        url = f'http://{shown}:{opened.getsockname()[1]}'

        def listening() -> None:
            print(f'serving: the page is {url}/, OpenAI clients use {url}/v1', flush=True)

        requests = sum(model.admission.capacity for model in models.values())
        limits = limits_for(requests, proxy)
        asyncio.run(listen(application, service, opened, _report, listening=listening, limits=limits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """How models are served."""

    max_length: int | None
    slots: int
    queue: int
    mesh: dict[str, int] | None
    dtype: str | None
    weights: Any
    cache: Any
    proposed: int
    draft: str | None
    template: pathlib.Path | None
    pooling: Any
    normalize: bool


class _Loaded(NamedTuple):
    """A model, its checkpoint, and how to give its engine other weights."""

    model: 'ServedModel'
    trained: 'Trained'
    swap: Callable[[Any, int], None]


def _load(path: str, how: _How) -> _Loaded:
    """Loads a model, and compiles the programs of its engine."""
    from pretrax.checkpoint import is_checkpoint
    from pretrax.infer.engine import Engine
    from pretrax.infer.programs import EngineOptions, fitting_length, programs_of
    from pretrax.serve.engine_thread import EngineThread
    from pretrax.serve.limits import Admission
    from pretrax.serve.service import ServedModel
    from pretrax.storage import locate
    from pretrax.weights.follow import written_at
    from pretrax.weights.loaded import LoadedModel
    from pretrax.weights.trained import open_trained

    loaded = LoadedModel(path, how.template, how.dtype, how.mesh)
    trained, model, tokenizer = loaded.trained, loaded.model, loaded.tokenizer
    run, template = trained.run, loaded.template()
    length = how.max_length or loaded.length
    if model.max_length is not None and length > model.max_length:
        raise UserError(f'--max-length is {length}, but the model has {model.max_length} positions')
    options = EngineOptions(
        max_length=length, slots=how.slots, weights=how.weights, cache=how.cache, proposed=how.proposed
    )
    draft = None if how.draft is None else open_trained(how.draft, how.mesh, how.dtype)
    draft_weights = draft and draft.weights()
    drafting = draft and draft.run.recipe.model
    if how.max_length is None:
        options = dataclasses.replace(options, max_length=fitting_length(model, run.mesh, options, drafting))
    programs = programs_of(model, run.mesh, options, drafting)
    run_name = trained.run_dir.name
    name = f'{run_name}@{trained.step}' if is_checkpoint(locate(path)) else run_name
    print(f'{name}: step {trained.step}, {run.n_params:,} parameters', flush=True)
    print(f'{name}: attention to the cache by {programs.reader.kernel}; compiling', flush=True)
    engine = Engine(programs, trained.weights(), trained.step, draft_weights)
    status = engine.status()
    fits = '' if options.max_length == length else f' (the model reads {length:,}; the cache for these has no room)'
    print(
        f'{name}: at most {options.max_length:,} tokens{fits}, {status.slots} slots, '
        f'{"chat" if template else "base model"}, computes in {loaded.compute}',
        flush=True,
    )
    print(f'{name}: {tokenizer.shown_begin} begins a text', flush=True)
    admission = Admission(status.slots, how.queue)
    created = written_at(trained.directory, trained.step)
    served = ServedModel(
        name,
        EngineThread(engine, _report),
        tokenizer,
        admission,
        template,
        step=trained.step,
        created=created,
        pooling=how.pooling,
        normalize=how.normalize,
        end_tokens=loaded.end,
    )

    def swap(weights: Any, step: int) -> None:
        served.swap(lambda: engine.swap(weights, step), step, written_at(trained.directory, step))

    return _Loaded(served, trained, swap)


def _check_can_follow(paths: Sequence[str]) -> None:
    from pretrax.checkpoint import is_checkpoint
    from pretrax.storage import locate

    for path in paths:
        if is_checkpoint(place := locate(path)):
            raise UserError(f'--follow: {path} is one checkpoint\n  give its run: {place.parent.parent}')


@contextlib.contextmanager
def _following(loaded: _Loaded) -> Iterator[None]:
    """Gives an engine the newest weights of its run, in this context."""
    from pretrax.weights.follow import follow

    def use(weights: Any, step: int) -> None:
        loaded.swap(weights, step)
        print(f'{loaded.model.name}: step {step}', flush=True)

    stop = threading.Event()
    thread = threading.Thread(target=follow, args=(loaded.trained, use, _report, stop), name='follow', daemon=True)
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


def _one_of(flag: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise UserError(f'{flag} is {value}; expected one of {", ".join(choices)}')
    return value


def _report(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
