"""What MaxText's configurations say about the run itself: its data, optimizer, schedule, checkpoints and logs."""

from pretrax.model.choices import presets
from pretrax.translate.translation import Translation, cosine_points, run_name

_TOKENIZER = 'the tokenizer as a tokenizer.json, such as that of the model on the Hugging Face hub'


def run_and_logs(t: Translation, stem: str) -> None:
    """The run's name, seed, checkpoints, evaluation and logs."""
    t.set('name', run_name(t.text('run_name'), stem), 'run_name')
    if t.text('base_output_directory'):
        directory = f'{t.text("base_output_directory").rstrip("/")}/{t.values["name"]}'
        t.set('run_dir', directory, 'base_output_directory', note='base_output_directory/run_name')
    t.not_needed('the run is written to runs/NAME', *t.matching('base_output_directory'))
    t.set('seed', t.integer('init_weights_seed'), 'init_weights_seed')
    if t.integer('data_shuffle_seed') == t.integer('init_weights_seed'):
        t.not_needed('the same as init_weights_seed', 'data_shuffle_seed')
    else:
        t.no_equivalent('weights and data have one seed', 'data_shuffle_seed')
    t.set('checkpoint.every', t.integer('checkpoint_period'), 'checkpoint_period')
    if t.get('enable_checkpointing', True) is False:
        t.no_equivalent(
            'a run always writes its last checkpoint; checkpoint.every=0 writes no others', 'enable_checkpointing'
        )
    t.not_needed('a run always writes checkpoints', *t.matching('enable_checkpointing'))
    if t.get('max_num_checkpoints_to_keep', None) is not None:
        t.set('checkpoint.keep', t.integer('max_num_checkpoints_to_keep'), 'max_num_checkpoints_to_keep')
    elif 'max_num_checkpoints_to_keep' in t.given:
        t.set(
            'checkpoint.keep_every', t.integer('checkpoint_period'), 'max_num_checkpoints_to_keep', note='all are kept'
        )
    t.set('eval.every', max(t.integer('eval_interval'), 0), 'eval_interval')
    if t.integer('eval_steps') > 0:
        t.set('eval.batches', t.integer('eval_steps'), 'eval_steps')
    t.not_needed('eval.batches has a default', *t.matching('eval_steps'))
    if t.flag('enable_tensorboard'):
        t.set('log.tensorboard', True, 'enable_tensorboard')
    t.not_needed('off in this file', *t.matching('enable_tensorboard'))
    if t.flag('enable_wandb'):
        t.set('log.wandb', t.text('wandb_project_name') or 'maxtext', 'enable_wandb', 'wandb_project_name')
        t.changed('the name of the run is name', *(key for key in t.matching('wandb_run_name') if t.get(key)))
    t.not_needed('W&B is off, or has a project', *t.matching('enable_wandb', 'wandb_*'))
    if t.flag('skip_step_on_spikes'):
        factor = t.number('skip_step_scaling_factor', 6)
        t.set('faults.spike', factor, 'skip_step_on_spikes', 'skip_step_scaling_factor')
        t.changed('the loss is compared, not the gradient (docs/reliability.md#failed-steps)', 'skip_step_on_spikes')
    t.not_needed('off in this file', *t.matching('skip_step_on_spikes'))
    if t.text('profiler') == 'xplane':
        t.set('log.profile', t.integer('profiler_steps', 5), 'profiler', 'profiler_steps')
    elif t.text('profiler'):
        t.no_equivalent('log.profile writes a trace of JAX', 'profiler')
    t.not_needed('off in this file', *t.matching('profiler'))
    if t.flag('collect_stack_trace'):
        t.set(
            'faults.stack_trace_interval_seconds',
            t.integer('stack_trace_interval_seconds', 600),
            'collect_stack_trace',
            'stack_trace_interval_seconds',
        )
    t.not_needed('stacks are written on a fault', *t.matching('*stack_trace*'))


