"""Published chat templates and conversations, whose tokens `make_chat_goldens.py` asks `transformers` for."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n"
    "'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    '{% set loop_messages = messages %}{% for message in loop_messages %}'
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n"
    "'+ message['content'] | trim + '<|eot_id|>' %}"
    '{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% "
    'endif %}'
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% "
    'endif %}'
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
# As Qwen3 does: thoughts are cut out of earlier answers, tools are JSON, and there is whitespace to trim.
THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% set content = message.content %}
    {% if '</think>' in content %}
        {% set content = content.split('</think>')[-1].lstrip('\\n') %}
    {% endif %}
    {%- if loop.index > 40 %}{% break %}{% endif %}
    {%- if message.role == "assistant" %}{% generation %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endgeneration %}{% else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL = {
    'chatml': ['<|im_start|>', '<|im_end|>', '<|endoftext|>'],
    'llama3': ['<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'],
    'gemma': ['<bos>', '<start_of_turn>', '<end_of_turn>', '</s>'],
}
SPECIAL['thinking'] = SPECIAL['chatml']
TEMPLATES = {'chatml': CHATML, 'llama3': LLAMA3, 'gemma': GEMMA, 'thinking': THINKING}
VARIABLES = {
    'chatml': {'eos_token': '<|im_end|>'},
    'llama3': {'bos_token': '<|begin_of_text|>', 'eos_token': '<|eot_id|>'},
    'gemma': {'bos_token': '<bos>', 'eos_token': '<end_of_turn>'},
    'thinking': {'eos_token': '<|im_end|>'},
}
CONVERSATIONS = {
    'one message': [{'role': 'user', 'content': 'The quick\n\n\nfox?'}],
    'spaces': [{'role': 'user', 'content': '  \n the  quick \n'}],
    'three messages': [
        {'role': 'user', 'content': '\n\nHi! 🎉'},
        {'role': 'assistant', 'content': '<think>\nhm < 3\n</think>\n\n Hello <b>there</b>.'},
        {'role': 'user', 'content': '1 < 2, a || b |> c [x] \ue000\ue001 <|im'},
    ],
}
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'a < b ≤ "c"', 'parameters': {'<x>': 1}}}]
TEXT = [
    'The quick brown fox\n\n\nuser\n\nassistant\n model\n system  \n Hi! there the user\n\n',
    '<|im_end|> </think>\n',
] * 5


def backend(name):
    """A small tokenizer with the special tokens of a template; SentencePiece-like for Gemma, otherwise byte-level."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=name == 'gemma'))
    if name == 'gemma':
        made.normalizer = normalizers.Replace(' ', '▁')
        made.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
        alphabet, special = ['▁'], [f'<0x{byte:02X}>' for byte in range(256)]
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), []
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 90, initial_alphabet=sorted(alphabet), special_tokens=special,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(TEXT, trainer)
    state = json.loads(made.to_str()) | {'added_tokens': []}  # the bytes of Gemma are ordinary tokens
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL[name]])
    return made


# The same templates with the answers and the tokens that end them marked, as `return_assistant_tokens_mask` needs it.
TAGGED = {
    'chatml': (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n"
        "'}}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    'llama3': (
        '{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}'
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}
ANSWERED = {
    'one answer': [
        {'role': 'user', 'content': 'Hi! 🎉'},
        {'role': 'assistant', 'content': 'Hello <b>there</b>, the fox.'},
    ],
    'two answers': [
        {'role': 'system', 'content': 'The system\nassistant'},
        {'role': 'user', 'content': '1 < 2 é'},
        {'role': 'assistant', 'content': 'The quick brown 🎉 fox'},
        {'role': 'user', 'content': 'The quick brown 🎉 fox'},
        {'role': 'assistant', 'content': 'é'},
    ],
}
