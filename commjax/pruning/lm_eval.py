"""A model as lm-eval's `TemplateLM`, for lm-eval's own tasks (`commjax.pruning.zeroshot` does without lm-eval)."""

from typing import Any

from commjax.llm.base import Model, Params
from commjax.llm.tokens import Tokenizer
from commjax.pruning.zeroshot import Likelihood, likelihoods


def template_lm(model: Model, params: Params, tokenizer: Tokenizer, *, eot: int = 2, batch_size: int = 8) -> Any:
    """Wrap a model as lm-eval's `TemplateLM`, without torch.

        lm_eval.simple_evaluate(model=template_lm(...), tasks=[...])

    It computes likelihoods only; a task that generates text is refused.

    Args:
        model: The model.
        params: Its parameters.
        tokenizer: Its tokenizer.
        eot: Token that precedes a text if the tokenizer has no first token of its own.
        batch_size: Pairs per batch.

    Returns:
        An instance of a subclass of `lm_eval.api.model.TemplateLM`.
    """
    try:
        from lm_eval import utils
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ImportError("lm-eval is not installed: pip install 'commjax[eval]'") from error
    first = tokenizer.encode("")

    class Face(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return eot

        @property
        def prefix_token_id(self) -> int:
            return first[0] if first else eot

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            ids = tokenizer.encode(string)
            return ids[len(first) :] if add_special_tokens is False else ids

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[Likelihood]:
            return likelihoods(model, params, [(a, b) for _, a, b in requests], batch_size=batch_size)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            def log_likelihood(text: str) -> float:
                ids = self.tok_encode(text, add_special_tokens=False)
                length = model.config.max_position_embeddings
                windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, length, 1)
                pairs = [utils.make_disjoint_window(window) for window in windows]
                return sum(log for log, _ in likelihoods(model, params, pairs, batch_size=batch_size))

            return [log_likelihood(request.args[0]) for request in requests]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError("commjax gives likelihoods; allowed: tasks that compare them, or rolling ones")

    return Face()
