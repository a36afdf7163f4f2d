"""Fields of other servers: values that ask for nothing stop nobody,
and what cannot be done is refused with its reason.
"""

import pytest

from serve.calls import call

GREEDY = {'temperature': 0, 'max_tokens': 12}
MESSAGES = [{'role': 'user', 'content': 'hello'}]
BASES = {
    '/v1/completions': {'model': 'stub', 'prompt': 'x'} | GREEDY,
    '/v1/chat/completions': {'model': 'stub-chat', 'messages': MESSAGES} | GREEDY,
    '/v1/embeddings': {'model': 'stub', 'input': 'x'},
}
# The defaults in the references of OpenAI's and vLLM's servers, and values that clients are seen to send.
EVERYWHERE = [
    {'user': 'me'}, {'safety_identifier': 'me'}, {'prompt_cache_key': 'k'}, {'prompt_cache_retention': '24h'},
    {'metadata': {}},
    {'service_tier': 'auto'}, {'service_tier': 'default'}, {'priority': 0}, {'request_id': 'a'}, {'cache_salt': None},
    {'mm_processor_kwargs': {}}, {'truncate_prompt_tokens': None}, {'nobody_knows': None},
]  # fmt: skip
GENERATION = [
    {'n': 1}, {'best_of': 1}, {'n': 2, 'best_of': 2}, {'store': False}, {'tools': []}, {'functions': []},
    {'tool_choice': 'none'}, {'tool_choice': 'auto'}, {'function_call': 'auto'}, {'parallel_tool_calls': True},
    {'response_format': {'type': 'text'}}, {'top_k': 0}, {'top_k': -1}, {'top_p': 1}, {'min_p': 0}, {'min_tokens': 0},
    {'stop_token_ids': []}, {'length_penalty': 1.0}, {'repetition_penalty': 1.0}, {'presence_penalty': 0},
    {'frequency_penalty': 0}, {'early_stopping': False}, {'use_beam_search': False}, {'ignore_eos': False},
    {'skip_special_tokens': True}, {'skip_special_tokens': False}, {'include_stop_str_in_output': False},
    {'spaces_between_special_tokens': True}, {'logit_bias': {}}, {'logits_processors': []}, {'bad_words': []},
    {'stop': []}, {'stop': ''}, {'stop': ['']}, {'stop': [None]}, {'stream': False}, {'stream_options': {}},
    {'stream_options': {'include_usage': True, 'include_obfuscation': False, 'continuous_usage_stats': None}},
    {'seed': None},
    {'prediction': {'type': 'content', 'content': 'the cat'}}, {'return_tokens_as_token_ids': False},
    {'prompt_logprobs': None},
    {'guided_json': None, 'guided_regex': None, 'guided_decoding_backend': 'xgrammar'}, {'kv_transfer_params': None},
]  # fmt: skip
COMPLETION = [
    {'add_special_tokens': True},
    {'suffix': ''},
    {'suffix': None},
    {'echo': False},
    {'logprobs': False},
    {'parse_special': False},
]
CHAT = [
    {'modalities': ['text']}, {'audio': None}, {'logprobs': False, 'top_logprobs': 0}, {'reasoning_effort': 'none'},
    {'reasoning_effort': None}, {'verbosity': 'medium'}, {'web_search_options': None}, {'echo': False},
    {'documents': []},
    {'add_generation_prompt': True}, {'continue_final_message': False}, {'chat_template': None},
    {'chat_template_kwargs': {}},
    {'chat_template_kwargs': None}, {'include_reasoning': True}, {'add_special_tokens': False},
]  # fmt: skip
EMBEDDING = [{'encoding_format': None}, {'dimensions': None}, {'input_type': None}]
NEUTRAL = {
    '/v1/completions': EVERYWHERE + GENERATION + COMPLETION,
    '/v1/chat/completions': EVERYWHERE + GENERATION + CHAT,
    '/v1/embeddings': EVERYWHERE + EMBEDDING,
}


@pytest.mark.parametrize('path', BASES)
def test_a_value_that_asks_for_nothing_changes_nothing(server, path):
    def content(change):
        status, _, answer = call(server, path, BASES[path] | change)
        assert status == 200, (change, answer)
        return [
            one.get('text') or one.get('message') or one.get('embedding')
            for one in answer.get('choices') or answer['data']
        ]

    expected = content({})[0]
    for change in NEUTRAL[path]:
        assert content(change) == [expected] * change.get('n', 1), change


