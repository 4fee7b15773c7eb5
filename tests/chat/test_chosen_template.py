"""A chat template that a config names: the shipped one shows tools, chats go on; what doesn't fit is refused."""

from __future__ import annotations

import json

import pytest

from turnwise.chat.formats import ChatFormat
from turnwise.chat.templates import EXAMPLE_TOOL, template_text, use_template
from turnwise.integrations.mcp import MCPServer
from turnwise.run.checks import dry_run
from turnwise.run.models import check_tools
from turnwise.tasks.tiny import build_model, build_tokenizer
from turnwise.train.config.policies import PolicyConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.loading import check_models
from turnwise.train.validate import config_from_dict
from turnwise.types import Actor

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


def test_a_dry_run_asks_the_template_that_is_chosen(tmp_path):
    plain = chat_tokenizer("template")
    plain.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    for part in (plain, build_model(plain, num_hidden_layers=1)):
        part.save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model")}

    def asked(**more):
        return dry_run(
            config_from_dict({"task": "lookup", "rollout": {"group_size": 2}, "policies": {"default": model | more}})
        )

    with pytest.raises(ConfigError, match="actor 'solver' has tools, and the model's chat template renders no tools"):
        asked()
    with pytest.raises(ConfigError, match=r"policies\.default\.chat_template' = 'chatlm': expected a file"):
        asked(chat_template="chatlm")
    asked(chat_template="chatml")


def test_a_server_s_tools_need_a_template_that_shows_tools(tokenizer):
    config, server = config_from_dict({}), Actor("solver", tools=[MCPServer(command=["no-such-server"])])
    check_tools(config, [server], lambda policy: tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="actor 'solver' has tools"):
        check_tools(config, [server], lambda policy: tokenizer)
