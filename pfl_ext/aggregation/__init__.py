"""How the server makes one update of many, some of which may be made to harm it."""
