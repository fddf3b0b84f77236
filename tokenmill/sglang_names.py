"""Every name of SGLang's constructor that is not a field of ours, as tables; `arguments.py` reads them."""

from __future__ import annotations

# Three tables hold every name of SGLang's constructor that is not a field of ours. A name stands with its
# default there, or with a tuple of defaults where releases differ; these and None ask for nothing.

# One line per name would bury the tables.
# fmt: off

# Names of the command line for the same argument.
SPELLINGS = {
    "model": "model_path", "tp": "tp_size", "tensor_parallel_size": "tp_size", "dp": "dp_size",
    "data_parallel_size": "dp_size", "pp": "pp_size", "pipeline_parallel_size": "pp_size",
    "ep": "ep_size", "expert_parallel_size": "ep_size",
}

# Flags that several values may follow.
LISTS = frozenset({
    "cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_bs_prefill", "piecewise_cuda_graph_tokens",
    "tokenizer_metrics_allowed_custom_labels", "bucket_time_to_first_token", "bucket_inter_token_latency",
    "bucket_e2e_request_latency", "prompt_tokens_buckets", "generation_tokens_buckets", "log_requests_target",
    "debug_tensor_dump_layers", "gc_threshold", "numa_node", "encoder_urls", "custom_weight_loader",
    "lora_paths", "lora_target_modules", "remote_instance_weight_loader_send_weights_group_ports",
})

