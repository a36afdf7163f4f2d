"""Loads the tokenizer that a user names: a tokenizer.json, a Hugging Face directory, `tiktoken:NAME`, or `bytes`.

Each is converted to a `tokenizer.json`, the only file that readers of the tokens need.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrax.data.corpus.files import nearest
from pretrax.data.tokenizers.decoding import byte_letters
from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, PROBES, Tokenizer
from pretrax.errors import UserError, first_line
from pretrax.storage import AnyPath, locate_local
from pretrax.system.json_file import read_settings
from pretrax.system.software import need_extra

if TYPE_CHECKING:
    import tiktoken

BYTES = 'bytes'
TIKTOKEN = 'tiktoken:'
TOKENIZER_JSON = 'tokenizer.json'
CONFIG = 'config.json'
_NAMED = ('tokenizer_config.json', 'special_tokens_map.json')  # have the name of a token
_NUMBERED = ('generation_config.json', CONFIG)  # have an id, or a list of them


def load_tokenizer(spec: str | Path, begin_of_text: bool | str | None = None) -> Tokenizer:
    """Loads a tokenizer, with `begin_of_text` as in `Tokenizer.begin_with`.

    Raises UserError if it cannot be read, has no end-of-text token, or `begin_of_text` names no token.
    """
    tokenizer = _load(spec)
    tokenizer.begin_with(begin_of_text)
    return tokenizer


def _load(spec: str | Path) -> Tokenizer:
    if spec == BYTES:
        return bytes_tokenizer()
    if str(spec).startswith(TIKTOKEN):
        return _named_tiktoken(str(spec).removeprefix(TIKTOKEN))
    path = locate_local(str(spec))
    if path.is_dir():
        return _read_directory(path)
    if not path.is_file():
        raise UserError(
            f'{path}: no such tokenizer.json file\n  {nearest(path)}\n'
            f'  expected a tokenizer.json, a directory with one, {TIKTOKEN}NAME or {BYTES}'
        )
    return _read_directory(path.parent) if path.name == TOKENIZER_JSON else Tokenizer(path.read_bytes(), str(path))


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer of 257 tokens: the id of a byte is its value, and 256 is the end-of-text token."""
    letters = byte_letters()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    return Tokenizer(_byte_level_json(vocabulary, [], {END_OF_TEXT: 256}, None), BYTES)


