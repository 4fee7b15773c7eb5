"""Answer requests from a script, for tests and for examples that need no model."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.tokenizers import own_copies
from turnwise.inference.common.base import ClientBase, find_policy, stop_check
from turnwise.types import ContextLengthError, FinishReason, Messages, ModelError, ModelRequest, ModelResponse
from turnwise.types.prompts import prompt_tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted completion: ``text``, or exact ``token_ids``, with ``logprobs`` (0.0 each unless given).

    Text is encoded and gets the end-of-sequence token. ``finish_reason`` overrides the reason that follows from the
    tokens. ``delay`` waits that many seconds first; ``float("inf")`` hangs until the caller cancels.

    Example: ``Reply("4")``, ``Reply(token_ids=(20, 2), logprobs=(-0.1, -0.01))``, ``Reply("4", delay=float("inf"))``
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(
                f"Reply(text={self.text!r}, token_ids={self.token_ids!r}): expected exactly one of the two"
            )
        if self.logprobs is not None and self.token_ids is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"logprobs={self.logprobs!r}: expected one for each of {len(self.token_ids)} token ids")


ScriptLine = Reply | str | Sequence[int] | BaseException
"""A reply, its text, its token ids, or an exception to raise."""

Script = (
    Sequence[ScriptLine]
    | Mapping[str | tuple[int, ...], ScriptLine]
    | Callable[[ModelRequest], ScriptLine | Awaitable[ScriptLine]]
)


class ByteTokenizer:
    """Encodes text as UTF-8 bytes, token ids 0 to 255, with 256 for end of sequence. Needs no file."""

    eos_token_id: int | None = 256

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The bytes of ``text``; there are no special tokens to add."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``: ``<eos>`` for the end of sequence unless skipped, U+FFFD for other invalid ids."""
        token_ids = list(token_ids)
        if max(token_ids, default=0) < 256:
            return bytes(token_ids).decode(errors="replace")
        end = b"" if skip_special_tokens else b"<eos>"
        parts = (bytes([token]) if token < 256 else end if token == 256 else b"\xff" for token in token_ids)
        return b"".join(parts).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        """The name of a token: ``<0x41>`` for a byte, as tokenizers with byte fallback write it."""
        return f"<0x{token:02X}>" if token < 256 else "<eos>"

    def apply_chat_template(
        self, conversation: Messages, tokenize: bool = True, add_generation_prompt: bool = True, **kwargs: Any
    ) -> Any:
        """Render a line for each tool, ``role: content`` lines, then ``assistant: ``.

        Returns ids, a string, or ``{"input_ids": ids}``.
        """
        options = {"return_dict", "enable_thinking", "tools"}
        if unknown := kwargs.keys() - options:
            raise TypeError(f"apply_chat_template got {sorted(unknown)}: expected only {sorted(options)}")
        text = ""
        for tool in kwargs.get("tools") or ():
            text += f"tools: {json.dumps(tool)}\n"
        for message in conversation:
            text += f"{message['role']}: {message['content']}"
            for call in (message["tool_calls"] or ()) if "tool_calls" in message else ():
                named = {name: call["function"][name] for name in ("name", "arguments")}
                text += f"<tool_call>{json.dumps(named)}</tool_call>"
            text += "\n"
        text += "assistant: " if add_generation_prompt else ""
        if not tokenize:
            return text
        return {"input_ids": self.encode(text)} if kwargs.get("return_dict") else self.encode(text)


