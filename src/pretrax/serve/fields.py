"""Fields and values of other servers that ask this one for nothing, and those that it refuses, with the reasons.

The fields that the server has are those of serve/bodies.py. A value that asks for nothing is dropped: null in every
field, and the neutral values in these tables. Another value of a field in these tables is an error that gives the
reason.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError


@dataclasses.dataclass(frozen=True)
class Field:
    """How a field is read."""

    reason: str = ''  # why its other values are refused; empty: the server has the field
    neutral: tuple[Any, ...] | None = ()  # values that ask for nothing; None: all do
    same_as: str = ''  # another field; its value asks for nothing


_UNUSED = Field(neutral=None)  # labels, and hints for the speed: no value of it can change an answer
TOOLS = 'this server calls no tools'
_FORMAT = 'this server does not constrain the format of an answer'
_TEXT = 'this server answers with text only'
_READS_TEXT = 'this server reads text only'
_BEAMS = 'this server samples; it has no beam search'
_STORE = 'this server stores no requests and no answers'
_IDS = 'answers are text; /tokenize gives its tokens'
_VARIABLE = 'give it in chat_template_kwargs, if the chat template reads it'
_NEW_MESSAGE = 'an answer is always a new message'
_THOUGHTS = 'this server reads no thoughts of earlier answers'

# The first field here that is refused is reported, so a field comes before those that depend on it.
EVERYWHERE = {
    'user': _UNUSED,
    'safety_identifier': _UNUSED,
    'prompt_cache_key': _UNUSED,
    'prompt_cache_retention': _UNUSED,
    'request_id': _UNUSED,
    'metadata': Field(_STORE, ({},)),
    'priority': Field('requests are served in the order in which they come', (0,)),
    'service_tier': Field('this server has one tier of service', ('auto', 'default')),
    'truncate_prompt_tokens': Field('a prompt is never cut; shorten it'),
    'cache_salt': Field('all requests share the cache of prompts'),
    'mm_processor_kwargs': Field(_READS_TEXT, ({},)),
}
_GENERATION = EVERYWHERE | {
    'tools': Field(TOOLS, ([],)),
    'functions': Field(TOOLS, ([],)),
    'tool_choice': Field(TOOLS, ('none', 'auto')),
    'function_call': Field(TOOLS, ('none', 'auto')),
    'parallel_tool_calls': Field(TOOLS, (True, False)),
    'response_format': Field(_FORMAT, ({'type': 'text'},)),
    'structured_outputs': Field(_FORMAT, ({},)),
    'guided_json': Field(_FORMAT),
    'guided_regex': Field(_FORMAT),
    'guided_choice': Field(_FORMAT),
    'guided_grammar': Field(_FORMAT),
    'structural_tag': Field(_FORMAT),
    'guided_decoding_backend': _UNUSED,  # how to enforce a constraint, which is refused by its own field
    'guided_whitespace_pattern': _UNUSED,
    'best_of': Field('this server does not rank answers; ask for n answers with logprobs and choose one', (1,), 'n'),
    'use_beam_search': Field(_BEAMS, (False,)),
    'length_penalty': Field(_BEAMS, (1,)),
    'early_stopping': Field(_BEAMS, (False,)),
    'store': Field(_STORE, (False,)),
    'prediction': _UNUSED,
    'top_k': Field(neutral=(0, -1)),
    'min_tokens': Field('an answer may end at any token; ignore_eos writes max_tokens tokens', (0,)),
    'include_stop_str_in_output': Field('an answer ends before its stop string', (False,)),
    'spaces_between_special_tokens': Field('tokenizer.json says where spaces are', (True, False)),
    'bad_words': Field('use logit_bias to exclude tokens', ([],)),
    'allowed_token_ids': Field('use logit_bias to exclude tokens'),
    'logits_processors': Field('requests bring no code', ([],)),
    'prompt_logprobs': Field('use "echo": true with logprobs in /v1/completions'),
    'return_tokens_as_token_ids': Field(_IDS, (False,)),
    'return_token_ids': Field(_IDS, (False,)),
    'kv_transfer_params': Field('this server hands no caches over', ({},)),
}
COMPLETION = _GENERATION | {
    'suffix': Field('this server only continues text; it does not insert text before a suffix', ('',)),
    'logprobs': Field(neutral=(False,)),
}
CHAT = _GENERATION | {
    'modalities': Field(_TEXT, (['text'],)),
    'audio': Field(_TEXT),
    'reasoning_effort': Field(_VARIABLE, ('none',)),
    'documents': Field(_VARIABLE, ([],)),
    'include_reasoning': _UNUSED,  # an answer is content, whatever it says
    'verbosity': Field('this server has no control of the length of an answer but max_tokens', ('medium',)),
    'web_search_options': Field('this server does not search the web'),
    'echo': Field('an answer does not repeat the messages', (False,)),
    'add_special_tokens': Field('the chat template writes all special tokens', (False,)),
    'parse_special': Field('the chat template writes all special tokens', (False,)),
    'add_generation_prompt': Field(_NEW_MESSAGE, (True,)),
    'continue_final_message': Field(_NEW_MESSAGE, (False,)),
    'chat_template': Field('the server chooses the template: --chat-template'),
}
EMBEDDING = EVERYWHERE | {'input_type': Field('write an instruction into the text; all texts are embedded alike')}
MESSAGE = {
    'type': Field('a message is of type "message"', ('message', 'text')),
    'id': _UNUSED,
    'cache_control': _UNUSED,
    'tool_calls': Field(TOOLS, ([],)),
    'function_call': Field(TOOLS),
    'tool_call_id': Field(TOOLS),
    'refusal': Field('write a refusal as content', ('',)),
    'audio': Field(_READS_TEXT),
    'annotations': Field(_READS_TEXT, ([],)),
    'reasoning': Field(_THOUGHTS, ('',)),
    'reasoning_content': Field(_THOUGHTS, ('',)),
}
PART = {'cache_control': _UNUSED, 'annotations': Field(_READS_TEXT, ([],))}
STREAM_OPTIONS = {
    'continuous_usage_stats': Field('the usage comes with the last event', (False,)),
    'include_obfuscation': Field('the lengths of events are not hidden', (False,)),
}


def asked(body: Any, fields: Mapping[str, Field]) -> Any:
    """The fields of a JSON object that ask for something; another value as it is.

    Raises:
        PydanticCustomError: a field asks for something that this server does not do.
    """
    if not isinstance(body, dict):
        return body
    left = {name: value for name, value in body.items() if value is not None}
    for name, field in fields.items():
        if name not in left:
            continue
        neutral = (*(field.neutral or ()), left.get(field.same_as))
        if field.neutral is None or any(_same(left[name], value) for value in neutral):
            del left[name]
        elif field.reason:
            raise PydanticCustomError('unsupported', '{reason}', {'field': name, 'reason': field.reason})
    return left


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; 0 is not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
