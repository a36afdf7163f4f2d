"""Train from Python, read the final loss, and generate text with the trained weights.

Run it in the root of the repository: python examples/library_use.py [key=value ...]
"""

import math
import sys

from pretrax import load_config, pretrain
from pretrax.infer.sample import sample

config = load_config('configs/quickstart.yaml', ['name=library', *sys.argv[1:]])
result = pretrain(config)

loss = result.metrics['loss']
print(f'{int(result.state.step)} steps; the last loss is {loss:.2f}, a perplexity of {math.exp(loss):.0f}')
run = result.run
for text in sample(run.recipe.model, result.state.weights, run.source.tokenizer, config.sample, seed=1):
    print(text)
