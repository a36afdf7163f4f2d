"""Loads what `pretrax export` wrote with the stock classes of `transformers`, and compares the logits with the goldens.

Run by hand, in the environment of make_goldens.py, after each case was imported and exported:

    for case in $(cd tests/goldens; ls -d */); do
        pretrax import tests/goldens/$case --out OUT/runs/$case && pretrax export OUT/runs/$case OUT/exports/$case
    done
    ENV/bin/python tests/goldens/check_exports.py OUT/exports

Every parameter has to be found, none may be left over, and the logits have to be the goldens' to the bit (the weights
are the same f32 numbers). Each config.json that passed goes into exports.json, with the versions: the tests, which have
no transformers, hold the export to these.
"""

import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

HERE = Path(__file__).parent


def check(case, directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation='eager', dtype=torch.float32, output_loading_info=True
    )
    # The head of a tied model is in no file, by design of the format; every other list has to be empty.
    missing = [name for name in info['missing_keys'] if not (model.config.tie_word_embeddings and 'lm_head' in name)]
    assert not missing, missing
    assert not info['unexpected_keys'], info
    assert not info['mismatched_keys'], info
    golden = load_file(HERE / case / 'golden.safetensors')
    with torch.no_grad():
        logits = model.eval()(golden['tokens'][:, :-1].long(), use_cache=False).logits
    worst = (logits - golden['logits']).abs().max().item()
    assert worst == 0, f'{case}: logits differ by {worst}'
    return type(model).__name__


if __name__ == '__main__':
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    passed = json.loads((HERE / 'exports.json').read_text())
    passed |= {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
    }
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        print(f'{directory.name}: {check(directory.name, directory)}, logits equal to the bit')
        passed[directory.name] = json.loads((directory / 'config.json').read_text())
    (HERE / 'exports.json').write_text(json.dumps(passed, indent=1) + '\n')
