"""Drafters: what guesses the tokens that the target then takes or refuses."""