@pytest.mark.parametrize(
    'message',
    [
        {'role': 'assistant', 'content': 'hi', 'refusal': None, 'tool_calls': None, 'annotations': [], 'audio': None},
        {'role': 'assistant', 'content': 'hi', 'function_call': None, 'tool_calls': [], 'name': None, 'refusal': ''},
        {'role': 'assistant', 'content': 'hi', 'reasoning_content': None, 'reasoning': '', 'id': 'msg_1'},
        {'role': 'assistant', 'content': 'hi', 'type': 'message'},
        {'role': 'assistant', 'content': 'hi', 'type': 'text', 'cache_control': {'type': 'ephemeral'}},
        {'role': 'assistant', 'content': [{'type': 'text', 'text': 'hi', 'cache_control': {'type': 'ephemeral'}}]},
        {'role': 'assistant', 'content': [{'type': 'text', 'text': 'h', 'annotations': None}, {'type': 'text',
        'text': 'i'}]},
    ],
)  # fmt: skip
def test_a_message_may_say_what_it_has_not(server, message):
    def text(said):
        body = BASES['/v1/chat/completions'] | {'messages': [*MESSAGES, said, *MESSAGES], 'temperature': 1, 'seed': 3}
        return call(server, '/v1/chat/completions', body)[2]['choices'][0]['message'][
            'content'
        ]  # depends on the prompt

    assert text(message) == text({'role': 'assistant', 'content': 'hi'})


TOOL = {'type': 'function', 'function': {'name': 'f', 'parameters': {}}}
SCHEMA = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': {}}}
REFUSED = [
    ({'tools': [TOOL], 'parallel_tool_calls': False, 'tool_choice': 'auto'}, 'tools', 'this server calls no tools'),
    ({'tool_choice': 'required', 'parallel_tool_calls': True}, 'tool_choice', 'this server calls no tools'),
    ({'function_call': {'name': 'f'}}, 'function_call', 'this server calls no tools'),
    ({'parallel_tool_calls': False, 'response_format': SCHEMA}, 'response_format', 'does not constrain the format'),
    ({'response_format': {'type': 'json_object'}}, 'response_format', 'does not constrain the format'),
    ({'guided_regex': 'a*'}, 'guided_regex', 'does not constrain the format'),
    ({'structured_outputs': {'choice': ['a']}}, 'structured_outputs', 'does not constrain the format'),
    ({'best_of': 3}, 'best_of', 'does not rank answers'),
    ({'use_beam_search': True, 'n': 2}, 'use_beam_search', 'no beam search'),
    ({'length_penalty': 0.6}, 'length_penalty', 'no beam search'),
    ({'min_tokens': 5}, 'min_tokens', 'an answer may end at any token'),
    ({'include_stop_str_in_output': True}, 'include_stop_str_in_output', 'ends before its stop string'),
    ({'prompt_logprobs': 0}, 'prompt_logprobs', '"echo": true'),
    ({'truncate_prompt_tokens': 10}, 'truncate_prompt_tokens', 'a prompt is never cut'),
    ({'logits_processors': ['os.system']}, 'logits_processors', 'requests bring no code'),
    ({'priority': 1}, 'priority', 'in the order in which they come'),
    ({'store': True}, 'store', 'stores no requests'),
    ({'service_tier': 'flex'}, 'service_tier', 'one tier'),
    ({'stop_token_ids': [300]}, 'stop_token_ids', 'outside the vocabulary of 257'),
    ({'stop_token_ids': list(range(9))}, 'stop_token_ids', 'at most 8'),
    ({'stream_options': {'continuous_usage_stats': True}}, 'stream_options.continuous_usage_stats', 'the last event'),
    ({'stream_options': {'x': 1}}, 'stream_options.x', 'unknown field'),
]  # fmt: skip
CHAT_REFUSED = [
    ({'modalities': ['text', 'audio'], 'audio': {'voice': 'x', 'format': 'wav'}}, 'modalities',
    'answers with text only'),
    ({'reasoning_effort': 'high'}, 'reasoning_effort', 'chat_template_kwargs'),
    ({'web_search_options': {}}, 'web_search_options', 'does not search the web'),
    ({'continue_final_message': True}, None, 'needs a last message of the role assistant'),
    ({'add_generation_prompt': False}, None, 'continue_final_message continues one'),
    ({'chat_template': '{{ messages }}'}, 'chat_template', '--chat-template'),
    ({'chat_template_kwargs': {'enable_thinking': False}}, 'chat_template_kwargs', 'enable_thinking'),
    ({'messages': [*MESSAGES, {'role': 'tool', 'content': 'x', 'tool_call_id': '1'}]}, 'messages.1.tool_call_id',
    'calls no tools'),
    ({'messages': [*MESSAGES, {'role': 'tool', 'content': 'x'}]}, 'messages.1.role', 'calls no tools'),
    ({'messages': [{'role': 'assistant', 'tool_calls': [{'id': '1'}]}]}, 'messages.0.tool_calls', 'calls no tools'),
    ({'messages': [{'role': 'assistant', 'content': '', 'refusal': 'No.'}]}, 'messages.0.refusal', 'as content'),
    ({'messages': [{'role': 'user', 'content': None}]}, 'messages.0.content', 'missing'),
    ({'messages': [{'role': 'user', 'content': 'x', 'nmae': 'y'}]}, 'messages.0.nmae', 'unknown field'),
]  # fmt: skip


