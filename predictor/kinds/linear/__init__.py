"""A trained linear probe on the token alone."""
