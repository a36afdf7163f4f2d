"""Your own training loop: the state is one pytree, the step is pure, and a batch is a function of the step number."""

import jax

from pretrax import config_from_values, prepare
from pretrax.train.state import init_state
from pretrax.train.step import make_step

config = config_from_values(
    {
        'name': 'own-loop',
        'steps': 20,
        'model': {'family': 'gpt2', 'n_layers': 2, 'd_model': 64, 'attention': {'n_heads': 4}},
        'data': {'text': 'src/**/*.py', 'vocab_size': 512},
        'batch': {'tokens': 2048, 'sequence_length': 128},
        'optimizer': {'name': 'lion', 'learning_rate': 1e-3},
    }
)
run = prepare(config)
with jax.set_mesh(run.mesh):
    state = init_state(run.recipe, config.seed)
    step = make_step(run.recipe)
    for number in range(config.steps):
        state, metrics = step(state, run.batch(number))
        print(number + 1, float(metrics['loss']))
