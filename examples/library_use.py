"""Train from Python, look at what the run measured, and let the model write, score and read text.

Run it in the root of the repository: python examples/library_use.py [key=value ...]
Run it again, and it shows the results of the finished run.
"""

import math
import sys

import numpy as np

import pretrax

result = pretrax.pretrain('configs/quickstart.yaml', ['name=library', *sys.argv[1:]])
print(result)

loss = result.history['loss']
loss = loss[~np.isnan(loss)]  # of the steps that were logged
print(f'the loss went from {loss[0]:.2f} to {loss[-1]:.2f}, a perplexity of {math.exp(loss[-1]):.0f}')

model = pretrax.load(result)
print('def ' + model.generate('def ', max_tokens=40, seed=1))
print(model.evaluate())
