from hypothesis import settings

# A busy machine may stall any single example; pytest's own timeout still bounds a test.
settings.register_profile("objective", deadline=None)
settings.load_profile("objective")
