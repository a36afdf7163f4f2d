"""Chat templates: the messages of a conversation as tokens. Only the template can write special tokens.

A template is Jinja, as `transformers` renders it. While it is rendered, each letter of a message that could begin the
name of a special token has a stand-in, a letter that nobody else uses. So the special tokens in the rendered text are
those of the template; then the letters return, and what a user wrote is encoded as ordinary text. The stand-ins have
the length of the letters, so filters such as `trim` do what they always do, and text that the template itself looks for
in a message, such as `</think>`, stays as it is. What remains: a template that writes the first letters of a special
token and lets a message write the rest (roles are therefore checked), and one that compares a message with a single
letter such as `<`.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from pretrax.data.chat.rendering import Renderer, environment
from pretrax.errors import UserError, system_errors
from pretrax.system.json_file import read_settings

if TYPE_CHECKING:
    from pretrax.data.tokenizers.tokenizer import Tokenizer

ROLES = ('system', 'developer', 'user', 'assistant', 'tool', 'function')
SETTINGS, JINJA = 'tokenizer_config.json', 'chat_template.jinja'  # files of `transformers`
_MOST_CHARACTERS = 1_000_000  # of a template
_SIGNS, _N_SIGNS = 0xF0000, 0xFFFE  # a private use area of Unicode
_RESERVED = {'messages', 'tools', 'add_generation_prompt', 'loop'}  # not for a request


class Conversation(NamedTuple):
    """A rendered conversation."""

    text: str  # the template's text, with special tokens by name
    special_tokens: tuple[tuple[int, int, int], ...]  # (start, stop, id) of each special token in the text, in order
    # [start, stop) of each answer in the text, with the token that ends it, in order
    answers: tuple[tuple[int, int], ...]


class Template:
    """Renders messages with a Jinja template.

    Args:
        special_tokens: the ids of the special tokens by name.
        variables: variables of the template, such as {'bos_token': '<s>'}.

    Attributes:
        end_of_turn: the special token that the template writes after an answer, as a tuple; empty if there is none.

    Raises:
        UserError: it is not a template, or cannot render a conversation.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, int],
        variables: Mapping[str, str] | None = None,
        name: str = 'the chat template',
    ):
        self.source, self.variables, self.name = source, dict(variables or {}), name
        self._special_tokens = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._names = re.compile('|'.join(map(re.escape, names)) or r'(?!)')
        strings, self._free = _read_source(source, name)
        self._stand_ins = _StandIns(names, strings, source)
        self._renderer = Renderer(source, name)
        self.end_of_turn = self._find_end_of_turn()

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """Renders a finished conversation and finds the answers in it.

        An answer is what a model has to write: from the end of the prompt for it, which the template writes for the
        messages before it with `add_generation_prompt`, to the token that ends the turn.

        Args:
            messages: each with `role` and `content`. What else they have may be left out by the template.

        Raises:
            UserError: as `prompt`, or the text of the prompt for an answer is not a part of the conversation's text.
        """
        variables = {'add_generation_prompt': False}
        messages = self._written(messages, variables, {'content'})
        marked, original = self._marked(messages, variables)
        text = self._renderer.render(marked)
        end_of_turn = next((name for name, number in self._special_tokens.items() if (number,) == self.end_of_turn), '')
        answers = []
        for n, message in enumerate(messages):
            if message['role'] != 'assistant':
                continue
            before = marked | {'messages': marked['messages'][:n], 'add_generation_prompt': True}
            prompt = self._renderer.render(before)
            if not text.startswith(prompt):
                raise UserError(f'{self.name}: the prompt for message {n + 1} is not a part of the conversation')
            after = self._renderer.render(marked | {'messages': marked['messages'][: n + 1]})
            stop = len(after) if text.startswith(after) and len(after) >= len(prompt) else None
            if end_of_turn and (at := text.find(end_of_turn, len(prompt), stop)) >= 0:
                stop = at + len(end_of_turn)
            if stop is None:
                raise UserError(f'{self.name}: the end of message {n + 1} is not found')
            answers.append((len(prompt), stop))
        # The text with its letters back may be shorter, so every place is counted again.
        special = [(*match.span(), self._special_tokens[match[0]]) for match in self._names.finditer(text)]
        cuts = sorted({0, len(text), *(at for start, stop, _ in special for at in (start, stop)), *sum(answers, ())})
        names = {start for start, _, _ in special}
        pieces = [
            text[start:stop] if start in names else original(text[start:stop])
            for start, stop in itertools.pairwise(cuts)
        ]
        places = dict(zip(cuts, itertools.accumulate(map(len, pieces), initial=0), strict=True))
        return Conversation(
            ''.join(pieces),
            tuple((places[start], places[stop], number) for start, stop, number in special),
            tuple((places[start], places[stop]) for start, stop in answers),
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int | str]:
        """`parts` of a conversation, none of whose messages is left out.

        Raises:
            UserError: as `parts`, or the template leaves a message out.
        """
        return self.parts(self._written(messages, variables), variables)

    def check_variables(self, variables: Iterable[str]) -> None:
        """Raises UserError for a variable that the template does not read, or that a request may not choose."""
        free = self._free - self.variables.keys() - _RESERVED
        for variable in sorted(set(variables) - free):
            known = ', '.join(sorted(free)) or 'none'
            raise UserError(f'the chat template reads no variable {variable!r} from a request; it reads: {known}')

    def _written(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], keys: Set[str] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """The messages, once it is known that the template writes each of them.

        Many templates do not know the role `developer`: such a message is then `system`.

        Raises UserError if the template leaves out one of these keys of a message (None: any of its texts).
        """
        try:
            self._check_written(messages, variables, keys)
        except UserError:
            as_system = [m | {'role': 'system'} if m.get('role') == 'developer' else m for m in map(dict, messages)]
            if as_system == list(messages):
                raise
            return self._written(as_system, variables, keys)
        return messages

    def _check_written(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], keys: Set[str] | None
    ) -> None:
        """Raises UserError if the end of a text, signed with a character of its own, is not in the conversation."""
        signed, signs = [dict(message) for message in messages], dict[str, tuple[int, str]]()
        for n, message in enumerate(signed):
            for key in sorted(message.keys() - {'role'} if keys is None else message.keys() & keys):
                if isinstance(message[key], str) and message[key].strip():
                    sign = chr(_SIGNS + len(signs) % _N_SIGNS)
                    message[key], signs[sign] = message[key] + sign, (n, key)
        text = self._renderer.render(self._marked(signed, variables)[0])
        for sign, (n, key) in signs.items():
            if sign not in text:
                where = f'{key} of message {n + 1}, whose role is {messages[n]["role"]}'
                raise UserError(f'{self.name} does not write the {where}')

    def parts(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int | str]:
        """Ordinary text, and the special tokens in it.

        Raises:
            UserError: an unknown role, or the template refuses the messages or exceeds a limit.
        """
        marked, original = self._marked(messages, variables)
        text = self._renderer.render(marked)
        parts: list[int | str] = []
        end = 0
        for match in self._names.finditer(text):
            parts += [original(text[end : match.start()]), self._special_tokens[match[0]]]
            end = match.end()
        return [part for part in [*parts, original(text[end:])] if part != '']

    def _marked(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> tuple[Any, Any]:
        """All variables of the template with stand-ins, and a function that gives a text its letters back."""
        for message in messages:
            if message.get('role') not in ROLES:
                raise UserError(f'role is {message.get("role")!r}; expected one of {", ".join(ROLES)}')
        given = {'tools': None, 'documents': None, 'add_generation_prompt': True, 'messages': messages, **variables}
        marked, original = self._stand_ins.mark(given)
        return self.variables | marked, original

    def _find_end_of_turn(self) -> tuple[int, ...]:
        answer = 'An answer.'
        messages = [{'role': 'user', 'content': 'A question.'}, {'role': 'assistant', 'content': answer}]
        parts = self.parts(messages, {'add_generation_prompt': False})
        after = [n for n, part in enumerate(parts) if isinstance(part, str) and answer in part]
        return tuple(part for n in after[-1:] for part in parts[n + 1 : n + 2] if isinstance(part, int))


class ChatTemplate(Template):
    """Encodes messages with a Jinja template.

    Args:
        special_tokens: variables of the template, such as {'bos_token': '<s>'}.
    """

    def __init__(
        self,
        source: str,
        tokenizer: 'Tokenizer',
        special_tokens: Mapping[str, str] | None = None,
        name: str = 'the chat template',
    ):
        self._tokenizer = tokenizer
        super().__init__(source, tokenizer.special_tokens, special_tokens, name)

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The tokens of a conversation, up to where the answer begins.

        Args:
            messages: each with `role`, `content` and what else the template reads, all of it JSON.
            variables: of the template; `add_generation_prompt` is true if not given, and `tools` and `documents` none.

        Raises:
            UserError: an unknown role, or the template leaves a message out, refuses the messages or exceeds a limit.
        """
        return self._tokenizer.encode_with_special_tokens(self.prompt(messages, variables))


class _StandIns:
    """Replaces letters that could begin the name of a special token.

    Args:
        names: names of the special tokens.
        strings: text that the template may look for in a message.
        source: the template, whose characters are not stand-ins.
    """

    def __init__(self, names: Iterable[str], strings: Iterable[str], source: str):
        self._source = set(source)
        names = [name.lstrip() for name in names if name.strip()]
        self._letters = sorted({name[0] for name in names})
        self._kept: dict[str, set[int]] = {}  # of each string, the places of letters that cannot begin a name
        for string in strings:
            kept = {
                n
                for n, letter in enumerate(string)
                if letter in self._letters
                and not any(name.startswith(string[n:]) or string[n:].startswith(name) for name in names)
            }
            if kept:
                self._kept[string] = kept
        alternatives = [*sorted(self._kept, key=len, reverse=True), *self._letters]
        self._pattern = re.compile('|'.join(map(re.escape, alternatives)) or r'(?!)')

    def mark(self, values: Any) -> tuple[Any, Any]:
        """The values with stand-ins, and a function that gives a text its letters back."""
        used = self._source | set(json.dumps(values, ensure_ascii=False))
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
        stand_ins = dict(zip(self._letters, free, strict=False))
        if len(stand_ins) < len(self._letters):
            raise UserError('the messages use every character of the private use area of Unicode')

        def replace(match: re.Match) -> str:
            kept = self._kept.get(match[0], ())
            letters = enumerate(str(match[0]))
            return ''.join(c if n in kept else stand_ins.get(c, c) for n, c in letters)

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(replace, value)
            if isinstance(value, Mapping):
                return {marked(key): marked(inner) for key, inner in value.items()}
            if isinstance(value, list | tuple):
                return [marked(inner) for inner in value]
            return value

        letters = {stand_in: letter for letter, stand_in in stand_ins.items()}
        letters |= {
            f'\\u{ord(stand_in):04x}': letter for stand_in, letter in letters.items()
        }  # tojson(ensure_ascii=true)
        back = re.compile('|'.join(map(re.escape, letters)) or r'(?!)')
        return marked(values), lambda text: back.sub(lambda match: letters[match[0]], text)


def _read_source(source: str, name: str) -> tuple[set[str], set[str]]:
    """The strings in the expressions of a template, and its free variables.

    Raises UserError if it is not a template.
    """
    import jinja2
    import jinja2.nodes

    if len(source) > _MOST_CHARACTERS:
        raise UserError(f'{name} has {len(source):,} characters; expected at most {_MOST_CHARACTERS:,}')
    try:
        jinja = environment()
        tree, free = jinja.parse(source), set[str]()
        _find_free(tree, set(jinja.globals), free)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise UserError(f'{name}, line {getattr(error, "lineno", "?")}: {error}') from None
    return {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}, free


def _find_free(node: Any, assigned: set[str], free: set[str]) -> None:
    """Adds the variables that are read before they are assigned. `jinja2.meta` would compute "x" * 10 ** 10."""
    kind = type(node).__name__
    if kind == 'Name' and node.ctx != 'load':
        assigned.add(node.name)
    elif kind == 'Name' and node.name not in assigned:
        free.add(node.name)
    children = list(node.iter_child_nodes())
    for child in reversed(children) if kind == 'Assign' else children:  # the value is read before it is assigned
        _find_free(child, assigned, free)


def read_chat_template(directory: Any, tokenizer: 'Tokenizer', file: Any = None) -> ChatTemplate | None:
    """The chat template in a directory of `transformers`; None if it has none.

    Args:
        directory: with tokenizer_config.json and perhaps chat_template.jinja, on a disk or in a bucket.
        file: a Jinja file, or a tokenizer_config.json, with another template.

    Raises:
        UserError: a file is not what it should be.
    """
    settings = read_settings(directory / SETTINGS)
    special = {key: name for key in settings if key.endswith('_token') and (name := _token_name(settings[key]))}
    if file is None:
        file = directory / JINJA
        source = file.read_text(encoding='utf-8') if file.is_file() else _template_in(settings, directory / SETTINGS)
        file = file if file.is_file() else directory / SETTINGS
    else:
        with system_errors(f'{file}: no chat template'):
            source = file.read_text(encoding='utf-8')
        if file.name.endswith('.json'):
            source = _template_in(read_settings(file), file)
            if source is None:
                raise UserError(f'{file}: expected a chat_template in it')
    return None if source is None else ChatTemplate(source, tokenizer, special, str(file))


def _template_in(settings: Mapping[str, Any], path: Any) -> str | None:
    """The template in a tokenizer_config.json, which may have several, with names."""
    found = settings.get('chat_template')
    if isinstance(found, list):
        named = {entry.get('name'): entry.get('template') for entry in found if isinstance(entry, dict)}
        found = named.get('default')
        if found is None:
            raise UserError(
                f'{path}: chat_template has no template with the name default, but {", ".join(map(str, named))}'
            )
    if found is not None and not isinstance(found, str):
        raise UserError(f'{path}: chat_template is {type(found).__name__}; expected a template, or a list of them')
    return found


def _token_name(value: Any) -> str | None:
    value = value.get('content') if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
