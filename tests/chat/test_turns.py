"""One truth about turns: what ends one, where system messages go, whose result is whose, for every kind of template."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from transformers import GenerationConfig

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.chat import ChatFormat, ChatRenderer
from turnwise.chat.continuation import Conversations
from turnwise.chat.known_formats import chat_format
from turnwise.chat.messages import ChatError, plain_messages, results_in_order
from turnwise.chat.tokenizers import TokenBytes, keep_ends, own_copy
from turnwise.credit import GRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import ByteTokenizer, Reply
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.update.sft_data import tokenize
from turnwise.train.update.sft_rows import SFTRow
from turnwise.types import Actor, EpisodeRequest, Message, Sampling

from .families import byte_tokenizer
from .turns import FAMILIES, Family

ASK = [{"role": "user", "content": "2 + 2"}]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def ids_of(tokenizer: Any, *texts: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]


def text(format: ChatFormat, messages: list[Message], **options: Any) -> str:
    return format.tokenizer.decode(format.prompt_ids(messages, **options), skip_special_tokens=False)


# -- ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["plain", "tools"])
def test_a_turn_ends_with_the_templates_mark_the_models_and_the_tokenizers(family: Family, kind: str) -> None:
    def format() -> ChatFormat:
        return ChatRenderer(tokenizer) if kind == "plain" else chat_format(tokenizer, "template")

    tokenizer = family.tokenizer()
    closing = ids_of(tokenizer, *family.ends)
    close = closing[-1]
    assert format().end_token_ids == closing
    assert set(format().stop_token_ids) == {close, tokenizer.eos_token_id}
    other = ids_of(tokenizer, family.special[0])[0]
    for eos in (other, [close, other]):
        keep_ends(tokenizer, GenerationConfig(eos_token_id=eos))
        assert set(format().stop_token_ids) == {close, tokenizer.eos_token_id, other}
        assert format().end_token_ids == closing
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert format().end_token_ids == [tokenizer.eos_token_id], "a template without a mark"


def test_ids_of_other_vocabularies_end_no_turn() -> None:
    tokenizer = build_tokenizer(["hello"])
    [ordinary] = tokenizer.encode("h")
    with pytest.warns(UserWarning, match=r"generation_config.eos_token_id=.*no token \[1000000\]"):
        keep_ends(tokenizer, GenerationConfig(eos_token_id=[1, 10**6]))
    keep_ends(tokenizer, GenerationConfig(eos_token_id=None))
    keep_ends(tokenizer, GenerationConfig(eos_token_id=[ordinary, 50256], _from_model_config=True))  # GPT-2's default
    assert ChatRenderer(tokenizer).stop_token_ids == (1,)
    keep_ends(tokenizer, GenerationConfig(eos_token_id=ordinary))
    assert ChatRenderer(tokenizer).stop_token_ids == (1, ordinary), "a file that names it means it"
    plain = ByteTokenizer()
    keep_ends(plain, GenerationConfig(eos_token_id=2, _from_model_config=True))
    assert ChatRenderer(plain).stop_token_ids == (256,)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_turn_that_calls_tools_may_close_with_a_mark_of_its_own(parallel: bool) -> None:
    """As in gpt-oss and Llama 3.1. What closes a single call in it ends no turn."""
    one = "" if parallel else "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}" + one + "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>"
        "<|next|>{% endfor %}<|call|>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    special = ["<|start|>", "<|return|>", "<|end|>", "<|call|>", "<|next|>", "<tool_call>", "</tool_call>"]
    format = ChatFormat(byte_tokenizer("", special, [], None, template))
    returned, end, called = ids_of(format.tokenizer, "<|return|>", "<|end|>", "<|call|>")
    assert format.stop_token_ids == (returned, end, called) and format.end_token_ids == [end]
    prompt, answer = format.prompt_ids([U("x")]), call("a")
    sampled = [*format.encode("yo"), called]
    longer = format.extend(prompt, sampled, [result("a")], (), answer)
    assert longer is not None
    assert format.tokenizer.decode(longer).endswith("yo<|call|><|start|>tool\nof a<|end|><|start|>assistant\n")


class Talk(MultiTurnEpisode):
    episode_type, actors, max_turns = "talk", ("solver",), 2
    rubric = Rubric([lambda completion: float(completion == "4")])

    def get_prompt(self, artifact: Any) -> str:
        return "2 + 2"

    def env_response(self, state: Any, arena: Any, artifact: Any) -> str:
        return "Again."


@pytest.mark.parametrize("end", ["close", "eos", "generation config"])
async def test_a_plain_episode_stops_at_each_of_them_and_keeps_it(family: Family, end: str) -> None:
    tokenizer = family.tokenizer()
    keep_ends(tokenizer, GenerationConfig(eos_token_id=ids_of(tokenizer, family.special[0])))
    name = {"close": family.ends[-1], "eos": tokenizer.eos_token}.get(end, family.special[0])
    [stop] = ids_of(tokenizer, name)
    said = [*tokenizer.encode("4", add_special_tokens=False), stop]
    client = ScriptedClient(lambda request: Reply(token_ids=[*said, *tokenizer.encode("junk")]), tokenizer=tokenizer)
    arena = Arena(client, tokenizer, credit=GRPOCredit(), sampling=Sampling(max_tokens=32))
    arena.add_actor(Actor("solver"))
    arena.add_episode(Talk())
    [result] = await arena.generate_rollouts([EpisodeRequest("talk", None)])
    for step in result.rollout.steps:
        assert (step.completion_token_ids, step.finish_reason, step.completion) == (said, "stop", "4")
        assert step.trainable
    first, second = result.rollout.steps
    chat = [*ASK, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Again."}]
    rendered, seen = ChatRenderer(tokenizer).prompt_ids(chat), [*first.prompt_token_ids, *said]
    if result.rollout.facts.mishaps:  # rendered again
        assert second.prompt_token_ids == rendered
    else:
        after = second.prompt_token_ids[len(seen) :]
        assert second.prompt_token_ids[: len(seen)] == seen, "the sampled end stays"
        assert after and rendered[-len(after) :] == after


async def test_an_end_that_is_no_special_token_is_no_part_of_the_text() -> None:
    family = FAMILIES["phi"]
    tokenizer = byte_tokenizer("", list(family.special[:-1]), [family.close], None, family.template)
    said = [*tokenizer.encode("4"), *ids_of(tokenizer, family.close)]
    arena = Arena(ScriptedClient([Reply(token_ids=said)], tokenizer=tokenizer), tokenizer)
    arena.add_actor(Actor("solver"))
    response = await arena.call_model("solver", "2 + 2")
    assert (response.completion_token_ids, response.text) == (said, "4")


def test_the_warm_start_teaches_the_templates_end(family: Family) -> None:
    tokenizer = family.tokenizer()
    row = SFTRow(ASK, "4", None, "here")
    for format in (ChatRenderer(tokenizer), chat_format(tokenizer, "template")):
        taught = tokenize(format, row)
        whole = format.prompt_ids([*ASK, {"role": "assistant", "content": "4"}], add_generation_prompt=False)
        begun = [*taught.prompt_token_ids, *taught.completion_token_ids]
        written, expected = (tokenizer.decode(ids).replace(" ", "") for ids in (begun, whole))
        assert expected.startswith(written)
        closing = ids_of(tokenizer, *family.ends)
        assert taught.completion_token_ids[-len(closing) :] == closing


# -- turnwise's own tokenizer ------------------------------------------------------------------------------------------
def test_a_copy_is_made_once_and_again_for_another_state() -> None:
    tokenizer = build_tokenizer(["hello world"])
    tokenizer("hello world", truncation=True, padding="max_length", max_length=1)
    copied = own_copy(tokenizer)
    assert copied is not tokenizer and own_copy(tokenizer) is copied and own_copy(copied) is copied
    assert copied.backend_tokenizer.truncation is None and copied.backend_tokenizer.padding is None
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert own_copy(tokenizer).chat_template == "{{ messages[0].content }}" and own_copy(tokenizer) is not copied
    plain = ByteTokenizer()
    assert own_copy(plain) is plain
    tokenizer.handle = threading.Lock()  # type: ignore[attr-defined]
    tokenizer.chat_template = None
    with pytest.warns(UserWarning, match=r"tokenizer: \w+ can't be copied \(TypeError: .*cuts prompts"):
        assert own_copy(tokenizer) is tokenizer


async def test_what_users_do_with_the_tokenizer_changes_no_prompt(family: Family) -> None:
    tokenizer = family.tokenizer()
    client = ScriptedClient(lambda request: "4", tokenizer=tokenizer)
    arena = Arena(client, tokenizer, sampling=Sampling(max_tokens=9))
    arena.add_actor(Actor("solver"))
    late = arena.add_actor(Actor("late", chat_template_kwargs={"x": 1}))
    before = await arena.call_model("solver", "2 + 2 = " * 9)
    assert arena.tokenizer is tokenizer
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    tokenizer.eos_token, tokenizer.chat_template = family.special[0], "gone"
    tokenizer.add_special_tokens({"additional_special_tokens": ["2 + 2"]})
    after = await arena.call_model("solver", "2 + 2 = " * 9)
    assert after.prompt_token_ids == before.prompt_token_ids
    assert after.completion_token_ids == before.completion_token_ids
    for format in (arena.plain_format(late), arena.chat_format(late), arena.chat_format(renderer="template")):
        assert format.prompt_ids([U("2 + 2 = " * 9)]) == before.prompt_token_ids, "formats that are made only now"
    fresh = arena.prepare("solver", "2 + 2 = " * 10)[1]
    assert len(fresh.prompt_token_ids) == len(before.prompt_token_ids) + len("2 + 2 = ")
    assert fresh.sampling.stop_token_ids == client.calls[0].sampling.stop_token_ids


def test_a_thread_that_truncates_cuts_no_prompt() -> None:
    tokenizer = build_tokenizer(["hello world"])
    format, stop = ChatRenderer(tokenizer), threading.Event()

    def shorten() -> None:
        while not stop.is_set():
            tokenizer("hello world " * 20, truncation=True, max_length=4)

    thread = threading.Thread(target=shorten, daemon=True)
    thread.start()
    try:
        chat = [{"role": "user", "content": "hello " * 40 + "END"}]
        lengths = {len(format.prompt_ids(chat)) for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert len(lengths) == 1 and lengths.pop() > 40


# -- system messages ---------------------------------------------------------------------------------------------------
def says(role: str) -> Callable[[str], Message]:
    return lambda content: {"role": role, "content": content}


S, D, U, A = map(says, ("system", "developer", "user", "assistant"))


@pytest.mark.parametrize(
    ("chat", "joined", "folded", "none"),
    [
        ([S("be")], [S("be")], [S("be")], [U("system: be")]),
        ([S("be"), U("hi")], [S("be"), U("hi")], [S("be"), U("hi")], [U("system: be\n\nhi")]),
        (
            [S("be"), D("go"), U("hi")],
            [S("be\n\ngo"), U("hi")],
            [S("be\n\ngo"), U("hi")],
            [U("system: be\n\nsystem: go\n\nhi")],
        ),
        (
            [S("be"), U("hi"), A("yo"), D("go"), U("so")],
            [S("be"), U("hi"), A("yo"), S("go"), U("so")],
            [S("be"), U("hi"), A("yo"), U("system: go\n\nso")],
            [U("system: be\n\nhi"), A("yo"), U("system: go\n\nso")],
        ),
        ([U("hi"), S("go")], [U("hi"), S("go")], [U("hi\n\nsystem: go")], [U("hi\n\nsystem: go")]),
        (
            [U("hi"), S("go"), A("yo"), U("so")],
            [U("hi"), S("go"), A("yo"), U("so")],
            [U("hi\n\nsystem: go"), A("yo"), U("so")],
            [U("hi\n\nsystem: go"), A("yo"), U("so")],
        ),
        (
            [U("hi"), A("yo"), S("go"), S("on")],
            [U("hi"), A("yo"), S("go"), S("on")],
            [U("hi"), A("yo"), U("system: go\n\nsystem: on")],
            [U("hi"), A("yo"), U("system: go\n\nsystem: on")],
        ),
    ],
    ids=["alone", "first", "two first", "between", "last", "before an answer", "two last"],
)
def test_system_messages_go_where_the_template_takes_them(
    family: Family, chat: list[Message], joined: list[Message], folded: list[Message], none: list[Message]
) -> None:
    tokenizer = family.tokenizer()
    expected = joined if family.takes_later else folded if family.takes_first else none
    if family.takes_first and chat == [S("be")] and family is FAMILIES["mistral"]:
        return  # the template writes the system's text into a user message, and there is none
    shown = tokenizer.apply_chat_template(expected, add_generation_prompt=True, tokenize=False)
    for format in (ChatRenderer(tokenizer), chat_format(tokenizer, "template")):
        assert text(format, chat) == shown
        assert text(format, plain_messages(chat)) == shown, "the gateway's way"


def test_templates_that_take_only_lists_of_parts() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )
    tokenizer = byte_tokenizer("", ["<|im_start|>", "<|endoftext|>", "<|im_end|>"], [], None, template)
    chat = [{"role": role, "content": [{"type": "text", "text": role}]} for role in ("system", "system", "user")]
    for given in (chat[1:], [*chat[1:], chat[0]]):
        shown = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
        assert text(ChatRenderer(tokenizer), given) == shown
    assert ChatRenderer(tokenizer).end_token_ids == ids_of(tokenizer, "<|im_end|>")
    assert text(ChatRenderer(tokenizer), chat).startswith("<|im_start|>system\nsystem\n\nsystem<|im_end|>")


def test_an_actor_s_system_prompt_stays_out_if_a_developer_speaks_first() -> None:
    arena = Arena(ScriptedClient([]))
    arena.add_actor(Actor("solver", "Be brief."))
    messages, _ = arena.prepare("solver", [D("Think."), U("hi")])
    assert [message["content"] for message in messages] == ["Think.", "hi"]


def test_a_chat_goes_on_behind_its_tokens_with_a_later_system_message(family: Family) -> None:
    tokenizer = family.tokenizer()
    format = chat_format(tokenizer, "template")
    prompt = format.prompt_ids([U("hi")])
    sampled = [*tokenizer.encode("yo", add_special_tokens=False), *format.end_token_ids]
    longer = format.extend(prompt, sampled, [S("go"), U("so")])
    whole = tokenizer.decode(format.prompt_ids([U("hi"), A("yo"), S("go"), U("so")])).replace(" ", "")
    assert longer is not None and longer[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    for cut in range(len(format.end_token_ids) + 1):  # a turn that was cut off gets the closing tokens that it lacks
        ids = format.extend(prompt, sampled[: len(sampled) - cut], [S("go"), U("so")])
        assert ids is not None and tokenizer.decode(ids).replace(" ", "") == whole


# -- roles in turn -----------------------------------------------------------------------------------------------------
IN_TURN = {
    "two users": ([U("a"), U("b")], [U("a\n\nb")]),
    "three users later": (
        [U("a"), A("b"), U("c"), U("d"), U("e"), A("f"), U("g")],
        [U("a"), A("b"), U("c\n\nd\n\ne"), A("f"), U("g")],
    ),
    "two answers": ([U("a"), A("b"), A("c"), U("d")], [U("a"), A("b\n\nc"), U("d")]),
    "an empty one": ([U("a"), A(""), A("c"), U("d")], [U("a"), A("c"), U("d")]),
    "an answer first": ([A("a"), U("b")], [U(""), A("a"), U("b")]),
    "two answers first": ([A("a"), A("b"), U("c"), U("d")], [U(""), A("a\n\nb"), U("c\n\nd")]),
    "in turn": ([U("a"), A("b"), U("c")], [U("a"), A("b"), U("c")]),
}


@pytest.mark.parametrize("name", IN_TURN)
async def test_neighbours_of_one_role_are_joined_where_the_template_wants_roles_in_turn(
    family: Family, name: str
) -> None:
    """Others get the chat as it is; in plain chats, those of agents, of judges and of the warm start."""
    given, joined = IN_TURN[name]
    tokenizer = family.tokenizer()
    shown = tokenizer.apply_chat_template(
        joined if family.in_turn else given, add_generation_prompt=True, tokenize=False
    )
    for format in (ChatRenderer(tokenizer), chat_format(tokenizer, "template")):
        assert text(format, given) == text(format, plain_messages(given)) == shown
        taught = tokenize(format, SFTRow(given, "4", None, "here"))
        assert tokenizer.decode(taught.prompt_token_ids) == shown
    arena = Arena(ScriptedClient(lambda request: "4", tokenizer=tokenizer), tokenizer, sampling=Sampling(max_tokens=9))
    arena.add_actor(Actor("solver"))
    for who in ("solver", None):
        assert tokenizer.decode((await arena.call_model(who, given)).prompt_token_ids) == shown


def test_system_messages_beside_neighbours_of_one_role() -> None:
    chat = [S("be"), A("a"), U("b"), D("go"), U("c")]
    expected = {
        "gemma": [U("system: be"), A("a"), U("b\n\nsystem: go\n\nc")],
        "mistral": [S("be"), U(""), A("a"), U("b\n\nsystem: go\n\nc")],
    }
    for name, joined in expected.items():
        tokenizer = FAMILIES[name].tokenizer()
        shown = tokenizer.apply_chat_template(joined, add_generation_prompt=True, tokenize=False)
        assert text(ChatRenderer(tokenizer), chat) == shown


def test_a_system_message_between_users_is_folded_where_the_template_looks_past_it() -> None:
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role != 'system' %}{% if (m.role == 'user') != "
        "(ns.n % 2 == 0) %}{{ raise_exception('in turn!') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
        "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = byte_tokenizer("", ["<|im_start|>", "<|endoftext|>", "<|im_end|>"], [], None, template)
    shown = tokenizer.apply_chat_template([S("a"), U("b\n\nsystem: c\n\nd")], tokenize=False)
    assert text(ChatRenderer(tokenizer), [S("a"), U("b"), S("c"), U("d")]) == shown


@pytest.mark.parametrize("new", [[U("b"), U("c")], [S("b"), U("c")], [U("b"), S("c"), U("d")]])
def test_a_chat_goes_on_behind_its_tokens_with_neighbours_of_one_role(family: Family, new: list[Message]) -> None:
    tokenizer = family.tokenizer()
    chats, begun = Conversations(format := chat_format(tokenizer, "template")), [U("a"), U("a2")]
    prompt = chats.prompt(begun).ids
    sampled = [*tokenizer.encode("yo", add_special_tokens=False), *format.end_token_ids]
    chats.add(begun, (), prompt, sampled, A("yo"))
    longer = chats.prompt([*begun, A("yo"), *new])
    assert (longer.rewritten, longer.reused) == ("", len(prompt) + len(sampled))
    whole = tokenizer.decode(format.prompt_ids([*begun, A("yo"), *new])).replace(" ", "")
    assert tokenizer.decode(longer.ids).replace(" ", "") == whole


def test_a_users_message_behind_a_result_becomes_its_end_where_the_template_refuses_it() -> None:
    """As templates do that count the user's messages and the answers without calls."""
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
        "m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('in turn!') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}<|im_start|>{{ m.role }} {{ m.content }}{% if m.tool_calls %}<tool_call>"
        "{{ m.tool_calls[0].function | tojson }}</tool_call>{% endif %}<|im_end|>{% endfor %}"
    )
    tokenizer = byte_tokenizer("", ["<|im_start|>", "<|endoftext|>", "<|im_end|>"], [], None, template)
    calls = {**A(""), "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    begun, result = [U("a"), calls], {"role": "tool", "content": "4"}
    given, joined = [*begun, result, U("b"), U("c")], [*begun, {**result, "content": "4\n\nuser: b\n\nuser: c"}]
    assert text(ChatRenderer(tokenizer), given) == tokenizer.apply_chat_template(joined, tokenize=False)
    for chat in (joined, [*joined, A("d"), U("e")]):
        assert text(ChatRenderer(tokenizer), chat) == tokenizer.apply_chat_template(chat, tokenize=False)


# -- results of tools --------------------------------------------------------------------------------------------------
def call(*names: str) -> Message:
    made = [{"id": name, "type": "function", "function": {"name": "look", "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(name: str | None) -> Message:
    return {"role": "tool", "content": f"of {name}"} | ({} if name is None else {"tool_call_id": name})


def test_results_take_the_order_of_their_calls() -> None:
    chat = [U("x"), call("a", "b", "c"), result("c"), result("a"), result("b"), U("y"), call("d"), result("d")]
    for ordered in (results_in_order(chat), plain_messages(chat)):
        contents = [message["content"] for message in ordered if message["role"] == "tool"]
        assert contents == ["of a", "of b", "of c", "of d"]
    assert results_in_order([U("x"), call("a", "b")]) == [U("x"), call("a", "b")], "they are still to come"
    nameless = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    assert results_in_order([*nameless, result(None)]) == [*nameless, result(None)]
    tokenizer = build_tokenizer(["of a b c"])
    for format in (ChatRenderer(tokenizer), chat_format(tokenizer, "template")):
        assert format.prompt_ids(chat) == format.prompt_ids(results_in_order(chat))
        prompt, sampled = format.prompt_ids(chat[:1]), [*tokenizer.encode("x"), *format.end_token_ids]
        new = format.extend(prompt, sampled, [result("b"), result("a")], (), call("a", "b"))
        assert new == format.extend(prompt, sampled, [result("a"), result("b")], (), call("a", "b"))
        assert new is not None and tokenizer.decode(new).index("of a") < tokenizer.decode(new).index("of b")


@pytest.mark.parametrize(
    ("rest", "param", "problem"),
    [
        ([result("a"), result("x")], "messages[3].tool_call_id", "got 'x': expected one of ['a', 'b']"),
        ([result("a"), result("a")], "messages[3].tool_call_id", "got 'a' again"),
        ([result("a"), result(None)], "messages[3].tool_call_id", "got '': expected one of"),
        ([result("a")], "messages[1].tool_calls", "no result for ['b']"),
        ([U("y")], "messages[1].tool_calls", "no result for ['a', 'b']"),
        ([result("a"), U("y"), result("b")], "messages[1].tool_calls", "no result for ['b']"),
    ],
)
def test_a_result_that_belongs_to_no_call_is_an_error(rest: list[Message], param: str, problem: str) -> None:
    chat = [U("x"), call("a", "b"), *rest]
    for way in (plain_messages, results_in_order, ChatRenderer(build_tokenizer(["x"])).prompt_ids):
        with pytest.raises(ChatError) as caught:
            way(chat)
        assert caught.value.param == param and problem in str(caught.value)
    with pytest.raises(ChatError, match="no call of the answer before it"):
        results_in_order([U("x"), result("a")])


# -- bytes of tokens ---------------------------------------------------------------------------------------------------
TEXT = "né 🎲\tÄ中文 \u00a0x\n"


def llama_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "n", "x", "▁x"]
    bpe = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [("▁", "x")], byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "bytes"])
def test_the_bytes_of_tokens_are_their_own(kind: str) -> None:
    tokenizer: Any = {
        "byte-level": lambda: build_tokenizer(["x"]), "byte fallback": llama_tokenizer, "bytes": ByteTokenizer,
    }[kind]()  # fmt: skip
    own = TokenBytes(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [own(token) for token in ids]
    assert b"".join(parts).removeprefix(b" " if kind == "byte fallback" else b"") == TEXT.encode()
    assert any(len(part) == 1 and part[0] > 127 for part in parts), "some tokens are a part of a character"
    assert not any("\ufffd".encode() in part for part in parts)
    end = tokenizer.eos_token_id
    assert own(end) == tokenizer.decode([end], skip_special_tokens=False).encode()
