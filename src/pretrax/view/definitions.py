"""What each number means that a run writes or a page shows: the one place for names, units and definitions.

The page of metrics of the reference is generated from it.
"""

from typing import NamedTuple


class Definition(NamedTuple):
    """What a number is.

    Attributes:
        name: for people, such as 'training loss'.
        unit: such as 'nats per token'; '' if it has none.
        meaning: one sentence.
    """

    name: str
    unit: str
    meaning: str

    @property
    def is_fraction(self) -> bool:
        """Whether the number is shown in percent."""
        return self.unit == 'fraction of 1'


# Keys of metrics.jsonl. A key that ends in /NAME stands for all keys with this beginning.
DEFINITIONS = {
    'step': Definition('step', '', 'optimizer steps done; in every line'),
    'time': Definition('time', 's', 'when the line was written, in seconds since 1970 (UTC); in every line'),
    'loss': Definition('training loss', 'nats per token', 'mean over the counted tokens of the step'),
    'nll': Definition(
        'cross-entropy', 'nats per token', 'the part of the loss that is the negative log-likelihood of the next token'
    ),
    'z_loss': Definition(
        'z-loss', '', 'the part of the loss that keeps logits small: its weight times the mean of log(Z)^2'
    ),
    'balance_loss': Definition('load-balance loss', '', 'the part of the loss that makes the load of experts even'),
    'router_z_loss': Definition('router z-loss', '', "the part of the loss that keeps the router's logits small"),
    'distillation': Definition(
        'distillation loss',
        'nats per token',
        'divergence between the probabilities of the teacher and the model, times the square of the temperature',
    ),
    'hidden_mse': Definition(
        'hidden states',
        '',
        "squared error of hidden states relative to the teacher's, without its weight in the loss; 1 is the error of "
        "zeros",
    ),
    'bits_per_byte': Definition(
        'bits per byte',
        'bits',
        'the loss per byte of text, if the data knows its bytes; comparable between tokenizers',
    ),
    'tokens': Definition('tokens', '', 'tokens read since step 0, whether they are targets or not'),
    'targets': Definition('targets', '', 'tokens of the step that count in the loss'),
    'tokens_per_second': Definition(
        'tokens per second', '1/s', 'rate of all devices together since the previous line, without compilation'
    ),
    'mfu': Definition(
        'MFU',
        'fraction of 1',
        'model FLOPs utilization, with causal attention; null if the peak is not known, or is exceeded',
    ),
    'mfu_full': Definition('MFU, full attention', 'fraction of 1', 'MFU, counting the FLOPs of full attention'),
    'grad_norm': Definition('gradient norm', '', 'global norm of the gradient, before clipping'),
    'clipped_grad_norm': Definition('clipped gradient norm', '', 'global norm of the gradient, after clipping'),
    'weight_norm': Definition('weight norm', '', 'global norm of the weights, after the step'),
    'learning_rate': Definition('learning rate', '', 'learning rate of the step'),
    'skipped_steps': Definition(
        'skipped steps',
        '',
        'steps that changed neither weights nor optimizer, because of a non-finite gradient or a spike; data and '
        'schedule still advance',
    ),
    'skipped_in_a_row': Definition('skipped in a row', '', 'skipped steps since a step last changed the weights'),
    'steps_without_targets': Definition(
        'steps without targets',
        '',
        'steps that had nothing to learn, since no token of their batches is a target: they changed neither weights '
        'nor optimizer, '
        'and are not faults; their lines have no loss',
    ),
    'goodput': Definition(
        'goodput',
        'fraction of 1',
        'time of the steps that were kept, divided by all time since the run first started',
    ),
    'expert_load_max': Definition(
        'largest expert load', '', 'tokens of the most used expert of any layer, relative to an even share of 1'
    ),
    'expert_load_min': Definition(
        'smallest expert load', '', 'tokens of the least used expert of any layer, relative to an even share of 1'
    ),
    'expert_load_entropy': Definition(
        'expert load entropy', 'fraction of 1', 'entropy of the shares of the experts, relative to even shares'
    ),
    'dropped_fraction': Definition(
        'dropped choices', 'fraction of 1', "choices of experts beyond an expert's capacity, which were dropped"
    ),
    'mtp_loss/NAME': Definition(
        'loss of module NAME', '', 'the part of the loss of module NAME of multi-token prediction, with its weight'
    ),
    'mtp_nll/NAME': Definition(
        'cross-entropy of module NAME', 'nats per token', 'cross-entropy of module NAME of multi-token prediction'
    ),
    'memory_bytes': Definition(
        'memory in use', 'bytes', 'memory of the fullest device of process 0 when the line was written; not on CPUs'
    ),
    'memory_peak_bytes': Definition(
        'peak memory', 'bytes', 'the most memory that was in use at once on a device of process 0 so far; not on CPUs'
    ),
    'batch': Definition('batch', '',
    "number of the step's batch; the step minus 1, and more after a rollback, which skips batches"),
    'logit_max': Definition('largest logit', '',
    'maximum over the counted targets of the step and the vocabulary; with `log.layers`'),
    'log_partition': Definition('log-partition', 'nats',
    'log(sum(exp(logits))), mean over the counted targets; with `log.layers`'),
    'attention_logit_max': Definition('largest attention logit', '',
    'maximum over layers and heads; with `log.layers`'),
    'attention_entropy': Definition('attention entropy', 'nats', 'mean over layers and heads; with `log.layers`'),
    'dead_units': Definition('dead units', 'fraction of 1', 'mean over layers; with `log.layers`'),
    'loss/NAME': Definition('training loss of NAME', 'nats per token',
    'mean over the tokens of each source of a mixture; with `log.layers`'),
    'noise_scale': Definition(
        'gradient noise scale', 'tokens',
        '`sequence_length` times the mean of `noise_trace` divided by that of `noise_square`; with `log.noise_scale`'
    ),
    'noise_trace': Definition(
        'gradient noise', '',
        'estimate of the trace of the covariance of the gradients of single sequences; with `log.noise_scale`'
    ),
    'noise_square': Definition(
        'squared gradient', '',
        'estimate of the squared norm of the gradient without noise, which may be negative; with `log.noise_scale`'
    ),
    'loss_scale': Definition('scale of the loss', '',
    'what the loss was multiplied by; with `precision.compute: fp16`'),
    'val_loss': Definition(
        'validation loss', 'nats per token',
        'mean over the counted tokens of held-out text; only in lines with an evaluation'
    ),
    'val_loss_ema': Definition(
        'validation loss of the average', 'nats per token',
        'validation loss with the moving average of the weights; with `optimizer.ema_decay`'
    ),
    'val_bits_per_byte': Definition(
        'validation bits per byte', 'bits', 'the validation loss per byte of text; only in lines with an evaluation'
    ),
    'val_loss/NAME': Definition(
        'validation loss of NAME', 'nats per token', 'mean over the held-out text of each source of a mixture'
    ),
    'task/NAME': Definition('NAME', '', 'metric of a task of `eval.tasks`'),
    'task_stderr/NAME': Definition('standard error of NAME', '',
    'standard error of the metric of a task, over its documents'),
}  # fmt: skip

