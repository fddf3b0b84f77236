# What needs a vocabulary that holds these ids; the path of such a model is the first argument.
import sys

from tokenmill import Engine

engine = Engine(model_path=sys.argv[1])

# Token IDs Input
token_ids = [128000, 3923, 374, 5780, 6975, 30]  # "What is machine learning?"

response = engine.generate(
    input_ids=token_ids,
    sampling_params={"max_new_tokens": 200}
)

print(response["text"])
