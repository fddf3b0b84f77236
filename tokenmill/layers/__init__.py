"""The building blocks of models: mathematics over flat tokens, blind to requests and batches."""