# What pages say of a run besides its metrics.
OF_RUNS = {
    'state': Definition(
        'State',
        '',
        'running; stalled: running, without a new line for much longer than usual; finished: all steps are done; '
        'stopped: '
        'as asked; failed: with an error; lost: it ended without saying how, as after a kill; waiting: it has written '
        'nothing yet; removed: its directory is gone',
    ),
    'progress': Definition('Progress', '', 'the newest step, of the steps in the configuration'),
    'ends': Definition(
        'Ends',
        '',
        'when all steps are done if the run continues as in its newest 100 lines, with evaluations and saves',
    ),
    'heard': Definition('Last line', '', 'how long ago the run wrote its newest line of metrics'),
    'restarts': Definition('Restarts', '', 'how often training began again, after a stop, a failure or a loss'),
    'attempts': Definition(
        'Attempts',
        '',
        'each time that training began: its steps, and how it ended. The steps after the last checkpoint '
        'of an attempt are trained again by the next one',
    ),
    'curves': Definition(
        'Curves',
        '',
        'Each point is one line of metrics.jsonl. In a run with more than 4,096 lines, a point is the mean of 2, '
        '4, 8 or more lines that follow each other, and the band shows their range. Smoothing is an exponential '
        'moving average of the '
        'points with this weight; the pale line has the points. A cross is a number that is not finite.',
    ),
}

