from tokenmill import Engine

# With Configuration, on one device
engine = Engine(
    # Model
    model_path="tiny",
    tokenizer_path=None,  # defaults to model_path
    trust_remote_code=True,
    
    # Parallelism
    tp_size=1,
    dp_size=1,
    pp_size=1,
    
    # Memory
    mem_fraction_static=0.85,
    max_total_tokens=8192,
    chunked_prefill_size=8192,
    
    # Performance
    cuda_graph_max_bs=256,
    disable_radix_cache=False,
    
    # Logging
    log_level="info",
    log_requests=False,

    # for "Priority Scheduling"
    enable_priority_scheduling=True
)

# Logprobs and Token Information
response = engine.generate(
    prompt="The capital of France is",
    sampling_params={"max_new_tokens": 5},
    return_logprob=True,
    top_logprobs_num=3
)

# Access logprobs
for token_logprob in response["meta_info"]["output_token_logprobs"]:
    print(f"Token logprob: {token_logprob}")

# Access top logprobs for each position
for top_logprobs in response["meta_info"]["output_top_logprobs"]:
    print(f"Top 3 alternatives: {top_logprobs}")

# Flush Cache
engine.flush_cache()

# Freeze Garbage Collection
# Warm up the engine
for _ in range(10):
    engine.generate(prompt="warmup", sampling_params={"max_new_tokens": 10})

# Freeze GC
engine.freeze_gc()

# Custom Logit Processor: the name is one that the program has given to a function of its own
from tokenmill.logit_processors import register_logit_processor

allowed = engine.get_tokenizer().encode("7")

def my_processor_function(logits, custom_param_list):
    forbidden = logits.new_full(logits.shape, float("-inf"))
    forbidden[:, allowed] = 0
    return logits + forbidden

register_logit_processor("my_processor_function", my_processor_function)

response = engine.generate(
    prompt="Generate a number",
    custom_logit_processor="my_processor_function",
    sampling_params={"max_new_tokens": 10}
)

print(f"Number: {response['text']}")

# Hidden States
response = engine.generate(
    prompt="Hello",
    return_hidden_states=True,
    sampling_params={"max_new_tokens": 5}
)

hidden_states = response["meta_info"]["hidden_states"]

print(f"Hidden states: {len(hidden_states)} entries, {response['meta_info']['completion_tokens']} tokens")

# Priority Scheduling
response = engine.generate(
    prompt="High priority request",
    priority=10,  # Higher values = higher priority
    sampling_params={"max_new_tokens": 50}
)

# Get Server Info
info = engine.get_server_info()
print(f"Model: {info['model_path']}")
print(f"TP size: {info['tp_size']}")
print(f"Max tokens: {info['max_total_tokens']}")

# Start Profiling
engine.start_profile(
    profile_name="my_profile",
    profile_dir="./profiles"
)

# Run some requests (100 there, which take half a minute)
for i in range(1):
    engine.generate(prompt=f"Request {i}", sampling_params={"max_new_tokens": 50})

engine.stop_profile()

engine.shutdown()
