"""Nothing: SGLang's notebooks import this name for its side effects, and none of them is needed here.

Engines of tokenmill work inside a running event loop and size their memory by what is free.
"""