# Figures of reports.
FIGURES = OF_RUNS | {
    'duration': Definition('duration', 's', 'from the first event of the first attempt to the newest line or event'),
    'rollbacks': Definition(
        'rollbacks', '', 'returns to an earlier checkpoint after many skipped steps in a row; those steps were '
        'trained again'
    ),
    'flops': Definition(
        'training FLOPs', 'FLOPs', 'tokens times the FLOPs per token that the model needs, with causal attention'
    ),
    'attempt': Definition('attempt', '', 'a process, or a group of processes, that trained some steps of the run'),
    'startup_seconds': Definition(
        'start-up', 's', 'from the beginning of an attempt to the end of its first step: preparation and compilation'
    ),
    'outcome': Definition('outcome', '', 'how an attempt ended; lost: it ended without a record of how'),
    'checkpoint_size': Definition('size', 'bytes', 'sum of the files of a checkpoint'),
    'blocked_seconds': Definition(
        'blocked', 's', 'time in which no step was computed because the checkpoint was being copied'
    ),
    'written_seconds': Definition(
        'complete after', 's', 'from the beginning of a save to its manifest, most of it while training continues'
    ),
    'pauses': Definition(
        'between steps', 's',
        'time of evaluations, samples, saves and traces, in which no step was computed, as in pauses.jsonl'
    ),
    'memory_planned': Definition(
        'planned', 'bytes per device', 'expected from sizes before compiling, by purpose, in the phase that needs most'
    ),
    'memory_compiled': Definition(
        'compiled', 'bytes per device',
        'what the compiler allocates for the step: arguments, temporaries, results, program'
    ),
    'memory_peak': Definition(
        'measured', 'bytes', 'the most that was in use on one device; on a CPU, by the whole process'
    ),
    'memory_limit': Definition('available', 'bytes per device',
    'memory of a device; CPU devices share that of the machine'),
    'phase_predicted': Definition(
        'predicted', 's', 'time of a phase that does not overlap with other work, from sizes and the speed of the '
        'device'
    ),
    'phase_traced': Definition(
        'traced', 's', 'time per step and device of a phase in the newest trace: operations, communication that '
        'nothing '
        'hides, and gaps',
    ),
    'step_measured': Definition(
        'measured step', 's', 'tokens per step over tokens per second, the median of the lines of metrics.jsonl'
    ),
    'step_limit': Definition(
        'limit', 's', "FLOPs of a step over the peak of all devices: a step with an MFU of 1 takes this time"
    ),
    'mesh': Definition(
        'mesh', '', 'places of the devices: each cell is a device with its number; devices of one process have one '
        'color'
    ),
    'origin': Definition('origin', '', 'where a value of the configuration came from'),
    'sample': Definition('sample', '', 'text that the model wrote after the prompt, at this step'),
}  # fmt: skip


# Terms of comparisons; docs/see.md explains the statistics.
COMPARISONS = {
    'arm': Definition('arm', '',
    'runs of the same configuration and code, which differ only in their seed; the first arm is the baseline'),
    'seeds': Definition('seeds', '', 'the seeds of the runs of an arm'),
    'final': Definition('final value', '',
    'mean over the seeds of the last evaluation that all runs have reached, or of the training losses in the last '
    'part of the run'),
    'seed_deviation': Definition('sd between seeds', '',
    'standard deviation of the final values of the seeds of an arm'),
    'best': Definition('best val_loss', 'nats per token', 'lowest validation loss of a run, mean over the runs'),
    'last': Definition('last loss', 'nats per token', 'training loss of the last line, mean over the runs'),
    'end': Definition('end', '', 'tokens or steps of the shortest run of the arm'),
    'interval': Definition('interval of the difference', '',
    'confidence interval of the final value of the arm minus that of the baseline, from the noise between seeds'),
    'saved': Definition('fewer', 'percent',
    'how much earlier the mean curve of one arm reaches the final value of the other than that one ends'),
    'difference': Definition('what differs', '',
    'keys of the configuration, versions, data, hardware and mesh that are not the same in all arms'),
}  # fmt: skip