class ScriptedClient(ClientBase):
    """Answers from ``script`` and keeps every request in ``calls``.

    ``script`` is a sequence (one line per request, in order), a mapping, or a function of the request, sync or async.
    A mapping's key is a part of the prompt's text, or the prompt's token ids; the first key that matches gives the
    line. A line is a :class:`Reply`, a text, token ids, or an exception, which the client raises.

    ``tokenizer`` is that of all policies, or each policy's by name. ``versions`` names the policies and their weight
    versions. A request's ``max_tokens`` and stop tokens cut the reply as they would cut a model's. A script without a
    line for a request raises ``ModelError``.

    Example: ``ScriptedClient({"2 + 2": "4", "capital of France": "Paris"})``
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Any = None,
        versions: Mapping[str, int] | None = None,
        context_length: int | None = None,
    ) -> None:
        if isinstance(script, str):
            raise TypeError(f"script={script!r}: expected a sequence of replies, a mapping or a function, not one text")
        self.script = script
        self.tokenizer: Any = ByteTokenizer() if tokenizer is None else tokenizer
        self._tokenizers = own_copies(self.tokenizer)  # type: ignore[arg-type]  # or one without the protocol
        self.context_length = context_length
        self.calls: list[ModelRequest] = []
        self.loads: list[tuple[str, list[str], int]] = []
        self._versions = dict(versions or {"default": 0})
        self._played = 0
        self._resumed: asyncio.Event | None = None
        self._closed = False

    async def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Return one response per request, in order. Raises ``ValueError`` for an unknown policy or an empty prompt."""
        if self._closed:
            raise ModelError("the client is closed")
        for request in requests:
            self._check(request)
        if self._resumed is not None:
            await self._resumed.wait()
        self.calls.extend(requests)
        lines = [self._line(request) for request in requests]
        return list(await asyncio.gather(*(self._answer(*pair) for pair in zip(requests, lines, strict=True))))

    def load_weights(self, policy: str, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Record the names in ``loads`` and set the version."""
        self.version(policy)
        self.loads.append((policy, [name for name, _ in weights], version))
        self._versions[policy] = version

    def version(self, policy: str) -> int:
        """The version with which ``policy`` answers now."""
        return find_policy(self._versions, policy)

    async def pause(self) -> None:
        """Hold back requests until :meth:`resume`."""
        self._resumed = self._resumed or asyncio.Event()

    async def resume(self) -> None:
        """Let held requests run."""
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    async def close(self) -> None:
        """Refuse further requests. May be called again."""
        self._closed = True
        await self.resume()

    def _check(self, request: ModelRequest) -> None:
        self.version(request.policy)
        if len(prompt_tokens(request)) == 0:
            raise ValueError("prompt_token_ids is empty: expected at least one token")
        if self.context_length is not None and len(prompt_tokens(request)) + 1 > self.context_length:
            raise ContextLengthError(
                f"prompt of {len(prompt_tokens(request))} tokens leaves no room in a context of {self.context_length}"
            )

    def _line(self, request: ModelRequest) -> ScriptLine | Awaitable[ScriptLine]:
        if callable(self.script):
            return self.script(request)
        if isinstance(self.script, Mapping):
            prompt = tuple(prompt_tokens(request))
            text = self._tokenizers[request.policy].decode(list(prompt), skip_special_tokens=False)
            for key, line in self.script.items():
                if key in text if isinstance(key, str) else tuple(key) == prompt:
                    return line
            return ModelError(f"the script has no line for the prompt {text!r}")
        self._played += 1
        if self._played > len(self.script):
            return ModelError(f"the script has {len(self.script)} lines and this is request {self._played}")
        return self.script[self._played - 1]

    async def _answer(self, request: ModelRequest, line: ScriptLine | Awaitable[ScriptLine]) -> ModelResponse:
        if inspect.isawaitable(line):
            line = await line
        if isinstance(line, BaseException):
            raise line
        reply = line if isinstance(line, Reply) else Reply(line) if isinstance(line, str) else Reply(None, tuple(line))
        if reply.delay == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(reply.delay)
        return self._response(request, reply)

    def _response(self, request: ModelRequest, reply: Reply) -> ModelResponse:
        tokenizer = self._tokenizers[request.policy]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids = list(reply.token_ids or ())
        if reply.text is not None:
            ids = list(tokenizer.encode(reply.text, add_special_tokens=False)) + end
        limit = request.sampling.max_tokens
        if self.context_length is not None:
            limit = min(limit, self.context_length - len(prompt_tokens(request)))
        stops = {*end, *request.sampling.stop_token_ids}
        stopped = stop_check(request.sampling, tokenizer, prompt_tokens(request)) or (lambda ids: False)
        stop = next(
            (index for index, token in enumerate(ids[:limit]) if token in stops or stopped(ids[: index + 1])), None
        )
        ids = ids[:limit] if stop is None else ids[: stop + 1]
        logprobs = [0.0] * len(ids) if reply.logprobs is None else list(reply.logprobs[: len(ids)])
        return ModelResponse(
            text=tokenizer.decode(ids, skip_special_tokens=True),
            completion_token_ids=ids,
            logprobs=logprobs,
            finish_reason=reply.finish_reason or ("length" if stop is None else "stop"),
            policy_versions=[(len(ids), self._versions[request.policy])] if ids else [],
            prompt_token_ids=prompt_tokens(request),
        )
