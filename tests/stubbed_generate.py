"""`pretrax generate` with a stub engine. As a program: python tests/stubbed_generate.py SECONDS ARGUMENTS"""

import sys
import types
from pathlib import Path
from unittest import mock

from chat_templates import CHATML, backend
from pretrax.cli import main
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer
from serve.stub_engine import StubEngine


def chat_tokenizer():
    return Tokenizer(backend('chatml').to_str().encode(), 'chatml')


def generate(arguments, directory, *, script=None, seconds=0.0, chat=False, max_length=4096):
    """Runs the command and returns its engine, which keeps the requests as `asked`. Raises SystemExit if it fails."""
    tokenizer = chat_tokenizer() if chat else bytes_tokenizer()
    if chat:
        (directory / 'huggingface').mkdir(exist_ok=True)
        (directory / 'huggingface' / 'chat_template.jinja').write_text(CHATML)
    model = types.SimpleNamespace(max_length=max_length)
    run = types.SimpleNamespace(
        recipe=types.SimpleNamespace(model=model),
        source=types.SimpleNamespace(tokenizer=tokenizer),
        mesh=None, compute='f32',
    )  # fmt: skip
    trained = types.SimpleNamespace(
        run=run, run_dir=directory, kept=directory / 'huggingface', step=7, weights=lambda: None,
        end_tokens=(tokenizer.end_of_text,), length=256,
    )  # fmt: skip
    engine = StubEngine(seconds=seconds, vocab_size=tokenizer.vocab_size)
    engine.script = script
    engine.asked, add = [], engine.add
    engine.add = lambda request: engine.asked.append(request) or add(request)

    def open_engine(model, weights, *, max_length, slots, weights_step):
        engine.max_length, engine._slots = max_length, slots
        return engine

    stubs = {  # in place of modules that import JAX
        'pretrax.weights.trained': {'open_trained': lambda path, mesh, dtype: trained},
        'pretrax.infer.sample': {'check_can_sample': lambda model, source: None},
        'pretrax.infer.generate': {'open_engine': open_engine},
        'pretrax.infer.programs': {
            'EngineOptions': types.SimpleNamespace,
            'fitting_length': lambda model, mesh, options: options.max_length,
        },
    }
    with mock.patch.dict(sys.modules, {name: types.SimpleNamespace(**stub) for name, stub in stubs.items()}):
        try:
            main(['generate', 'run', *arguments])
        except SystemExit as end:
            if end.code:
                raise
    return engine


if __name__ == '__main__':
    tokenizer = chat_tokenizer()
    answer = [*tokenizer.encode('Hello 🎉 there.'), tokenizer.special_tokens['<|im_end|>']]
    if float(sys.argv[1]):
        answer = tokenizer.encode('tick ')
    generate(sys.argv[3:], Path(sys.argv[2]), script=answer, seconds=float(sys.argv[1]), chat=True)
