"""Where the expert footprints of draft nodes come from, as the loop asks for them."""
