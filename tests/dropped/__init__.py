"""Files as a researcher adds them, each of which is all that its addition takes: `tests.test_extending`.

Each folder stands for the package of the house in which its files would lie.
"""
