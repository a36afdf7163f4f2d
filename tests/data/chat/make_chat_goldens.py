"""Writes chat_goldens.json, in an environment with transformers: PYTHONPATH=tests python
tests/data/chat/make_chat_goldens.py
"""

import json
from pathlib import Path

import transformers

from chat_templates import CONVERSATIONS, TEMPLATES, TOOLS, VARIABLES, backend

GOLDENS = Path(__file__).with_name('chat_goldens.json')


def main():
    goldens = {'transformers': transformers.__version__}
    for name, template in TEMPLATES.items():
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(name), **VARIABLES[name])
        tokenizer.chat_template = template
        for title, messages in CONVERSATIONS.items():
            for add_generation_prompt in (True, False):
                tools = TOOLS if name == 'thinking' else None
                given = {'add_generation_prompt': add_generation_prompt, 'tools': tools}
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
                text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
                assert ids == tokenizer(text, add_special_tokens=False)['input_ids']
                goldens[f'{name}, {title}, {"open" if add_generation_prompt else "closed"}'] = ids
    GOLDENS.write_text(json.dumps(goldens) + '\n')


if __name__ == '__main__':
    main()
