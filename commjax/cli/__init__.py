"""The command `commjax`: prune a language model, or measure its perplexity."""
