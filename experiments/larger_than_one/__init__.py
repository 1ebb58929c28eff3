"""A model that is larger than one worker."""
