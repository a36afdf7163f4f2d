"""Generate text with a trained model.

The prompts come from --prompt, from the lines of a file, or from you (--chat). A terminal shows control characters as
U+FFFD; a file or a pipe receives the text as it is. The speed is printed to stderr.
"""

import dataclasses

from pretrax.cli._arguments import Dtype, Plugins, load_plugins
from pretrax.errors import UserError
from pretrax.infer.sampling_settings import SETTINGS, WRITING, Sampling
from pretrax.option import argument, option
from pretrax.storage import locate
from pretrax.weights.loaded import LoadedModel, check_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    path: str = argument('runs/NAME, a checkpoint in it, or a Hugging Face directory.', metavar='MODEL')
    prompt: tuple[str, ...] = option('Text to continue; may be repeated.', '-p', default=())
    prompts: str | None = option('Lines with "prompt" or "messages"; needs --out.', metavar='FILE.jsonl')
    out: str | None = option('File for the answers to --prompts, in the same order.', metavar='FILE.jsonl')
    chat: bool = option('Talk to the model; /quit ends, /reset starts again.', default=False)
    tokens: int | None = option(
        'Most tokens to generate. [default: 128, or as many as fit; with --chat as many as fit]', min=1
    )
    sampling: Sampling = dataclasses.field(default=WRITING)
    n: int = option('Texts for each prompt.', default=1, min=1)
    stop: tuple[str, ...] = option('Text that ends the answer and is not shown; may be repeated.', default=())
    slots: int | None = option('Texts to generate at once. [default: at most 8]', min=1)
    max_length: int | None = option(
        "Most tokens of a conversation. [default: an import's own length, or that in training]", min=2, metavar='N'
    )
    dtype: Dtype = None
    chat_template: str | None = option("A Jinja chat template, instead of the model's own.", metavar='FILE')
    plugin: Plugins = ()


def generate(options: Options) -> None:
    _check(options)
    sampling, stops = options.sampling, options.stop

    def load() -> LoadedModel:
        load_plugins(options.plugin)
        template = None if options.chat_template is None else locate(options.chat_template)
        return LoadedModel(options.path, template, options.dtype)

    if options.chat:
        from pretrax.weights.conversation import chat_with

        chat_with(load(), sampling, stops, options.tokens, options.max_length)
    elif options.prompts is not None:
        from pretrax.weights.prompt_file import Wanted, answer_file

        assert options.out is not None
        wanted = Wanted(sampling, options.tokens, options.n, stops)
        answer_file(load, options.prompts, options.out, wanted, options.slots)
    else:
        _print_texts(load(), options)


def _check(options: Options) -> None:
    kinds = {'--prompt': options.prompt, '--prompts': options.prompts, '--chat': options.chat}
    given = [name for name, value in kinds.items() if value]
    if len(given) > 1:
        raise UserError(f'{given[0]} and {given[1]} exclude each other')
    if options.chat and options.n > 1:
        raise UserError('--n is for --prompt and --prompts: a conversation has one answer at a time')
    if (options.prompts is None) != (options.out is None):
        raise UserError('--prompts FILE.jsonl and --out FILE.jsonl need each other')
    check_dtype(options.dtype)
    for name, setting in SETTINGS.items():
        value = getattr(options.sampling, name)
        if value is not None and not setting.accepts(value):
            raise UserError(f'--{name.replace("_", "-")} is {value}; expected {setting.expected}')
    if '' in options.stop:
        raise UserError('--stop is empty; expected text that ends an answer')


def _print_texts(model: LoadedModel, options: Options) -> None:
    """Prints each prompt with each of its continuations, in order, while they are written."""
    from pretrax.infer.answers import Speed, show, write

    prompts = options.prompt or ('',)
    asked = model.asked(prompts, options.tokens, options.sampling, options.stop, options.n)
    texts = [[prompt] for prompt in prompts for _ in range(options.n)]
    engine = model.engine_for(asked, options.slots)
    speed, shown, finished = Speed(model.compute, engine), 0, set()
    speed.prompt_tokens = sum(len(one.request.prompt) for one in asked)
    show(texts[0].pop())
    for news in write(engine, model.tokenizer, asked):
        speed.tokens += news.tokens
        texts[news.answer].append(news.text)
        if news.finish:
            finished.add(news.answer)
        while shown < len(asked):  # what is written of the first one that is not finished
            show(''.join(texts[shown]))
            texts[shown].clear()
            if shown not in finished:
                break
            show('\n')
            shown += 1
    speed.report()
