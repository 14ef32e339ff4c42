"""The command `commjax`: prune a language model, measure its perplexity."""
