"""The other side of benchmarks/serve.py: `generate` of transformers, in a process that has PyTorch but not pretrax.

It reads lines of JSON: prompts (token ids of one length), the number of new tokens and that of threads. It answers with
seconds and the tokens.
"""

import argparse
import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('checkpoint')
    arguments = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    print(json.dumps({'torch': torch.__version__, 'transformers': transformers.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(request['threads'])
        ids, new = torch.tensor(request['prompts']), request['tokens']
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        print(json.dumps({'seconds': seconds, 'tokens': out[:, ids.shape[1] :].tolist()}), flush=True)


if __name__ == '__main__':
    main()