def schedule(t: Translation) -> int:
    """Steps, warm-up and decay. Returns the number of steps."""
    length, steps = t.integer('learning_rate_schedule_steps'), t.integer('steps')
    steps = length if steps == -1 else steps
    length = steps if length == -1 else length
    t.set('steps', steps, 'steps')
    warmup = int(length * t.number('warmup_steps_fraction'))
    final_key = (
        'cosine_learning_rate_final_fraction'
        if 'cosine_learning_rate_final_fraction' in t.given
        else 'learning_rate_final_fraction'
    )
    final, kind = t.number(final_key), t.text('lr_schedule_type')
    if kind not in ('cosine', 'wsd'):
        raise t.mistake('lr_schedule_type', kind, 'cosine or wsd')
    is_whole = length == steps
    name = ('cosine' if kind == 'cosine' else 'wsd') if is_whole else 'piecewise'
    t.set('schedule.name', name, 'lr_schedule_type')
    t.set('schedule.warmup', warmup, 'warmup_steps_fraction', note=f'warmup_steps_fraction x {length} steps')
    share = t.number('wsd_decay_steps_fraction')
    if is_whole:
        t.set('schedule.final', final, final_key)
        if kind == 'wsd':
            t.set('schedule.decay', share, 'wsd_decay_steps_fraction')
            if t.text('wsd_decay_style', 'linear') != 'linear':
                t.changed('the decay is a straight line', 'wsd_decay_style')
        t.not_needed('the schedule has the length of the run', 'learning_rate_schedule_steps')
    else:
        if kind == 'cosine':
            points = cosine_points(warmup, length, steps, final, 0.0)
        else:
            points = [[0, 1.0], [round(length * (1 - share)), 1.0], [length, final]]
            points += [[length + 1, 0.0]] if length < steps else []
        t.set('schedule.between', 'linear', 'learning_rate_schedule_steps')
        t.set('schedule.points', points, 'learning_rate_schedule_steps', final_key, note='[step, part of the peak]')
        t.changed('drawn with straight lines, since it does not end with the run', 'learning_rate_schedule_steps')
    t.not_needed('for lr_schedule_type: wsd', *t.matching('wsd_*'))
    t.not_needed('cosine_learning_rate_final_fraction has replaced it', *t.matching('learning_rate_final_fraction'))
    return steps


def optimizer(t: Translation) -> None:
    """The optimizer. MaxText decays all weights, norms too."""
    kind = {'adam_pax': 'adamw'}.get(t.text('opt_type'), t.text('opt_type'))
    if kind not in ('adamw', 'sgd', 'muon'):
        raise t.mistake('opt_type', kind, 'adamw, adam_pax, sgd or muon')
    t.set('optimizer.name', kind, 'opt_type')
    t.set('optimizer.learning_rate', t.number('learning_rate'), 'learning_rate')
    if kind == 'muon':
        t.set('optimizer.momentum', t.number('muon_beta'), 'muon_beta')
        t.set('optimizer.weight_decay', t.number('muon_weight_decay'), 'muon_weight_decay')
        if t.get('muon_consistent_rms', None) is not None:
            t.set('optimizer.rms', t.number('muon_consistent_rms'), 'muon_consistent_rms')
        t.changed('updates have the same RMS for any width (optimizer.rms)', 'opt_type')
    if kind in ('adamw', 'muon'):
        t.set('optimizer.b1', t.number('adam_b1'), 'adam_b1')
        t.set('optimizer.b2', t.number('adam_b2'), 'adam_b2')
        t.set('optimizer.eps', t.number('adam_eps'), 'adam_eps')
    if kind == 'adamw':
        t.set('optimizer.weight_decay', t.number('adam_weight_decay'), 'adam_weight_decay')
        t.set('optimizer.no_decay', [], note='MaxText decays norms too')
    t.set('optimizer.clip_norm', t.number('gradient_clipping_threshold') or None, 'gradient_clipping_threshold')
    t.not_needed(f'not an option of {kind}', *t.matching('adam_b*', 'adam_eps', 'adam_weight_decay', 'muon_*'))