IGNORED: dict[str, dict[str, object]] = {
    "it configures an HTTP server, and this engine is a library": dict(
        host="127.0.0.1", port=30000, fastapi_root_path="", grpc_mode=False, skip_server_warmup=False,
        warmups=None, api_key=None, file_storage_path="sglang_storage", log_level_http=None,
        completion_template=None, reasoning_parser=None, tool_call_parser=None,
        tool_server=None, enable_cache_report=False, sampling_defaults="model",
        tokenizer_metrics_custom_labels_header="x-custom-labels",
        tokenizer_metrics_allowed_custom_labels=None),
    "the engine chooses tokenizer and detokenizer settings itself and works in batches": dict(
        tokenizer_mode="auto", tokenizer_backend="huggingface", tokenizer_worker_num=1,
        detokenizer_worker_num=1, enable_tokenizer_batch_encode=False, disable_tokenizer_batch_decode=False,
        enable_dynamic_batch_tokenizer=False, dynamic_batch_tokenizer_batch_size=32,
        dynamic_batch_tokenizer_batch_timeout=0.002, batch_notify_size=16),
    "the engine decides alone what it captures and compiles": dict(
        cuda_graph_max_bs=None, cuda_graph_bs=None, cuda_graph_max_bs_decode=None, cuda_graph_bs_decode=None,
        cuda_graph_max_bs_prefill=None, cuda_graph_bs_prefill=None,
        disable_prefill_cuda_graph=False, disable_cuda_graph_padding=False,
        enable_profile_cuda_graph=False, enable_cudagraph_gc=False, enable_torch_compile=False,
        enable_torch_compile_debug_mode=False, torch_compile_max_bs=32, enable_piecewise_cuda_graph=False,
        piecewise_cuda_graph_max_tokens=(None, 8192), piecewise_cuda_graph_tokens=None,
        piecewise_cuda_graph_compiler="eager", disable_piecewise_cuda_graph=False,
        enable_layerwise_nvtx_marker=False),
    "the engine uses kernels of its own": dict(
        decode_attention_backend=None, prefill_attention_backend=None, mm_attention_backend=None,
        sampling_backend=("flashinfer", "pytorch"), fp8_gemm_runner_backend="auto",
        nsa_prefill_backend="flashmla_sparse", nsa_decode_backend="fa3",
        dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="fa3", disable_flashinfer_autotune=False,
        flashinfer_mla_disable_ragged=False, triton_attention_reduce_in_fp32=False,
        triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None,
        enable_fused_qk_norm_rope=False, disable_chunked_prefix_cache=False, model_impl=("auto", "sglang"),
        fp4_gemm_runner_backend="auto", disable_flashinfer=False, disable_flashinfer_sampling=False,
        enable_flashinfer_mla=False, enable_flashmla=False, disable_mla=False),
    "the scheduler mixes prefill and decode, and admits by real use of pages": dict(
        max_prefill_tokens=16384, prefill_max_requests=None,
        schedule_conservativeness=1.0, enable_mixed_chunk=False, num_continuous_decode_steps=1,
        enable_dynamic_chunking=False, scheduler_recv_interval=1, num_reserved_decode_tokens=512,
        radix_eviction_policy="lru", retraction_policy="length", hybrid_kvcache_ratio=None,
        swa_full_tokens_ratio=0.8, disable_hybrid_swa_memory=False, prefill_only_disable_kv_cache=False,
        sleep_on_idle=False, enable_overlap_schedule=False),
    "no switch is needed; a request that uses the feature says whether it is there": dict(
        disable_penalizer=False,
        enable_custom_logit_processor=False, enable_return_hidden_states=False,
        return_hidden_states_mode=None, enable_return_routed_experts=False, enable_streaming_session=False,
        enable_memory_saver=False, enable_weights_cpu_backup=False, enable_draft_weights_cpu_backup=False),
    "compiled grammars are kept in memory, and reasoning is not told apart yet": dict(
        disable_outlines_disk_cache=False, disable_disk_cache=False, disable_jump_forward=False,
        disable_regex_jump_forward=False, enable_strict_thinking=False),
    "weights stay on the device and are read by memory map": dict(
        cpu_offload_gb=0, offload_group_size=-1, offload_num_in_group=1, offload_prefetch_step=1,
        offload_mode="cpu", weight_loader_disable_mmap=False, delete_ckpt_after_loading=False),
    "keys and values have no second tier yet": dict(
        enable_hierarchical_cache=False, hicache_ratio=2.0, hicache_size=0,
        hicache_write_policy="write_through", hicache_io_backend="kernel",
        hicache_mem_layout=("layer_first", "page_first"), hicache_storage_backend=None,
        hicache_storage_prefetch_policy=("best_effort", "timeout"), hicache_storage_backend_extra_config=None,
        enable_lmcache=False),
    "it matters only with several GPUs or machines": dict(
        gpu_id_step=1, nccl_port=None, dist_init_addr=None, dist_timeout=None, node_rank=0,
        load_balance_method=("round_robin", "auto"), prefill_round_robin_balance=False,
        disable_custom_all_reduce=False, pp_max_micro_batch_size=None, pp_async_batch_depth=0,
        moe_dense_tp_size=None, enable_dp_attention=False, enable_dp_lm_head=False, enable_p2p_check=False,
        numa_node=None, enable_nccl_nvls=False, enable_symm_mem=False, enable_torch_symm_mem=False,
        enable_mscclpp=False, enable_flashinfer_allreduce_fusion=False, enable_attn_tp_input_scattered=False,
        enable_nsa_prefill_context_parallel=False, nsa_prefill_cp_mode="in-seq-split",
        enable_dsa_prefill_context_parallel=False, dsa_prefill_cp_mode="in-seq-split",
        enable_two_batch_overlap=False, enable_single_batch_overlap=False,
        tbo_token_distribution_threshold=0.48),
    "it matters only for mixture-of-experts models": dict(
        enable_ep_moe=False, enable_deepep_moe=False, moe_a2a_backend="none", moe_runner_backend="auto",
        flashinfer_mxfp4_moe_precision="default",
        deepep_mode="auto", deepep_config=None, ep_num_redundant_experts=0, ep_dispatch_algorithm=None,
        init_expert_location="trivial", enable_eplb=False, eplb_algorithm="auto",
        eplb_rebalance_num_iterations=1000, eplb_rebalance_layers_per_chunk=None,
        eplb_min_rebalancing_utilization_threshold=1.0, expert_distribution_recorder_mode=None,
        expert_distribution_recorder_buffer_size=(None, 1000), enable_expert_distribution_metrics=False,
        elastic_ep_backend=None, mooncake_ib_device=None, disable_shared_experts_fusion=False,
        disable_flashinfer_cutlass_moe_fp4_allgather=False, kt_weight_path=None, kt_method=(None, "AMXINT4"),
        kt_cpuinfer=None, kt_threadpool_count=(None, 2), kt_num_gpu_experts=None,
        kt_max_deferred_experts_per_token=None),
    "it matters only for models with a recurrent state": dict(
        max_mamba_cache_size=None, mamba_ssm_dtype=(None, "float32"), mamba_full_memory_ratio=0.9,
        mamba_scheduler_strategy="no_buffer", mamba_radix_cache_strategy="no_buffer",
        mamba_track_interval=256),
    "it matters only with LoRA adapters, which are not supported yet": dict(
        max_lora_rank=None, lora_target_modules=None, max_loras_per_batch=8, max_loaded_loras=None,
        lora_eviction_policy="lru", lora_backend="csgmv", max_lora_chunk_size=16),
    "it matters only with speculative decoding, which is not supported yet": dict(
        speculative_draft_model_revision=None, speculative_draft_load_format=None, speculative_num_steps=None,
        speculative_eagle_topk=None, speculative_num_draft_tokens=None,
        speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0,
        speculative_draft_model_quantization=None, speculative_token_map=None,
        speculative_attention_mode="prefill", speculative_draft_attention_backend=None,
        speculative_moe_runner_backend=(None, "auto"), speculative_moe_a2a_backend=None,
        enable_multi_layer_eagle=False, speculative_ngram_min_match_window_size=1,
        speculative_ngram_max_match_window_size=12, speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=10, speculative_ngram_match_type="BFS",
        speculative_ngram_branch_length=18, speculative_ngram_max_trie_depth=18,
        speculative_ngram_capacity=10_000_000),
    "it matters only for models that see or hear, which are not supported yet": dict(
        limit_mm_data_per_request=None, mm_process_config={}, disable_fast_image_processor=False,
        keep_mm_feature_on_device=False, mm_max_concurrent_calls=32, mm_per_request_timeout=10.0,
        enable_broadcast_mm_inputs_process=False, enable_prefix_mm_cache=False, mm_enable_dp_encoder=False,
        enable_precise_embedding_interpolation=False, encoder_urls=[],
        encoder_transfer_backend=("zmq_to_scheduler", "auto")),
    "the engine logs through the 'tokenmill' logger and keeps no such records": dict(
        log_requests_format="text", log_requests_target=None, crash_dump_folder=None, show_time_cost=False,
        enable_metrics_for_all_schedulers=False, bucket_time_to_first_token=None,
        bucket_inter_token_latency=None, bucket_e2e_request_latency=None, collect_tokens_histogram=False,
        prompt_tokens_buckets=None, generation_tokens_buckets=None, gc_warning_threshold_secs=0.0,
        gc_threshold=None, decode_log_interval=40, enable_request_time_stats_logging=False,
        kv_events_config=None, enable_trace=False, otlp_traces_endpoint="localhost:4317",
        export_metrics_to_file=False, export_metrics_to_file_dir=None, enable_nan_detection=False,
        disable_nan_detection=False,
        debug_tensor_dump_output_folder=None, debug_tensor_dump_layers=None),
    "no signal handler is needed: a failure is an exception, and one watchdog ends a stall": dict(
        soft_watchdog_timeout=(None, 300), custom_sigquit_handler=None),
    "it matters only when prefill and decode run in different engines": dict(
        disaggregation_transfer_backend="mooncake", disaggregation_bootstrap_port=8998,
        disaggregation_decode_tp=None, disaggregation_decode_dp=None, disaggregation_prefill_pp=1,
        disaggregation_ib_device=None, disaggregation_decode_enable_offload_kvcache=False,
        disaggregation_decode_enable_fake_auto=False, disaggregation_decode_polling_interval=1,
        enable_pdmux=False, pdmux_config_path=None, sm_group_num=8),
}

