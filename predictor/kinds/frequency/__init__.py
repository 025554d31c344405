"""The most used experts of each layer, whatever the token, counted from traces."""
