"""Rules by which the server combines updates into one, also where some of them are meant to do harm."""
