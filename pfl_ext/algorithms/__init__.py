"""What server and clients exchange, one file for each algorithm.

`algorithm` has their interface and their registry. `on_pfl` and `rules` are for algorithms on pfl's loop,
`clients` for those with a loop of their own. `optimizers` and `user_vectors` are shared.
"""
