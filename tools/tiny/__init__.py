"""The recipe of the tiny model: its world, tokenizer, network, training and evaluation.

The package only ships the result (`tokenmill/tiny`); it never imports this folder.
"""
