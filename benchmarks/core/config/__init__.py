"""The parts of each benchmark's config.py: YAML files and a command line become a checked, frozen config.

Values come from, weakest first: the defaults of the fields, the benchmark's protocol, the YAML file, the
command line. A *recipe* is a set of switches that counts as if its fields stood first at the place, YAML or
command line, where it is named (several are joined by ``+``); a *scale*, which is a YAML file, likewise.

What a run is made of is the *resolved* config: fields without effect (`benchmarks.core.config.effects`) stand
at their defaults, and values that follow from others (FedProx's mu, the hash of the weights file) are filled
in. A value that somebody gives and that would not stand in the resolved config is refused.
"""
