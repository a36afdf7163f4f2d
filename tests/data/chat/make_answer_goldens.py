"""Writes answer_goldens.json, in an environment with transformers: PYTHONPATH=tests python
tests/data/chat/make_answer_goldens.py
"""

import json
from pathlib import Path

import transformers

from chat_templates import ANSWERED, TAGGED, VARIABLES, backend

GOLDENS = Path(__file__).with_name('answer_goldens.json')


def main():
    found = {'transformers': transformers.__version__}
    for name, template in TAGGED.items():
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(name), **VARIABLES[name])
        for title, messages in ANSWERED.items():
            made = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            found[f'{name}, {title}'] = [made['input_ids'], made['assistant_masks']]
    GOLDENS.write_text(json.dumps(found) + '\n')


if __name__ == '__main__':
    main()