# Keys of layer_statistics.jsonl. `gradient_norm/q` is that of one kind of weight, and has the definition of
# `gradient_norm`.
LAYER_DEFINITIONS = {
    'residual_rms': Definition('residual RMS', '',
    'root mean square of the residual stream after the layer, over the tokens that count'),
    'residual_max': Definition('largest residual', '', 'largest absolute value of the residual stream after the layer'),
    'attention_rms': Definition('attention RMS', '', 'root mean square of what attention adds to the residual stream'),
    'attention_max': Definition('largest attention output', '',
    'largest absolute value of what attention adds to the residual stream'),
    'feed_forward_rms': Definition('feed-forward RMS', '',
    'root mean square of what the feed-forward adds to the residual stream'),
    'feed_forward_max': Definition('largest feed-forward output', '',
    'largest absolute value of what the feed-forward adds to the residual stream'),
    'attention_entropy': Definition('attention entropy', 'nats',
    'by head: entropy of the attention of a query, mean over sampled queries'),
    'attention_logit_max': Definition('largest attention logit', '',
    'by head: largest score of a sampled query and a key that it sees, scaled, before any soft cap'),
    'dead_units': Definition('dead units', 'fraction of 1',
    'units of the feed-forward whose activation function had no input above zero'),
    'expert_load': Definition('expert load', '', 'by expert: tokens that chose it, relative to an even share of 1'),
    'expert_entropy': Definition('expert load entropy', 'fraction of 1',
    'entropy of the shares of the experts, relative to even shares'),
    'dropped_fraction': Definition('dropped choices', 'fraction of 1',
    "choices of experts beyond an expert's capacity"),
    'gradient_norm': Definition('gradient norm', '', 'norm of the gradient before clipping'),
    'gradient_rms': Definition('gradient RMS', '', 'root mean square of the gradient before clipping'),
    'gradient_max': Definition('largest gradient', '', 'largest absolute value of the gradient before clipping'),
    'weight_norm': Definition('weight norm', '', 'norm of the weights before the step'),
    'weight_rms': Definition('weight RMS', '', 'root mean square of the weights before the step'),
    'weight_max': Definition('largest weight', '', 'largest absolute value of the weights before the step'),
    'update_norm': Definition('update norm', '',
    'norm of the change of the weights in the step; 0 if the step is skipped'),
    'update_rms': Definition('update RMS', '', 'root mean square of the change of the weights'),
    'update_max': Definition('largest update', '', 'largest absolute value of the change of the weights'),
    'update_ratio': Definition('update ratio', '',
    'norm of the change of the weights, divided by the norm of the weights'),
    'logit_max': Definition('largest logit', '',
    'for the whole model: maximum over the counted targets and the vocabulary'),
    'log_partition': Definition('log-partition', 'nats',
    'for the whole model: log(sum(exp(logits))), mean over the counted targets'),
    'loss_by_position': Definition('loss by position', 'nats per token',
    'for the whole model: mean in 16 equal parts of the sequence length, by the position in the document'),
    'loss_by_source': Definition('loss by source', 'nats per token',
    'for the whole model: mean over the tokens of each source of a mixture, in the order of the configuration'),
}  # fmt: skip


def definition_of(key: str) -> Definition:
    """The definition of a key of metrics; of a key that pretrax does not know, only its name."""
    if key in DEFINITIONS:
        return DEFINITIONS[key]
    start, slash, name = key.partition('/')
    family = DEFINITIONS.get(f'{start}/NAME') if slash else None
    if family is not None:
        return family._replace(name=family.name.replace('NAME', name))
    return Definition(key, '', 'a number that the model or a plugin adds to its metrics')


def definition_of_statistic(key: str) -> Definition:
    """The definition of a key of layer statistics; that of one kind of weight is named after the weight."""
    start, slash, weight = key.partition('/')
    found = LAYER_DEFINITIONS.get(start) or Definition(start, '', 'a statistic that this version does not know')
    return found._replace(name=f'{found.name} of {weight}') if slash else found
