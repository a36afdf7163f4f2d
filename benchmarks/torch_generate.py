"""The other side of benchmarks/serve.py: `generate` of transformers, in a process that has PyTorch but not pretrax.

It reads lines of JSON: the form of the weights, prompts (token ids of one length), the number of new tokens and that of
threads. It answers with seconds, CPU seconds and the tokens. Forms: f32; bf16; int8, which is PyTorch's dynamic
quantization of all matrices of the f32 weights.
"""

import argparse
import functools
import json
import sys
import time
import warnings

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def load(checkpoint: str, form: str):
    """The model in a form."""
    dtype = torch.bfloat16 if form == 'bf16' else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    if form != 'int8':
        return model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # the embedding stays f32
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, transformers.pytorch_utils.Conv1D):  # GPT-2's, which is not quantized by itself
                setattr(module, name, linear(child))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it is deprecated, and PyTorch itself has no successor
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def linear(module):
    """A `Conv1D` as a `Linear`."""
    inputs, outputs = module.weight.shape
    result = torch.nn.Linear(inputs, outputs)
    result.weight.data, result.bias.data = module.weight.data.T.contiguous(), module.bias.data
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('checkpoint')
    arguments = parser.parse_args()
    model_in = functools.cache(functools.partial(load, arguments.checkpoint))
    print(json.dumps({'torch': torch.__version__, 'transformers': transformers.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(request['threads'])
        model, ids, new = model_in(request['form']), torch.tensor(request['prompts']), request['tokens']
        start, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        answer = {'seconds': time.perf_counter() - start, 'cpu': time.process_time() - cpu}
        print(json.dumps(answer | {'tokens': out[:, ids.shape[1] :].tolist()}), flush=True)


if __name__ == '__main__':
    main()
