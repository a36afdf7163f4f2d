"""Keys of MaxText that give no value of pretrax: what to do instead, or why they are not needed.

Names may have `*`. The order counts: the first row that matches decides.
"""

# Switches. If one is off (false, 0, -1, '', [], null), nothing is lost.
NO_EQUIVALENT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ('a checkpoint of MaxText cannot be read; convert it to Hugging Face with MaxText, then init_from: hf:DIR',
     ('load_parameters_path', 'load_full_state_path', 'lora_input_adapters_path', 'checkpoint_is_quantized', 'load_checkpoint*')),
    ('fine-tuning on conversations is data.messages_field (docs/data.md#conversations)', ('use_sft', 'use_chat_template', 'chat_template_path')),
    ('preference optimization and reinforcement learning are not here', ('use_dpo', 'use_grpo')),
    ('LoRA is not here; optimizer.freeze keeps weights as they are', ('lora', 'lora.*', 'enable_lora', 'lora_rank')),
    ('a batch that grows is batch.tokens: [[step, tokens], ...]', ('enable_rampup_batch_size',)),
    ('images, audio and video are not here; the language model is', ('use_multimodal', 'use_audio', 'use_mrope')),
    ('DiLoCo is not here; precision.reduction: bf16 sends less between replicas', ('enable_diloco',)),
    ('this part of a model is not here', ('engram_layers', 'moba', 'use_sparse_indexer')),
    ('checkpoints go to run_dir, a disk or a bucket, and are written in the background',
     ('enable_multi_tier_checkpointing', 'enable_emergency_checkpoint', 'enable_continuous_checkpointing')),
    ('Vertex AI: docs/see.md has the commands', ('use_vertex_tensorboard', 'managed_mldiagnostics')),
    ('the quantization of weights for serving is pretrax generate --weights', ('quantize_kvcache', 'save_quantized_params_path')),
    ('a run does not end at a loss; stop it, and the same command resumes it', ('target_eval_loss',)),
    ('log.graph: true writes the compiled step', ('dump_hlo', 'dump_jaxpr')),
    ('restarts and elastic runs: docs/clusters.md', ('elastic_enabled', 'enable_single_controller', 'enable_pathways_goodput')),
    ('a term inside the square root is not here; optimizer.eps is outside of it', ('adam_eps_root',)),
    ('the pipeline runs all layers; DeepSeek-style batch splitting is model.batch_parts', ('pipeline_parallel_layers', 'use_batch_split_schedule')),
)  # fmt: skip
NOT_NEEDED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ('the defaults of base.yml are built into this translation', ('base_config',)),
    ('model_name decides it, and this translation knows it', ('override_model_config',)),
    ('pretrax shards by the types of its arrays (docs/shardlib.md)',
     ('mesh_axes', 'logical_axis_rules', 'override_logical_axis_rules', 'data_sharding', 'input_data_sharding_*', 'sharding_tolerance',
      'shard_mode', 'shard_optimizer_over_data', 'custom_mesh*', 'allow_split_physical_axes', 'use_2d_fsdp_sharding',
      'shard_exp_on_fsdp', 'expert_shard_attention_option', 'moe_fsdp_*', 'param_scan_axis', 'optimize_mesh_*')),
    ('JAX finds the hardware', ('hardware', 'num_slices', 'jax_distributed_*', 'skip_jax_distributed_*', 'jax_debug_*')),
    ('compiled programs are cached by themselves', ('jax_cache_dir',)),
    ('pretrax compile OUT.yaml --topology NAME --slices N', ('compile_topology*', 'compiled_trainstep_file', 'compile_xla_flags')),
    ('checkpoints are always written in the background, with checksums',
     ('async_checkpointing', 'checkpoint_storage_*', 'enable_single_replica_*', 'force_unroll', 'enable_orbax_v1', 'source_checkpoint_layout',
      'checkpoint_conversion_fn', 'enable_checkpoint_*_logger', 'save_checkpoint_on_completion')),
    ('the run directory has metrics and configuration', ('metrics_file', 'gcs_metrics', 'save_config_to_gcs', 'log_config', 'log_period')),
    ('decoding is pretrax generate and pretrax serve',
     ('decode_*', 'prompt', 'load_from_prefill_dir', 'prefill_*', 'max_prefill_*', 'autoregressive_*', 'inference_*', 'ar_*', '*_axis_order',
      'model_call_mode', 'pagedattn_*', 'stack_prefill_*', 'vllm_*', 'use_chunked_prefill', 'return_log_prob', 'generate_slice', 'enable_model_warmup',
      'enable_llm_*', 'multi_sampling', 'prometheus_*', '*prefix_caching*', 'reshape_q')),
    ('the kernels choose it', ('sa_*', 'use_iota_embed', 'fused_qkv', 'fused_mlp', 'megablox', 'sparse_matmul', 'wi_*', 'wo_*', '*_tile_*',
      'use_custom_sort_vjp', 'use_ring_of_experts', 'use_random_routing', 'norm_topk_prob', 'use_ragged_*', 'max_segments_per_seq', 'use_tokamax*', 'use_jax_splash', 'mla_naive_kvcache', 'tile_*',
      'use_splash_scheduler', 'force_q_layout', 'enable_padding_*', 'batch_split_*', 'cost_estimate_*', 'use_max_logit_estimate', 'dq_reduction_steps')),
    ('norms, softmax, logits and losses are computed in f32 where it matters (docs/numerics.md)',
     ('logits_dot_in_fp32', 'cast_logits_to_fp32', 'float32_*', 'activations_in_float32', 'matmul_precision', 'grad_dtype')),
    ('data is read as docs/data.md describes',
     ('expansion_factor_real_data', 'max_corpus_chars', 'num_epoch', 'grain_*', 'tokenize_*_data', 'add_bos', 'add_eos', 'use_truncation',
      'generate_padding_*', 'tokenizer_type', 'enable_data_shuffling', 'eval_per_device_batch_size')),
    ('the pipeline schedule is chosen (docs/parallelism.md#p)',
     ('scan_pipeline_*', 'scan_layers_per_stage', 'set_remat_policy_*', 'pipeline_*', 'num_layers_per_pipeline_stage')),
    ('model.save has a name for each activation (docs/numerics.md#activations); remat_policy: custom uses these',
     ('decoder_layer_input', 'context', 'mlpwi', 'mlpwi_0', 'mlpwi_1', 'mlpwo', '*_proj', 'mla_q', 'mla_kv', 'attention_out')),
    ('details of a quantization that is not used', ('quantization_*', 'constant_bound_config', 'replicate_quant_scale', 'use_qwix_*',
      '*_quantization_calibration_method')),
    ('a profile is log.profile, and waits for the steps', ('upload_all_profiler_results', 'skip_first_n_steps_*', 'hide_profiler_*',
      'profile_cleanly', 'profile_periodically_period', 'profiler_*',
      'xprof_*', '*jax_profiler*', 'debug_sharding')),
    ('details of a part that has a switch of its own',
     ('sft_*', 'dpo_*', 'grpo_*', 'rl', 'rl.*', 'train_*_column*', 'eval_*_column*', '*_rampup_*', 'per_device_batch_size_*', '*_for_vit',
      '*_for_audio', '*_image*', 'image_*', 'video_*', 'audio_*', 'freeze_*', 'dtype_mm', 'mrope_*', 'position_id_*', 'use_audio_*',
      '*diloco*', 'engram_*', 'mhc_*', 'sinkhorn_*', 'moba_*', 'index_*', 'gdn_*', 'use_qk_norm_in_gdn', 'multi_tier_*', 'mtc_*',
      'local_checkpoint_*', 'vertex_*', 'managed_*', 'kv_quant_*', 'quant_cfg_path', 'dump_*', 'elastic_*', 'colocated_*', 'subslice_*')),
    ('pretrax records the time that is lost (docs/reliability.md)',
     ('*goodput*', 'monitor_step_*', 'step_deviation_*', '*_step_deviation_metrics', 'heartbeat_*', 'report_*_gcp_*')),
    ('one program with typed shardings, whatever the backend of XLA', ('shardy', 'enable_nnx', 'pure_nnx*', 'context_parallel_*')),
    ('for tests of MaxText', ('reuse_example_batch', 'max_checkify', 'debug', 'debug.*', 'record_internal_nn_metrics')),
    ('the layers are those of the decoder block', ('inhomogeneous_layer_cycle_interval', 'use_untrainable_positional_embedding')),
)  # fmt: skip
# model_name -> preset. Other names have a file of sizes in MaxText, which this translation does not carry.
PRESETS = {
    'mistral-7b': 'mistral-7b-v0.1', 'deepseek2-16b': 'deepseek-v2-lite', 'deepseek2-236b': 'deepseek-v2',
    'deepseek3-671b': 'deepseek-v3', 'kimi-k2-1t': 'kimi-k2', 'llama4-17b-16e': 'llama4-scout-17b-16e',
    'llama4-17b-128e': 'llama4-maverick-17b-128e',
} | {
    name: name for name in (
        'llama2-7b', 'llama2-13b', 'llama2-70b', 'llama3-8b', 'llama3-70b', 'llama3-405b', 'llama3.1-8b', 'llama3.1-70b',
        'llama3.1-405b', 'llama3.3-70b', 'mixtral-8x7b', 'mixtral-8x22b', 'gemma-2b', 'gemma-7b', 'gemma2-2b', 'gemma2-9b',
        'gemma2-27b', 'gemma3-4b', 'gemma3-12b', 'gemma3-27b', 'qwen3-0.6b', 'qwen3-1.7b', 'qwen3-4b', 'qwen3-8b', 'qwen3-14b',
        'qwen3-32b', 'qwen3-30b-a3b', 'qwen3-235b-a22b', 'gpt-oss-20b', 'gpt-oss-120b',
    )
}  # fmt: skip
# decoder_block -> options of the decoder. MaxText's 'default' is a Llama block with attention and feed-forward in parallel.
BLOCKS = {
    'default': {'family': 'llama', 'parallel_block': True, 'shared_norm': True},
    'llama2': {'family': 'llama'},
    'mistral': {'family': 'mistral'},
    'mixtral': {'family': 'mixtral'},
    'gemma': {'family': 'gemma'},
    'gemma2': {'family': 'gemma2'},
    'qwen3': {'family': 'qwen3'},
    'qwen3_moe': {'family': 'qwen3-moe'},
}
SAVE = {
    'full': ('none', ''),
    'minimal': ('dots', ''),
    'minimal_with_context': ('full', ''),
    'save_dot_with_context_except_mlp': ({'q': 'keep', 'k': 'keep', 'v': 'keep', 'attention': 'keep', 'attention_out': 'keep'}, ''),
    'save_dot_except_mlp': ({'q': 'keep', 'k': 'keep', 'v': 'keep', 'attention_out': 'keep'}, ''),
    'save_dot_except_mlpwi': ({'q': 'keep', 'k': 'keep', 'v': 'keep', 'attention_out': 'keep', 'mlp_out': 'keep'}, ''),
    'save_qkv_proj': ({'q': 'keep', 'k': 'keep', 'v': 'keep'}, ''),
    'qkv_proj_offloaded': ({'q': 'offload', 'k': 'offload', 'v': 'offload'}, ''),
    'save_out_proj': ({'attention_out': 'keep'}, ''),
    'minimal_offloaded': (
        {'q': 'offload', 'k': 'offload', 'v': 'offload', 'attention_out': 'offload', 'up': 'offload', 'gate': 'offload', 'mlp_out': 'offload'},
        '',
    ),
    'custom': ('none', 'write the activations to keep or to offload in model.save (docs/numerics.md#activations)'),
}  # fmt: skip
AXES = {
    'data': 'r', 'fsdp': 'd', 'fsdp_transpose': 'd', 'sequence': 'c', 'context': 'c', 'tensor': 't', 'tensor_transpose': 't',
    'tensor_sequence': 't', 'expert': 'e', 'pipeline': 'p',
}  # fmt: skip