REFUSED: dict[str, dict[str, object]] = {
    "several GPUs or machines": dict(tp_size=1, dp_size=1, pp_size=1, ep_size=1, nnodes=1),
    "quantized weights": dict(
        quantization=None, torchao_config="", modelopt_quant=None, modelopt_checkpoint_restore_path=None,
        modelopt_checkpoint_save_path=None, modelopt_export_path=None, quantize_and_serve=False,
        rl_quant_profile=None),
    "another precision than dtype": dict(
        kv_cache_dtype="auto", quantization_param_path=None, enable_fp32_lm_head=False),
    "embeddings": dict(is_embedding=False),
    "scoring of several items at once": dict(enable_mis=False, multi_item_scoring_delimiter=None),
    "models that see or hear": dict(enable_multimodal=False, encoder_only=False, language_only=False),
    "LoRA adapters": dict(enable_lora=False, lora_paths=[]),
    "speculative decoding": dict(speculative_algorithm=None, speculative_draft_model_path=None),
    "diffusion decoding": dict(dllm_algorithm=None, dllm_algorithm_config=None),
    "sparse attention": dict(
        enable_double_sparsity=False, hierarchical_sparse_attention_extra_config=None,
        ds_channel_config_path=None, ds_heavy_channel_num=32, ds_heavy_token_num=256,
        ds_heavy_channel_type="qk", ds_sparse_decode_threshold=4096),
    "prefill and decode in different engines": dict(disaggregation_mode="null"),
    "special ways of loading": dict(
        model_loader_extra_config=("{}", {}), custom_weight_loader=[], model_checksum=None,
        decrypted_config_file=None, decrypted_draft_config_file=None,
        checkpoint_engine_wait_weights_before_ready=False,
        remote_instance_weight_loader_seed_instance_ip=None,
        remote_instance_weight_loader_seed_instance_service_port=None,
        remote_instance_weight_loader_send_weights_group_ports=None,
        remote_instance_weight_loader_backend="nccl",
        remote_instance_weight_loader_start_seed_via_transfer_engine=False),
    "changing a model from outside": dict(
        forward_hooks=None, rl_on_policy_target=None, debug_tensor_dump_input_file=None,
        debug_tensor_dump_inject=False),
}

# What other engines call our fields; only used to suggest the right name.
FOREIGN_NAMES = {
    "tokenizer": "tokenizer_path", "max_model_len": "context_length", "seed": "random_seed",
    "gpu_memory_utilization": "mem_fraction_static", "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size", "enable_prefix_caching": "disable_radix_cache",
}

# Words that mean one of our choices, and words for which we take the nearest choice with a warning.
DTYPES = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
LOG_LEVELS = {"warn": "warning", "fatal": "critical"}
POLICIES = {
    "dfs-weight": "lpm", "priority": "fcfs", "routing-key": "fcfs", "hrrn": "fcfs",
    "shortest-prefill-first": "fcfs"}
GRAMMAR_BACKENDS = {"outlines": "llguidance"}
ATTENTION_BACKENDS = dict.fromkeys((
    "fa3", "fa4", "flashinfer", "flex_attention", "trtllm_mha", "trtllm_mla", "flashmla", "cutlass_mla",
    "cutedsl_mla", "aiter", "wave", "dual_chunk_flash_attn", "nsa", "dsa", "ascend", "intel_amx",
    "intel_xpu"), "auto")
# fmt: on
