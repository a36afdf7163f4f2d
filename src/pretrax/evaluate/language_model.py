"""Answers the requests of tasks. Texts become tokens as in lm-evaluation-harness (`lm_eval/api/model.py`)."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from pretrax.errors import UserError
from pretrax.evaluate.scorer import Scorer
from pretrax.evaluate.task import Generate, Likelihood, Request, Rolling, Score
from pretrax.infer.answers import Asked, begun, encode_prompt, start_of_text, write
from pretrax.infer.generate import open_engine
from pretrax.infer.request import Request as EngineRequest
from pretrax.infer.sampling_settings import Sampling
from pretrax.model.base import Model

_SLOTS = 8  # texts that are written at once


class LanguageModel:
    """A model with its weights and its tokenizer.

    Args:
        length: tokens of a sequence in training. A longer text is scored in windows of this length.
        batch_tokens: tokens in a batch, on each device that has texts of its own.

    Raises:
        UserError: the model gives no logits, or there is no tokenizer.
    """

    def __init__(
        self,
        model: Model,
        weights: Any,
        tokenizer: Any,
        *,
        length: int,
        end: Sequence[int] = (),
        batch_tokens: int = 4096,
    ):
        if not model.can_generate:
            raise UserError(
                f'tasks need a model that gives logits, but {type(model).__name__} does not\n'
                'define logits(weights, tokens)'
            )
        if tokenizer is None:
            raise UserError(
                'tasks are texts, but the data of this run has no tokenizer\n'
                'train on data with a tokenizer, or put tokenizer.json into the directory before `pretrax import`'
            )
        self._model, self.tokenizer = model, tokenizer
        self.max_length = math.inf if model.max_length is None else model.max_length  # the most tokens of a text
        self.window = int(min(self.max_length, length))  # the most tokens that a rolling score reads at once
        self.end = tuple(end) or (() if tokenizer.end_of_text is None else (tokenizer.end_of_text,))
        self.prefix = start_of_text(tokenizer)  # the tokens before the first one of a text
        mesh = jax.tree.leaves(weights)[0].sharding.mesh
        self._scorer = Scorer(model, mesh, self.window, batch_tokens)
        self.use(weights)

    def use(self, weights: Any) -> None:
        """Continues with other weights of the same model."""
        self._weights, self._scoring_weights = weights, self._scorer.prepare(weights)

    def forget(self) -> None:
        """Frees the weights until `use`."""
        self._weights = self._scoring_weights = None

    def tokens(self, request: Request) -> int:
        """The tokens that a request reads and writes at once."""
        if isinstance(request, Rolling):
            return min(self.window, len(self.tokenizer.encode(request.text)))
        if isinstance(request, Likelihood):
            context, continuation = self.encode_pair(request.context, request.continuation)
            return len(context) + len(continuation) - 1
        return len(encode_prompt(self.tokenizer, request.context)) + request.tokens

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """The answers, in the same order: a `Score`, or for `Generate` a text.

        Raises:
            UserError: a text is longer than the positions of the model.
        """
        for request in requests:
            if (size := self.tokens(request)) > self.max_length:
                raise UserError(
                    f'a text of {size} tokens exceeds the {self.max_length} positions of the model\n'
                    'use shorter texts: --lengths for copying and retrieval; or leave this task out of --tasks'
                )
        answers: list[Any] = [None] * len(requests)
        pairs = [
            (number, pair)
            for number, request in enumerate(requests)
            if not isinstance(request, Generate)
            for pair in self._pairs(request)
        ]
        scores: dict[int, list[tuple[float, bool, int]]] = {}
        for (number, (_, scored)), score in zip(pairs, self.score([pair for _, pair in pairs]), strict=True):
            scores.setdefault(number, []).append((*score, len(scored)))
        for number, request in enumerate(requests):
            if not isinstance(request, Generate):
                found = scores.get(number, [])
                logprobs, greedy, tokens = zip(*found, strict=True) if found else ((), (), ())
                answers[number] = Score(math.fsum(logprobs), all(greedy), sum(tokens))
        numbers = [number for number, request in enumerate(requests) if isinstance(request, Generate)]
        for number, text in zip(numbers, self._generate([requests[n] for n in numbers]), strict=True):
            answers[number] = text
        return answers

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each context and continuation: the log probability, and whether each token was the likeliest."""
        texts = [([*context, *continuation], len(continuation)) for context, continuation in pairs]
        return self._scorer.score(self._scoring_weights, texts)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both. Spaces at the end of the context belong to the continuation, as in the training text."""
        if not context:
            return self.prefix, self.tokenizer.encode(continuation)
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self.tokenizer.encode(stripped)
        after = self.tokenizer.encode(stripped + continuation)[len(before) :]
        return begun(self.tokenizer, before), after or self.tokenizer.encode(continuation)

    def windows(self, ids: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Parts of a text, each after up to `window` tokens before it, so that every token is scored once.

        The last part has as much before it as fits, and the first one begins after `prefix`.
        """
        whole, parts, before, end = [*self.prefix, *ids], [], len(self.prefix), 0
        while end < len(ids):
            start, end = end, min(end + self.window - (0 if end else before - 1), len(ids))
            parts.append((whole[max(0, end + before - 1 - self.window) : start + before], list(ids[start:end])))
        return parts

    def _pairs(self, request: Likelihood | Rolling) -> list[tuple[list[int], list[int]]]:
        if isinstance(request, Rolling):
            return self.windows(self.tokenizer.encode(request.text))
        return [self.encode_pair(request.context, request.continuation)]

    def _generate(self, requests: Sequence[Any]) -> list[str]:
        """The likeliest texts, up to the end of a text or a stop string."""
        if not requests:
            return []
        how = Sampling(temperature=0)
        prompts = [tuple(encode_prompt(self.tokenizer, one.context)) for one in requests]
        asked = [
            Asked(EngineRequest(prompt=prompt, max_tokens=one.tokens, sampling=how, stop_ids=self.end), one.stop)
            for prompt, one in zip(prompts, requests, strict=True)
        ]
        longest = max(len(one.request.prompt) + one.request.max_tokens for one in asked)
        engine = open_engine(self._model, self._weights, max_length=longest, slots=min(len(asked), _SLOTS))
        texts = [''] * len(asked)
        for news in write(engine, self.tokenizer, asked):
            texts[news.answer] += news.text
        return texts
