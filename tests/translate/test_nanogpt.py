"""nanoGPT's configurations: the sizes, batch and rates that its README and train.py give."""

import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.config import build
from pretrax.errors import UserError
from pretrax.translate import Fate, translate
from small import count_parameters
from translate.translated import given, translated

# config/train_gpt2.py: 12 sequences of 1,024 tokens on 8 GPUs, 5 times
GPT2 = """\
wandb_log = True
wandb_project = 'owt'
wandb_run_name='gpt2-124M'
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = max_iters
eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
"""


def rates(config):
    schedule = build('schedule', config.schedule, config.steps)
    return lambda step: config.optimizer.learning_rate * float(schedule(jnp.asarray(step)))


def test_gpt2_has_124m_parameters_and_half_a_million_tokens_per_step(tmp_path):
    _, config = translated('nanogpt', tmp_path / 'train_gpt2.py', GPT2)
    assert (config.name, config.batch.tokens, config.log.wandb) == ('gpt2-124M', 491_520, 'owt')
    # Its print-out, 123.59M, leaves out the 1,024 x 768 positions.
    assert count_parameters(given(config.model), 50304, 1024) == pytest.approx(123.59e6 + 1024 * 768, abs=0.005e6)


@pytest.mark.parametrize('end', [5000, 4000, 6000])
def test_the_learning_rate_is_that_of_train_py(tmp_path, end):
    text = f'max_iters = 5000\nlr_decay_iters = {end}\nwarmup_iters = 100\nlearning_rate = 1e-3\nmin_lr = 1e-4\n'
    _, config = translated('nanogpt', tmp_path / 'a.py', text)
    rate = rates(config)
    for step in (100, 1000, 2500, 3999, 4500, 4999):
        # train.py, get_lr: a cosine from learning_rate at warmup_iters to min_lr at lr_decay_iters, then min_lr
        part = min((step - 100) / (end - 100), 1)
        assert rate(step) == pytest.approx(1e-4 + 0.5 * (1 + np.cos(np.pi * part)) * 9e-4, abs=2e-6)


def test_released_weights_keep_their_sizes(tmp_path):
    text = "init_from = 'gpt2-medium'\nn_layer = 3\ndropout = 0.1\nlearning_rate = 3e-5\ndecay_lr = False\n"
    translation, config = translated('nanogpt', tmp_path / 'finetune.py', text)
    assert config.init_from == 'hf:openai-community/gpt2-medium'
    assert (config.model.options.preset, config.model.options.dropout) == ('gpt2-355m', 0.1)
    assert translation.fates['n_layer'][0] is Fate.NOT_NEEDED
    assert config.schedule.name == 'constant'


def test_a_time_stamp_in_the_name_does_not_stop_finetune_shakespeare(tmp_path):
    text = (
        "import time\nwandb_run_name = 'ft-' + str(time.time())\ninit_from = 'gpt2-xl'\n"
        "dtype = 'bfloat16' if device == 'cuda' else 'float16'\nbatch_size = 1\nmax_iters = 20\ndecay_lr = False\n"
    )
    translation, config = translated('nanogpt', tmp_path / 'finetune_shakespeare.py', text)
    assert (config.name, config.steps, config.precision.compute) == ('finetune_shakespeare', 20, 'auto')
    for key in ('wandb_run_name', 'dtype'):
        assert translation.fates[key][0] is Fate.NO_EQUIVALENT
        assert 'not executed' in translation.fates[key][1]


def test_a_character_model_takes_its_vocabulary_from_meta_pkl(tmp_path):
    _, config = translated('nanogpt', tmp_path / 'a.py', "dataset = 'shakespeare_char'\nn_layer = 4\n")
    assert config.data.options.tokens == 'data/shakespeare_char'
    assert config.model.options.vocab_size is None


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ("n_layer = 'two'", "n_layer is 'two'; expected a number"),
        ('n_layer = 2.5', 'n_layer is 2.5; expected an integer'),
        ('n_layer = -2', 'model.n_layers'),
        ("dtype = 'int8'", "dtype is 'int8'; expected one of bfloat16"),
        ("init_from = 'gpt2-huge'", "init_from is 'gpt2-huge'"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(tmp_path, line, message):
    (tmp_path / 'a.py').write_text(f'batch_size = 4\nblock_size = 64\n{line}\n')
    with pytest.raises(UserError, match=message):
        translate('nanogpt', tmp_path / 'a.py')
