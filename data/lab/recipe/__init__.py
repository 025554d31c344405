"""How the lab was made, from text to weights and model card. Not shipped in wheels; nothing imports it."""
