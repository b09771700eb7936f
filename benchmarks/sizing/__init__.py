"""How much of everything a run needs, from the bytes of real messages and from formulas. Pure functions throughout."""
