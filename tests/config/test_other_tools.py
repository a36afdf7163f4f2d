"""What users of other tools type: every answer is a line that can be used, or says what to do."""

import re
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.config import load
from pretrax.config.other_tools import other_tools
from pretrax.config.problems import known_keys
from pretrax.config.registry import DEFAULTS, options_model
from pretrax.config.schema import RunConfig
from pretrax.errors import UserError

REPOSITORY = Path(__file__).parents[2]
# What is typed on the command line of the quickstart, and what the answer tells the user to write.
LINES = """
lr=1e-3                                optimizer.learning_rate=0.001
optimizer.lr=1e-3                      optimizer.learning_rate=0.001
training.lr=1e-3                       optimizer.learning_rate=0.001
max_lr=6e-4                            optimizer.learning_rate=0.0006
training.learning_rate=6e-4            optimizer.learning_rate
optimizer.max_lr=6e-4                  optimizer.learning_rate=0.0006
wd=0.1                                 optimizer.weight_decay=0.1
training.weight_decay=0.1              optimizer.weight_decay
beta1=0.9                              optimizer.b1=0.9
optimizer.beta2=0.95                   optimizer.b2=0.95
adam_beta2=0.95                        optimizer.b2=0.95
adam_epsilon=1e-8                      optimizer.eps=1e-08
grad_clip=1.0                          optimizer.clip_norm=1.0
max_grad_norm=1.0                      optimizer.clip_norm=1.0
gradient_clip_val=0.5                  optimizer.clip_norm=0.5
optimizer=lion                         optimizer.name=lion
optimizer=adamw                        optimizer.name=adamw
optimizer.type=lion                    optimizer
optim=lion                             optimizer.name=lion
opt=lion                               optimizer.name=lion
optimizer_type=lion                    optimizer.name=lion
schedule=linear                        schedule.name=linear
scheduler=linear                       schedule.name=linear
lr_scheduler_type=linear               schedule.name=linear
lr_schedule=linear                     schedule.name=linear
warmup_steps=10                        schedule.warmup=10
warmup_iters=10                        schedule.warmup=10
num_warmup_steps=10                    schedule.warmup=10
warmup_ratio=0.1                       schedule.warmup=0.1
optimizer.warmup_steps=10              schedule.warmup=10
lr_scheduler.warmup_steps=10           schedule.warmup=10
min_lr_ratio=0.1                       schedule.final=0.1
min_lr=6e-5                            schedule.final
decay_lr=false                         schedule.name=constant
lr_decay_iters=1000                    steps
betas=0.9                              optimizer.b1
max_steps=100                          steps=100
max_iters=100                          steps=100
num_train_steps=100                    steps=100
train_iters=100                        steps=100
trainer.max_steps=100                  steps=100
training.steps=100                     steps
iterations=100                         steps=100
total_steps=100                        steps=100
epochs=2                               steps
num_train_epochs=2                     steps
trainer.max_epochs=2                   steps
num_epochs=2                           steps
batch_size=8                           batch.tokens=2048
train_batch_size=8                     batch.tokens=2048
global_batch_size=8                    batch.tokens=2048
training.batch_size=8                  batch.tokens=2048
data.batch_size=8                      batch.tokens
total_batch_size=4096                  batch.tokens=4096
batch=4096                             batch.tokens=4096
block_size=128                         batch.sequence_length=128
seq_len=128                            batch.sequence_length=128
max_seq_len=128                        batch.sequence_length=128
seq_length=128                         batch.sequence_length=128
context_length=128                     batch.sequence_length=128
max_target_length=128                  batch.sequence_length=128
model.block_size=128                   batch.sequence_length=128
model.max_seq_len=128                  batch.sequence_length=128
data.seq_len=128                       batch.sequence_length=128
n_ctx=128                              batch.sequence_length=128
micro_batch_size=4                     batch.micro=4
per_device_train_batch_size=4          batch.micro=4
device_batch_size=4                    batch.micro=4
gradient_accumulation_steps=4          batch.micro
accumulate_grad_batches=4              batch.micro
hidden_size=64                         model.d_model=64
model.hidden_size=64                   model.d_model=64
n_embd=64                              model.d_model=64
model.n_embd=64                        model.d_model=64
model.dim=64                           model.d_model=64
model.embed_dim=64                     model.d_model=64
base_emb_dim=64                        model.d_model=64
model.width=64                         model.d_model=64
num_layers=2                           model.n_layers=2
n_layer=2                              model.n_layers=2
model.n_layer=2                        model.n_layers=2
model.num_hidden_layers=2              model.n_layers=2
depth=2                                model.n_layers=2
num_heads=4                            model.attention.n_heads=4
n_head=4                               model.attention.n_heads=4
model.n_head=4                         model.attention.n_heads=4
model.num_attention_heads=4            model.attention.n_heads=4
model.attention.num_heads=4            model.attention.n_heads=4
num_kv_heads=2                         model.attention.n_kv_heads=2
model.num_key_value_heads=2            model.attention.n_kv_heads=2
model.head_dim=32                      model.attention.d_head=32
sliding_window=64                      model.attention.window=64
intermediate_size=256                  model.feed_forward.d_ff=256
model.intermediate_size=256            model.feed_forward.d_ff=256
model.ffn_dim=256                      model.feed_forward.d_ff=256
mlp_dim=256                            model.feed_forward.d_ff=256
model.hidden_act=gelu                  model.feed_forward.activation=gelu
rope_theta=10000                       model.rope.base=10000
model.rope_theta=10000                 model.rope.base=10000
rms_norm_eps=1e-6                      model.norm.eps=1e-06
model.tie_word_embeddings=true         model.embedding.tied=true
weight_tying=true                      model.embedding.tied=true
attn_pdrop=0.1                         model.attention.dropout=0.1
resid_pdrop=0.1                        model.block.dropout=0.1
model.embd_pdrop=0.1                   model.embedding.dropout=0.1
dropout_rate=0.1                       model.dropout=0.1
num_experts=4                          model.experts.n_experts=4
model.num_local_experts=4              model.experts.n_experts=4
num_experts_per_tok=2                  model.experts.experts_per_token
initializer_range=0.02                 model.init.std=0.02
gradient_checkpointing=true            model.save
model=gpt2                             model.family=gpt2
model=Llama                            model.family=llama
model=gpt2-medium                      model.preset=gpt2-355m
model=qwen3-0.6b                       model.preset=qwen3-0.6b
model_type=llama                       model.family=llama
optimizer=AdamW                        optimizer.name=adamw
optim=adamw_torch                      optimizer.name=adamw
optimizer.name=adamw_torch             did you mean adamw
schedule.name=cosine_with_warmup       did you mean cosine
lr_scheduler_type=cosine_with_warmup   schedule.name=cosine
scheduler=CosineAnnealingLR            schedule.name=cosine
dtype=bfloat16                         precision.compute=bf16
precision=bf16-mixed                   precision.compute=bf16
precision.compute=float16              precision.compute=fp16
torch_dtype=float32                    precision.compute=f32
mixed_precision=no                     precision.compute=f32
amp=true                               precision.compute=auto
fp32=true                              precision.compute=f32
activation_function=gelu_new           model.feed_forward.activation=gelu
norm=rms_norm                          model.norm.kind=rmsnorm
rope=10000                             model.rope.base=10000
bias=false                             model.bias=false
dropout=0.1                            model.dropout=0.1
vocab_size=1000                        data.vocab_size=1000
packing=true                           data.packing=best_fit
val_fraction=0.1                       data.validation=0.1
eval=false                             eval.every=0
checkpoint=false                       checkpoint.every=0
grad_clip=0                            optimizer.clip_norm=null
report_to=none                         log.wandb=null
wandb=true                             log.wandb=pretrax
wandb.project=mine                     log.wandb=mine
plugins=mine.py                        write [mine.py]
lora=true                              optimizer.freeze
zero_stage=3                           ZeRO stage 3
early_stopping=true                    checkpoint.keep_best
dry_run=true                           pretrax train CONFIG --dry-run
push_to_hub=true                       pretrax export RUN
model.family=lama                      llama
model.family=qwen                      qwen
flash_attention=true                   model.attention.kernel
attn_implementation=sdpa               model.attention.kernel
dtype=bf16                             precision.compute=bf16
precision=bf16                         precision.compute=bf16
torch_dtype=bf16                       precision.compute=bf16
model.dtype=bf16                       precision.compute=bf16
mixed_precision=bf16                   precision.compute=bf16
bf16=true                              precision.compute=bf16
fp16=true                              precision.compute=fp16
gpus=1                                 mesh.d
num_gpus=1                             mesh.d
devices=1                              mesh.d
nproc_per_node=1                       pretrax launch
trainer.devices=1                      mesh.d
num_nodes=2                            pretrax launch
fsdp=1                                 mesh.d=1
tp=1                                   mesh.t=1
tensor_parallel_degree=1               mesh.t=1
pp=1                                   mesh.p=1
mesh=1                                 mesh.d=1
mesh.tp=1                              mesh.t=1
mesh.fsdp=1                            mesh.d=1
data=stdlib                            data.text=stdlib
dataset=stdlib                         data.text=stdlib
data.dataset=stdlib                    data.text=stdlib
data.path=stdlib                       data
train_data=stdlib                      data.text=stdlib
data_path=stdlib                       data.text=stdlib
tokenizer=bytes                        data.tokenizer
tokenizer_path=bytes                   data.tokenizer=bytes
num_workers=2                          data.workers=2
shuffle=true                           seed
output_dir=out                         run_dir=out
out_dir=out                            run_dir=out
trainer.default_root_dir=out           run_dir=out
run_name=mine                          name=mine
wandb_run_name=mine                    name=mine
random_seed=1                          seed=1
save_steps=50                          checkpoint.every=50
save_interval=50                       checkpoint.every=50
checkpoint=50                          checkpoint.every=50
checkpoint_interval=50                 checkpoint.every=50
save_total_limit=2                     checkpoint.keep=2
eval_steps=50                          eval.every=50
eval_interval=50                       eval.every=50
eval=50                                eval.every=50
eval_iters=2                           eval.batches=2
logging_steps=5                        log.every=5
log_interval=5                         log.every=5
log=5                                  log.every=5
sample=50                              sample.every=50
wandb_project=mine                     log.wandb=mine
model_name_or_path=hf:x                init_from=hf:x
from_pretrained=hf:x                   init_from=hf:x
resume=true                            resumes
resume_from_checkpoint=true            resumes
compile=true                           XLA
steps=1000k                            steps
batch.sequence_length=100              nearest: 4000 or 4100; or batch.sequence_length
batch.tokens=1000                      nearest: 768 or 1024; or batch.sequence_length
batch.sequence_length=[[0,100],[9,256]]    is 100 from step 0 on, which does not divide the longest (256)
batch.sequence_length=[[0,60],[9,256]] nearest: 64; shorter sequences are equal parts
"""
TYPED = [line.split(maxsplit=1) for line in LINES.strip().splitlines()]


