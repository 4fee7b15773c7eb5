"""A chat template that a config names: the shipped one shows tools, chats go on; what doesn't fit is refused."""

from __future__ import annotations

import json

import pytest

from turnwise.chat.formats import ChatFormat
from turnwise.chat.templates import EXAMPLE_TOOL, template_text, use_template
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.config.policies import PolicyConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import check_models

from .families import chat_tokenizer

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "x<y"}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "here", "tool_call_id": "call_0"},
    {"role": "tool", "content": "there", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "Here."},
]


@pytest.fixture
def tokenizer():
    made = chat_tokenizer("template")
    use_template(made, "chatml")
    return made


def test_the_shipped_template_is_chatml_with_tools(tokenizer):
    text = template_text(tokenizer, CHAT, tools=[EXAMPLE_TOOL])
    shown, rest = text.split("<|im_end|>\n", 1)
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nTools, ") and json.dumps(EXAMPLE_TOOL) in shown
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x<y"}}\n</tool_call>'
    results = [f"<|im_start|>user\n<tool_response>\n{one}\n</tool_response><|im_end|>\n" for one in ("here", "there")]
    assert rest == (
        f"<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\nI look.\n{call}\n{call}<|im_end|>\n"
        f"{''.join(results)}<|im_start|>assistant\nHere.<|im_end|>\n<|im_start|>assistant\n"
    )
    alone = template_text(tokenizer, CHAT[1:2], tools=[EXAMPLE_TOOL])
    assert alone.startswith("<|im_start|>system\nTools, ") and alone.count("<|im_start|>") == 3
    assert "Tools" not in template_text(tokenizer, CHAT[:2])


def test_calls_are_read_and_a_chat_goes_on_from_what_was_sampled(tokenizer):
    chat = ChatFormat(tokenizer)
    chat.check_tools([EXAMPLE_TOOL])
    prompt = chat.prompt_ids(CHAT[:2], [EXAMPLE_TOOL])
    written = tokenizer('Hm.\n<tool_call>{"name": "look",  "arguments": {"at": "x"}}</tool_call><|im_end|>').input_ids
    parsed = chat.parse(written, [EXAMPLE_TOOL])
    assert [(call.name, call.arguments) for call in parsed.calls] == [("look", {"at": "x"})]
    longer = chat.extend(prompt, written, [{"role": "tool", "content": "here"}], [EXAMPLE_TOOL])
    assert list(longer[: len(prompt) + len(written)]) == [*prompt, *written]


def test_each_policy_has_its_own_template(tokenizer, tmp_path):
    for part in (tokenizer, build_model(tokenizer, num_hidden_layers=1)):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "short.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    path = str(tmp_path / "model")
    named = {"a": None, "b": "chatml", "c": str(tmp_path / "short.jinja")}
    found = check_models({name: PolicyConfig(path=path, chat_template=one) for name, one in named.items()}, tiny=None)
    assert found["a"] is found["b"] is not found["c"]
    assert template_text(found["c"], CHAT[:2]) == "Be brief.<|im_end|>Where?<|im_end|>"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("chatlm", "'chatlm': expected a file with a Jinja template, or a name; did you mean 'chatml'?"),
        ("chatml", "the tokenizer has no <|im_end|> and no <|im_start|>, which this template writes"),
        ("bad.jinja", "the template fails on a plain chat: "),
        ("fails.jinja", "TemplateError: nobody"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    (tmp_path / "fails.jinja").write_text("{{ raise_exception('nobody') }}")
    with pytest.raises(ConfigError, match=r"policies\.one\.chat_template.*") as error:
        check_models({"one": PolicyConfig(chat_template=given)}, lambda: (build_tokenizer(["abc"]), None))
    assert words in str(error.value)