def character_tokenizer(characters: Sequence[str], name: str) -> Tokenizer:
    """A tokenizer of single characters, the id of each its place; without a token that ends a document."""
    settings = {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'added_tokens': [],
        'normalizer': None,
        'pre_tokenizer': {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated', 'invert': False},
        'post_processor': None,
        'decoder': {'type': 'Fuse'},
        'model': {
            'type': 'WordLevel',
            'vocab': {character: token for token, character in enumerate(characters)},
            'unk_token': '',
        },
    }
    return Tokenizer(json.dumps(settings, ensure_ascii=False).encode(), name, needs_end=False)


def named_begin(directory: AnyPath, token_id: Callable[[str], int | None]) -> int | None:
    """The id of the `bos_token` in the files of transformers; None: they name none, or it is not a token."""
    names = (_name_in(directory / file, 'bos_token') for file in _NAMED)
    name = next((name for name in names if name is not None), None)
    return None if name is None else token_id(name)


def contradiction(directory: AnyPath, tokenizer: Tokenizer) -> str:
    """What `add_bos_token` says if it contradicts tokenizer.json, for messages; '' if it does not."""
    said = read_settings(directory / 'tokenizer_config.json').get('add_bos_token')
    if not isinstance(said, bool) or said == bool(tokenizer.adds.before):
        return ''
    return f', although tokenizer_config.json has add_bos_token={str(said).lower()}, which transformers 5 ignores too'


def is_bytes(tokenizer: Tokenizer) -> bool:
    return tokenizer.vocab_size == 257 and tokenizer.sha256 == bytes_tokenizer().sha256


def from_tiktoken(encoding: 'tiktoken.Encoding') -> Tokenizer:
    """Converts a tiktoken encoding. Raises UserError if the result gives different ids.

    tiktoken merges the two neighbors that form the token of the lowest rank. So every pair of tokens that form another
    token becomes a merge, in the order of ranks.
    """
    letters = byte_letters()
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    shown = {token: ''.join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ways = [(ranks[left], ranks[right], left, right) for left, right in ways if left in ranks and right in ranks]
        merges += [[shown[left], shown[right]] for _, _, left, right in sorted(ways)]
    vocabulary = {shown[token]: rank for token, rank in ranks.items()}
    content = _byte_level_json(vocabulary, merges, encoding._special_tokens, _portable(encoding._pat_str))
    tokenizer = Tokenizer(content, f'{TIKTOKEN}{encoding.name}')
    for text in PROBES:
        if tokenizer.encode(text) != encoding.encode_ordinary(text):
            raise UserError(
                f'{TIKTOKEN}{encoding.name}: its rules cannot be converted to a tokenizer.json: {text[:40]!r} gives\n'
                f'  other ids than in tiktoken\n  use a tokenizer.json of this tokenizer instead'
            )
    return tokenizer


def _byte_level_json(
    vocabulary: dict[str, int], merges: list[list[str]], special: dict[str, int], pattern: str | None
) -> bytes:
    """A byte-level BPE tokenizer.json that splits text by the pattern (None: no split) before merging bytes."""
    letters = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    cut = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
    flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    settings: dict[str, Any] = {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'added_tokens': [
            {'id': token, 'content': name, **flags} for name, token in sorted(special.items(), key=lambda item: item[1])
        ],
        'normalizer': None,
        'pre_tokenizer': letters if pattern is None else {'type': 'Sequence', 'pretokenizers': [cut, letters]},
        'post_processor': None,
        'decoder': letters | {'use_regex': True},
        'model': {
            'type': 'BPE',
            'dropout': None,
            'unk_token': None,
            'continuing_subword_prefix': None,
            'end_of_word_suffix': None,
            'fuse_unk': False,
            'byte_fallback': False,
            'ignore_merges': True,
            'vocab': vocabulary,
            'merges': merges,
        },
    }
    return json.dumps(settings, ensure_ascii=False).encode()


def _portable(pattern: str) -> str:
    """tiktoken's pattern for Oniguruma, in which `{1,3}+` is not possessive but repeats the group."""
    return re.sub(r'(\\p\{\w+\}|\\.|\[(?:[^\]\\]|\\.)*\]|[^\s()\[\]])(\{\d+(?:,\d*)?\})\+', r'(?>\1\2)', pattern)


def _named_tiktoken(name: str) -> Tokenizer:
    need_extra('tiktoken', f'{TIKTOKEN}{name}', 'tiktoken')
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except ValueError as error:
        raise UserError(
            f'{TIKTOKEN}{name}: {first_line(error)}\n  expected one of {", ".join(tiktoken.list_encoding_names())}'
        ) from None
    except OSError as error:  # includes the exceptions of requests
        raise UserError(
            f'{TIKTOKEN}{name}: tiktoken cannot download it: {type(error).__name__}\n'
            '  without a network, set TIKTOKEN_CACHE_DIR to a directory with the downloaded file'
        ) from None
    return from_tiktoken(encoding)


def _read_directory(path: Path) -> Tokenizer:
    file = path / TOKENIZER_JSON
    if not file.is_file():
        raise UserError(
            f'{path}: no tokenizer.json in this directory\n  {nearest(file)}\n'
            f'  transformers can write one: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained(DIRECTORY)'
        )
    content = file.read_bytes()

    @functools.cache
    def reader() -> Tokenizer:
        return Tokenizer(content, str(file), end_of_text=0)

    def token_id(name: str) -> int | None:
        return reader().token_id(name)

    begin = named_begin(path, token_id)
    end, end_from = next(_ends(path, token_id), (None, file))
    return Tokenizer(content, str(file), end_of_text=end, end_from=end_from.name, before_text=begin)


def end_tokens(directory: AnyPath, token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """The ids of the tokens that end a text, according to the files of transformers.

    Args:
        directory: directory of the files. Each of them may be missing; config.json counts if it is that of a model.
        token_id: the id of a token by its name; None: there is no such token.

    Raises:
        UserError: a file is not JSON, or names something that is not a token.
    """
    return tuple(dict.fromkeys(token for token, _ in _ends(directory, token_id)))


def _ends(directory: AnyPath, token_id: Callable[[str], int | None]) -> Iterator[tuple[int, AnyPath]]:
    """The id of each token that ends a text, and the file that names it. The first one also ends documents."""
    for file in (directory / name for name in _NAMED):
        name = _name_in(file, 'eos_token')
        token = None if name is None else token_id(name)
        if name is not None and token is None:
            raise UserError(
                f'{file}: eos_token {name[:60]!r} is not a token of {TOKENIZER_JSON}\n'
                '  use the name of an existing token'
            )
        if token is not None:
            yield token, file
    for file in (directory / name for name in _NUMBERED):
        found = _model_settings(file).get('eos_token_id')
        for token in found if isinstance(found, list) else [] if found is None else [found]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(f'{file}: eos_token_id is {json.dumps(found)[:60]}\n  expected an id, or a list of ids')
            yield token, file


def _name_in(file: AnyPath, kind: str) -> str | None:
    """The name of a token such as `eos_token` in a file of transformers."""
    found = read_settings(file).get(kind)
    found = found.get('content') if isinstance(found, dict) else found
    if found is not None and not isinstance(found, str):
        raise UserError(f'{file}: {kind} is {json.dumps(found)[:60]}\n  expected the name of a token')
    return found


def _model_settings(file: AnyPath) -> dict[str, Any]:
    """The settings of a model beside its tokenizer; {} for a config.json that is not a model's.

    The ids of a model with a vision tower may be those of its language model.
    """
    try:
        settings = read_settings(file)
    except UserError:
        if file.name == CONFIG:
            return {}
        raise
    if file.name == CONFIG and 'model_type' not in settings:
        return {}
    inner = settings.get('text_config')
    return {**inner, **settings} if isinstance(inner, dict) else settings
