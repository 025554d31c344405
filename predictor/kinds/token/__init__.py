"""The experts most often used for the same token id, counted from traces."""