@pytest.mark.parametrize(('typed', 'answer'), TYPED, ids=[typed for typed, _ in TYPED])
def test_the_answer_to_a_line_of_another_tool_can_be_used(typed, answer):
    with pytest.raises(UserError) as refused:
        load('quickstart', [typed])
    message = str(refused.value)
    assert answer in message
    assert len(message.splitlines()) <= 10
    written = re.search(r'write (\S+=\S+)', message)
    # The first reads files, the second needs another tokenizer, the third more experts than none
    if written and not re.search('init_from|preset|experts_per_token', answer):
        load('quickstart', [written[1]])
    assert written or '=' not in answer


@pytest.mark.parametrize(
    ('text', 'answer'),
    [
        ('extends: BASE\nmodel:\nn_layers: 2\nd_model: 64\n', ':2: model is empty, and n_layers, d_model below it not'),
        ('extends: BASE\nsteps: 3\noptimizer:\nb1: 0.9\nname: x\n', ':3: optimizer is empty, and b1 below it not'),
        ('extends: BASE\ndata:\ntext: stdlib\nmodel:\n  n_layers: 2\n', ':2: data is empty, and text below it not'),
    ],
)
def test_a_section_without_indentation_is_named_first(tmp_path, text, answer):
    file = tmp_path / 'run.yaml'
    file.write_text(text.replace('BASE', str(REPOSITORY / 'configs' / 'quickstart.yaml')))
    with pytest.raises(UserError) as refused:
        load(file)
    assert f'{file}{answer} indented\nwrite\n' in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 10