@pytest.mark.parametrize(
    ('path', 'change', 'param', 'reason'),
    [
        *[('/v1/completions', *case) for case in REFUSED],
        *[('/v1/chat/completions', *case) for case in (*REFUSED, *CHAT_REFUSED)],
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(server, path, change, param, reason):
    status, _, answer = call(server, path, BASES[path] | change)
    assert (status, answer['error']['param']) == (400, param), answer
    assert reason in answer['error']['message']


def test_a_request_may_name_more_tokens_that_end_an_answer(server):
    body = BASES['/v1/completions'] | {'stop_token_ids': [ord('s')], 'max_tokens': 30}  # the answer: the cat sat on
    choice = call(server, '/v1/completions', body)[2]['choices'][0]
    assert (choice['text'], choice['finish_reason']) == ('the cat ', 'stop')
    assert call(server, '/v1/completions', body | {'ignore_eos': True})[2]['choices'][0] == choice


def test_special_tokens_of_an_answer_are_hidden_if_asked(server):
    engine = server.engines['stub']
    engine.script = [104, 256, 105, 256]
    try:
        body = BASES['/v1/completions'] | {'ignore_eos': True, 'max_tokens': 4, 'logprobs': 0}
        shown, hidden = (
            call(server, '/v1/completions', body | {'skip_special_tokens': skip})[2] for skip in (False, True)
        )
    finally:
        engine.script = None
    assert shown['choices'][0]['text'] == 'h<|endoftext|>i<|endoftext|>'
    assert hidden['choices'][0]['text'] == 'hi'
    assert hidden['choices'][0]['logprobs']['tokens'] == shown['choices'][0]['logprobs']['tokens']
    assert hidden['choices'][0]['logprobs']['text_offset'] == [0, 1, 1, 2]


def test_a_name_of_a_special_token_in_a_raw_text_is_this_token_unless_it_is_not_parsed(server):
    text = 'a<|endoftext|>b'
    assert call(server, '/tokenize', {'prompt': text})[2]['tokens'] == [97, 256, 98]
    assert call(server, '/tokenize', {'text': text, 'parse_special': False})[2]['tokens'] == list(text.encode())
    for path, body in {'/v1/completions': {'prompt': text}, '/v1/embeddings': {'input': text}}.items():
        assert call(server, path, body)[2]['usage']['prompt_tokens'] == 3
        assert call(server, path, body | {'parse_special': False})[2]['usage']['prompt_tokens'] == 15


def test_a_raw_text_begins_with_what_begins_every_text_unless_it_is_left_out(server, monkeypatch):
    monkeypatch.setattr(server.service.models['stub'].tokenizer, 'begin_of_text', (1,))
    for text, whole, bare in (('ab', [1, 97, 98], [97, 98]), ('', [1], []), ('\x01a', [1, 97], [1, 97])):
        for more, expected in (({}, whole), ({'add_special_tokens': False}, bare)):
            assert call(server, '/tokenize', {'prompt': text} | more)[2]['tokens'] == expected
            usage = call(server, '/v1/completions', {'prompt': text, 'max_tokens': 1} | more)[2]['usage']
            assert usage['prompt_tokens'] == (len(expected) or 1)  # nothing is the end of the text before
    body = {'prompt': 'ab', 'echo': True, 'logprobs': 0, 'max_tokens': 0}
    for more, tokens in (({}, ['\x01', 'a', 'b']), ({'add_special_tokens': False}, ['a', 'b'])):
        choice = call(server, '/v1/completions', body | more)[2]['choices'][0]
        assert (choice['text'], choice['logprobs']['tokens'][-2:]) == ('ab', tokens[-2:])
    assert call(server, '/tokenizer_info')[2] == {'bos_token': None, 'eos_token': '<|endoftext|>'}
