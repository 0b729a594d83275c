"""What server and clients exchange, one file for each algorithm.

`algorithm` is what each of them offers and how it is found by its name; `on_pfl` and `rules` are for those on
pfl's loop, `clients` for those with a loop of their own; `optimizers` and `user_vectors` are shared.
"""