def test_an_empty_section_is_none(tmp_path):
    file = tmp_path / 'run.yaml'
    file.write_text(f'extends: {REPOSITORY}/configs/quickstart.yaml\ndistill:\nsteps: 70\n')
    assert load(file).distill is None


def test_every_name_leads_to_a_key_that_exists_and_is_no_key_itself():
    keys = {*known_keys(RunConfig)}
    for kind, name in DEFAULTS.items():
        keys |= {f'{kind}.{key}' for key in known_keys(options_model(kind, name))}
    table = other_tools()
    assert {*table.names.values(), *table.spellings} <= keys
    assert not {*table.names, *table.advice} & {*RunConfig.model_fields}
    assert not {*table.names} & {*table.advice}
    assert all(any(key.endswith(f'{section}.{inner}') for key in keys) for section, inner in table.values.items())


@pytest.mark.parametrize(
    ('arguments', 'answer'),
    [
        (['train', 'quickstart', '--lr', '1e-3'], 'optimizer.learning_rate=1e-3'),
        (['train', 'quickstart', '--learning-rate=1e-3'], 'optimizer.learning_rate=1e-3'),
        (['train', 'quickstart', '--epochs', '3'], 'steps counts optimizer steps'),
        (['train', 'quickstart', '--gpus=4'], 'every device'),
        (['train', 'quickstart', '--batch-size', '8'], 'batch.tokens'),
        (['train', 'quickstart', '--max_steps', '8'], 'steps=8'),
        (['train', 'quickstart', '--block_size', '8'], 'batch.sequence_length=8'),
        (['resume', 'runs/x'], 'pretrax train CONFIG'),
        (['finetune', 'x'], 'init_from='),
        (['sample', 'runs/x'], 'pretrax generate RUN'),
        (['tokenize', 'x'], 'did you mean: pretrax data tokenize x'),
        (['evaluate', 'x'], 'pretrax eval RUN'),
        (['help', 'trian'], 'pretrax train'),
        (['launch', 'k8s', 'quickstart'], 'pretrax launch kubernetes CONFIG'),
        (['launch', 'sbatch', 'quickstart'], 'pretrax launch slurm CONFIG'),
        (['torchrun', 'quickstart'], 'pretrax launch local CONFIG'),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, list) else '',
)
def test_options_and_verbs_of_other_tools_are_answered(arguments, answer, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(('arguments', 'shown'), [(['help'], 'Commands:'), (['help', 'data', 'tokenize'], '--out')])
def test_help_is_a_verb(arguments, shown, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert shown in capsys.readouterr().out


def test_a_value_of_the_environment_is_not_repeated(monkeypatch):
    monkeypatch.setenv('MINE', 'secret')
    with pytest.raises(UserError) as refused:
        load('quickstart', ['wandb_project=${oc.env:MINE}', 'optimizer=${oc.env:MINE}'])
    assert 'secret' not in str(refused.value)
    assert 'log.wandb' in str(refused.value)


def test_the_warmup_may_be_a_share_of_the_steps():
    config = load('quickstart', ['schedule.warmup=0.1', 'steps=200'])
    assert config.schedule.options.warmup == 20
    assert config.notes == ('schedule.warmup: 20 steps (0.1 of 200 steps)',)


def test_fewer_steps_on_the_command_line_shorten_the_warmup_of_a_file():
    config = load('quickstart', ['steps=5'])
    assert config.schedule.options.warmup == 5
    assert 'instead of' in config.notes[0]
    with pytest.raises(UserError, match='more than steps'):
        load('quickstart', ['steps=5', 'schedule.warmup=6'])