def data(t: Translation) -> None:
    """Where the text comes from. TFDS and ArrayRecord cannot be read; the same text on the Hugging Face hub can."""
    kind = t.text('dataset_type')
    tokenizer = ('tokenizer_path',)
    if kind == 'synthetic':
        t.set('data.name', 'synthetic', 'dataset_type')
        if 'model.preset' in t.values:
            t.set('data.vocab_size', presets()[t.values['model.preset']]['vocab_size'], note='that of the preset')
        else:
            t.set('data.vocab_size', t.integer('vocab_size'), 'vocab_size')
        t.not_needed(
            'the data is synthetic',
            *t.matching('tokenizer_path', 'dataset_*', 'hf_*', 'grain_*', 'eval_*', 'train_split', 'packing'),
        )
        return
    hub = t.text('hf_path')
    files = t.text('hf_train_files') or t.text('hf_data_files') if kind == 'hf' else t.text('grain_train_files')
    name = t.text('dataset_name')
    if kind == 'hf' and hub and not files:
        t.set('data.text', f'hf:{hub}', 'hf_path', 'dataset_type')
        options = {'split': t.text('train_split', 'train')}
        if t.text('hf_name'):
            options['configuration'] = t.text('hf_name')
        t.set('data.hugging_face', options, 'hf_name', 'train_split')
        if t.text('hf_data_dir'):
            t.no_equivalent('name the files in data.text, such as hf://datasets/ORG/NAME/DIR/*.parquet', 'hf_data_dir')
        if t.text('hf_eval_split'):
            t.set('data.validation_split', t.text('hf_eval_split'), 'hf_eval_split')
    elif kind == 'grain' and files and ';' not in files and t.text('grain_file_type') in ('mmap', 'mmap_npy'):
        t.set('data.tokens', files, 'grain_train_files', 'grain_file_type', 'dataset_type')
        t.set('eval.every', 0, note='TO DO: data.validation_tokens, to evaluate')
        t.changed(
            'the path of X.bin and X.idx without their endings (docs/data.md#token-files-of-other-tools)',
            'grain_train_files',
        )
        t.not_needed(
            'the data is tokenized',
            *t.matching('tokenizer_path', 'dataset_*', 'hf_*', 'eval_*', 'train_split', 'packing'),
        )
        return
    elif files and (kind == 'hf' or t.text('grain_file_type', 'arrayrecord') not in ('arrayrecord', 'tfrecord')):
        t.set('data.text', files, 'hf_train_files', 'hf_data_files', 'grain_train_files', 'dataset_type')
    elif kind in ('tfds', 'c4', 'c4-array_record') and name.startswith('c4/en'):
        t.set('data.text', 'hf:allenai/c4', 'dataset_name', 'dataset_type')
        t.set('data.hugging_face', {'configuration': 'en', 'split': 'train'}, 'dataset_name')
        t.set('data.validation_split', t.text('eval_split'), 'eval_split')
        t.changed(
            'files of TFDS and ArrayRecord cannot be read; this is the same text on the Hugging Face hub',
            'dataset_type',
            'dataset_name',
        )
    else:
        t.set('data.text', 'TEXT/*.jsonl', note='TO DO: the path of your text (docs/data.md)')
        t.no_equivalent(
            'files of TFDS and ArrayRecord cannot be read; data.text takes jsonl, parquet, csv, txt and hf:',
            'dataset_type',
            'dataset_name',
            'grain_train_files',
        )
    t.set('data.streaming', True, note='MaxText tokenizes while it trains; false: once, before')
    t.set('data.tokenizer', 'tokenizer.json', *tokenizer, note=f'TO DO: {_TOKENIZER}')
    t.changed(f'{_TOKENIZER}, instead of a SentencePiece or tiktoken file', *tokenizer)
    t.changed('rows are windows of the concatenated text; documents of a row do not see each other', 'packing')
    t.not_needed('access: the environment variable HF_TOKEN', 'hf_access_token')
    t.not_needed(
        'of another kind of dataset', *t.matching('dataset_*', 'hf_*', 'eval_dataset_name', 'eval_split', 'train_split')
    )
