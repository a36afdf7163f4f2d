"""Generate text with a trained model.

The prompts come from --prompt, from the lines of a file, or from you (--chat). A terminal shows control characters as
U+FFFD; a file or a pipe receives the text as it is. The speed is printed to stderr.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pretrax.cli._arguments import Dtype, Plugins, RunOrCheckpoint, check_dtype
from pretrax.cli._loaded_model import LoadedModel, Speed, show
from pretrax.errors import UserError


def generate(
    path: RunOrCheckpoint,
    prompt: Annotated[list[str] | None, typer.Option(help='Text to continue; may be repeated.')] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar='FILE.jsonl', help='Lines with "prompt" or "messages"; needs --out.')
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar='FILE.jsonl', help='Where the answers to --prompts go, in the same order.')
    ] = None,
    chat: Annotated[bool, typer.Option('--chat', help='Talk to the model; /quit ends, /reset starts again.')] = False,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help='Most tokens to generate. [default: 128; with --chat as many as fit]'),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help='Temperature of sampling; 0: always the most likely token.')
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help='Sample from the k most likely tokens.')] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help='Sample from the most likely tokens of this total probability.'),
    ] = None,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help='Only tokens at least this fraction as likely as the likeliest.')
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.01, help='Above 1: tokens in the prompt and the text become less likely.')
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help='Subtracted from the logits of tokens in the text.')] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help='Subtracted from the logits of a token as often as the text has it.')
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help='Seed of the sampling.')] = 0,
    n: Annotated[int, typer.Option('--n', min=1, help='Texts for each prompt.')] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help='Text that ends the answer and is not shown; may be repeated.')
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help='Texts to generate at once. [default: at most 8]')] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar='N',
            help="Most tokens of a conversation. [default: an import's own length, or that in training]",
        ),
    ] = None,
    dtype: Dtype = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar='FILE', help="A Jinja chat template, instead of the model's own.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    _check_flags(prompt, prompts, out, chat, n)
    check_dtype(dtype)
    if top_p is not None and top_p <= 0:
        raise UserError(f'--top-p is {top_p}; expected more than 0 and at most 1')
    for flag, value in {
        '--temperature': temperature,
        '--repetition-penalty': repetition_penalty,
        '--presence-penalty': presence_penalty,
        '--frequency-penalty': frequency_penalty,
    }.items():
        if not math.isfinite(value):
            raise UserError(f'{flag} is {value}; expected a finite number')
    if '' in (stop or []):
        raise UserError('--stop is empty; expected text that ends an answer')
    from pretrax.infer.request import Sampling

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    stops = tuple(stop or ())
    if chat:
        from pretrax.cli._chat import chat_with

        chat_with(LoadedModel(path, plugin, chat_template, dtype), sampling, stops, tokens, max_length)
    elif prompts is not None:
        from pretrax.cli._prompt_file import Wanted, answer_file

        assert out is not None
        wanted = Wanted(sampling, tokens or 128, n, stops)
        answer_file(lambda: LoadedModel(path, plugin, chat_template, dtype), prompts, out, wanted, slots)
    else:
        _print_texts(LoadedModel(path, plugin, dtype=dtype), prompt or [''], tokens or 128, sampling, n, stops, slots)


def _check_flags(prompt: list[str] | None, prompts: str | None, out: str | None, chat: bool, n: int) -> None:
    given = [
        name for name, value in {'--prompt': prompt, '--prompts': prompts, '--chat': chat or None}.items() if value
    ]
    if len(given) > 1:
        raise UserError(f'{given[0]} and {given[1]} exclude each other')
    if chat and n > 1:
        raise UserError('--n is for --prompt and --prompts: a conversation has one answer at a time')
    if (prompts is None) != (out is None):
        raise UserError('--prompts FILE.jsonl and --out FILE.jsonl need each other')


def _print_texts(
    model: LoadedModel,
    prompts: Sequence[str],
    tokens: int,
    sampling: Any,
    n: int,
    stops: tuple[str, ...],
    slots: int | None,
) -> None:
    """Prints each prompt with each of its continuations, in order, while they are written."""
    from pretrax.infer.answers import Asked, encode_prompt, write
    from pretrax.infer.request import Request

    asked, texts = [], []
    for prompt in prompts:
        ids = tuple(encode_prompt(model.tokenizer, prompt))
        model.check_length(ids, tokens)
        for _ in range(n):
            request = Request(prompt=ids, max_tokens=tokens, sampling=sampling, choice=len(asked), stop_ids=model.end)
            asked.append(Asked(request, stops))
            texts.append([prompt])
    engine = model.engine_for(asked, slots)
    speed, shown, finished = Speed(model), 0, set()
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
