"""The shipped lab: weights, prompts, traces and trees as data; `build` and `recipe` remake them."""
