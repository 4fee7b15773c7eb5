"""Ask judges and fixed opponents behind any endpoint with OpenAI's API. No policy trains on their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from turnwise.chat import ChatFormat, ChatRenderer
from turnwise.chat.messages import well_formed_texts
from turnwise.inference.common.base import GatedClient, find_policy, reject_scored
from turnwise.inference.common.http import Endpoint, EndpointError
from turnwise.types import (
    ClientCapabilities,
    ContextLengthError,
    FinishReason,
    ModelRequest,
    ModelResponse,
    ParsedCompletion,
)
from turnwise.utils.threads import to_thread

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

TOO_LONG = ("context_length_exceeded", "maximum context length", "maximum model length", "context length is only")
"""Phrases in which servers report that a prompt is too long."""


class OpenAIClient(GatedClient):
    """Completes chats with a server of OpenAI's API: OpenAI's own, a vLLM or Ollama server, a proxy.

    - ``server``: the base URL, or an :class:`~turnwise.inference.common.http.Endpoint` with key and timeout.
    - ``models``: a model's name, which serves the policy ``"default"``, or names of models by policy.
    - ``chat``: sends the request's messages, which an arena sets. Else the client decodes the prompt with ``tokenizer``
      (a Hugging Face one) and sends it to the older completions endpoint, with the texts of the tokens that end a turn
      as stop strings. In both cases a zero-width space breaks up control tokens in the text of messages, so that the
      server can't read them as its own.
    - ``options``: further fields of every request. ``None`` leaves a field out:
      ``{"max_tokens": None, "max_completion_tokens": 2000}``.

    Responses are text, and no policy trains on them. Their token ids come from encoding the text with ``tokenizer``.
    Their log-probabilities, which the server doesn't report, are 0.

    Each request is sent once. A :class:`~turnwise.inference.pool.client.PoolClient` repeats requests that found the
    server busy or unreachable.

    Raises ``ImportError`` if aiohttp is missing.

    Example::

        openai = OpenAIClient(Endpoint("https://api.openai.com/v1", api_key_env="OPENAI_API_KEY"), "gpt-5", tokenizer)
        judge = PoolClient({"openai": openai}, attempts=6)
    """

    def __init__(
        self,
        server: str | Endpoint,
        models: str | Mapping[str, str],
        tokenizer: Any,
        *,
        chat: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.models = {"default": models} if isinstance(models, str) else dict(models)
        if not self.models:
            raise ValueError("models is empty: expected at least one policy with its model's name")
        self.tokenizer = tokenizer
        self._format: ChatFormat = ChatRenderer(tokenizer)
        self._chat, self._options = chat, dict(options or {})
        self._endpoint = server if isinstance(server, Endpoint) else Endpoint(server)
        self._path = f"{self._endpoint.api}/{'chat/completions' if chat else 'completions'}"
        self._where = f"POST {self._endpoint.url}{self._path}"
        super().__init__(self._endpoint.thread)

    @property
    def capabilities(self) -> ClientCapabilities:
        """All policies are fixed, as this client accepts no weights."""
        return ClientCapabilities(fixed_policies=frozenset(self.models))

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raise ``ValueError``, because the server's models can't change."""
        self.version(policy)
        raise ValueError(f"policy={policy!r} is served at {self._endpoint.url}, which takes no weights")

    def version(self, policy: str) -> int:
        """Return 0 for each policy."""
        find_policy(self.models, policy)
        return 0

    async def close(self) -> None:
        """Fail all waiting and running requests, and end the connections. May be called again."""
        self._closed = True
        await to_thread(self._endpoint.close)

    def _check(self, request: ModelRequest) -> None:
        self._body(request)

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        self.version(request.policy)
        sampling, format = request.sampling, self._format
        reject_scored(request, self)
        if not len(request.prompt_token_ids):
            raise ValueError("prompt_token_ids is empty: expected at least one token")
        if self._chat and request.messages is None:
            raise ValueError("the request has no messages: ask through an arena, or make the client with chat=False")
        # The server ends a sequence itself. In a chat it also ends turns itself, with its own template.
        asked = sampling.stop_token_ids
        stops = asked if self._chat else dict.fromkeys((*asked, *format.stop_token_ids))
        ends = set(format.stop_token_ids) if self._chat else {format.tokenizer.eos_token_id}
        texts = [format.tokenizer.decode([token], skip_special_tokens=False) for token in stops if token not in ends]
        body = {
            "model": self.models[request.policy],
            **self._prompt(request),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "top_k": sampling.top_k or None,
            "min_p": sampling.min_p or None,
            "seed": None if sampling.seed is None else sampling.seed & (2**63 - 1),
            "stop": [*sampling.stop, *texts] or None,
            **self._options,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _prompt(self, request: ModelRequest) -> dict[str, Any]:
        messages = None if request.messages is None else self._format.disarmed(request.messages)
        if self._chat:
            return {"messages": messages}
        if messages is request.messages:  # the messages contained no control tokens
            return {"prompt": self._format.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)}
        shown = self._format.arranged(messages or [])
        return {"prompt": self._format.prompt_text(shown)}

    # -- in the endpoint's thread --------------------------------------------------------------------------------------
    async def _one(self, request: ModelRequest) -> ModelResponse:
        try:
            answer = await self._endpoint.ask("POST", self._path, body=self._body(request))
        except EndpointError as error:
            if error.status in (400, 413) and any(words in str(error) for words in TOO_LONG):
                raise ContextLengthError(str(error)) from error
            raise
        text, thought, reason = self._read(answer)
        ids = self._format.text_ids(text)
        if reason == "stop" or not ids:  # a thought that the limit cut leaves no text
            ids += self._format.end_token_ids
        logprobs, versions, prompt = [0.0] * len(ids), [(len(ids), 0)], list(request.prompt_token_ids)
        response = ModelResponse(text, ids, logprobs, reason, versions, prompt, trainable=False)
        if thought:  # the server itself tells the thought from the answer
            cut = reason == "length"
            response.parsed = ParsedCompletion(text, thought, (), cut and not text.strip(), not cut)
        return response

    def _read(self, answer: Any) -> tuple[str, str, FinishReason]:
        """Read text, thought and finish reason from an answer. Errors name the server and the wrong field."""
        field = "choices[0].message.content" if self._chat else "choices[0].text"
        try:
            [choice] = answer["choices"]
            message = choice["message"] if self._chat else {"content": choice["text"]}
            text, reason = well_formed_texts(message["content"]), choice["finish_reason"]
            thoughts = (str(message[key]) for key in ("reasoning_content", "reasoning") if message.get(key))
            thought = well_formed_texts(next(thoughts, ""))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EndpointError(
                f"{self._where} answered {str(answer)[:80]}: expected one choice, with {field} and finish_reason"
            ) from None
        text = "" if text is None and thought else text
        if not isinstance(text, str):
            said = f"{field}={str(text)[:80]} ({str(reason)[:80]})"
            raise EndpointError(f"{self._where} answered {said}: expected text")
        if not isinstance(reason, str) or reason not in FINISHED:
            said = str(reason)[:80]
            raise EndpointError(f"{self._where} ended a completion by {said!r}: expected one of {sorted(FINISHED)}")
        return text, thought, FINISHED[reason]
