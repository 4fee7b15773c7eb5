"""Chats that are sent again with each request: each is read as if it were the first, and costs what is new in it."""

from __future__ import annotations

import copy
import json
import random

import pytest

from turnwise.chat.histories import Histories, SampledCall
from turnwise.chat.messages import ChatError, well_formed_texts
from turnwise.integrations.gateway.wire import anthropic_messages, openai_chat, openai_responses
from turnwise.integrations.gateway.wire.bodies import LATEST, Bodies, parse_body
from turnwise.integrations.gateway.wire.request import Earlier, WireError
from turnwise.types.prompts import Prefix

from ...operations import count_operations

TEXTS = ["", "a", "Straße", "日本", "\U0001f600", "\ud800", 'a"]}', '"messages": [', "\\", "b " * 30]


class ChatMessages:
    """Chat Completions: the messages of an answer, and of a user."""

    dialect, field = openai_chat, "messages"

    def said(self, rng):
        role = rng.choice(["user", "user", "user", "system", "developer"])
        named = {"name": "ann"} if rng.random() < 0.1 else {}
        return {"role": role, "content": content(rng, "text"), **named}

    def parts(self, rng, number, answer):
        calls = [{"type": "function", **call} for call in as_text(answer)]
        messages = [
            {"role": "assistant", "content": answer["content"], "reasoning_content": answer["reasoning_content"]}
        ]
        if rng.random() < 0.3:
            return [*messages, *({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls)]
        return [{**messages[0], "tool_calls": calls}] if calls else messages

    def whole(self, answer):
        return [{**answer, "tool_calls": as_text(answer)}]

    def result(self, rng, call):
        return {"role": "tool", "tool_call_id": call, "content": rng.choice(TEXTS)}


class ResponsesItems:
    dialect, field = openai_responses, "input"

    def said(self, rng):
        return {"role": rng.choice(["user", "user", "system"]), "content": content(rng, "input_text")}

    def parts(self, rng, number, answer):
        thought = [{"type": "reasoning_text", "text": answer["reasoning_content"]}]
        items = [
            {"type": "reasoning", "id": f"rs_{number}", "content": thought},
            {"type": "message", "role": "assistant", "id": f"msg_{number}", "content": answer["content"]},
            *(
                {"type": "function_call", "id": f"fc_{number}_{place}", "call_id": call["id"], **call["function"]}
                for place, call in enumerate(as_text(answer))
            ),
        ]
        if rng.random() < 0.3:
            rng.shuffle(items)
        return [{key: each[key] for key in each if key != "id" or rng.random() < 0.8} for each in items]

    def whole(self, answer):
        return self.parts(random.Random(0), int(answer["content"].split()[1]), answer)

    def result(self, rng, call):
        return {"type": "function_call_output", "call_id": call, "output": rng.choice(TEXTS)}


class AnthropicMessages:
    dialect, field = anthropic_messages, "messages"

    def said(self, rng):
        return {"role": "user", "content": content(rng, "text")}

    def parts(self, rng, number, answer):
        blocks = [
            {"type": "thinking", "thinking": answer["reasoning_content"]},
            {"type": "text", "text": answer["content"]},
            *(
                {"type": "tool_use", "id": call["id"], "name": "add", "input": call["function"]["arguments"]}
                for call in answer["tool_calls"]
            ),
        ]
        cut = rng.choice([0, 0, 1, 2])
        return [{"role": "assistant", "content": part} for part in (blocks[:cut], blocks[cut:]) if part]

    def whole(self, answer):
        return self.parts(random.Random(2), 0, answer)

    def result(self, rng, call):
        failed = {"is_error": True} if rng.random() < 0.1 else {}
        block = {"type": "tool_result", "tool_use_id": call, "content": rng.choice(TEXTS), **failed}
        return {"role": "user", "content": [block]}


WIRES = {"chat": ChatMessages(), "responses": ResponsesItems(), "messages": AnthropicMessages()}


def content(rng, kind):
    texts = [rng.choice(TEXTS) for _ in range(rng.choice([1, 1, 2]))]
    return texts[0] if len(texts) == 1 else [{"type": kind, "text": text} for text in texts]


def as_text(answer):
    calls = copy.deepcopy(answer["tool_calls"])
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return calls


def answer_of(rng, number):
    calls = [
        {"id": f"call_{number}_{place}", "function": {"name": "add", "arguments": {"a": rng.choice([1, 1.0, True])}}}
        for place in range(rng.choice([0, 0, 1, 2]))
    ]
    return {"role": "assistant", "content": f"so {number}", "reasoning_content": "hm", "tool_calls": calls}


def grown(rng, wire, chat, number):
    """Return the chat with an answer, the results of its calls, and a message: mostly as an agent sends them."""
    answer = answer_of(rng, number)
    results = [wire.result(rng, call["id"]) for call in answer["tool_calls"]]
    more = [*wire.parts(rng, number, answer), *results, *([] if results and rng.random() < 0.7 else [wire.said(rng)])]
    if rng.random() < 0.05:
        rng.shuffle(more)
    return [*chat, *more], answer


def edited(rng, wire, chat):
    """Return a copy with one change at a random place."""
    chat, place = list(chat), rng.randrange(len(chat))
    match rng.randrange(5):
        case 0:
            chat[place] = wire.said(rng)
        case 1:
            chat.insert(place, wire.said(rng))
        case 2:
            del chat[place]
        case 3:
            other = rng.randrange(len(chat))
            chat[place], chat[other] = chat[other], chat[place]
        case 4:
            del chat[place + 1 :]
    return chat or [wire.said(rng)]


def written(rng, body, lone):
    """Return a body's bytes, with its fields in a random order, and mostly as other requests are written.

    Texts have ``lone`` surrogates, which only escapes can spell, or none.
    """
    names = list(body)
    if rng.random() < 0.2:
        rng.shuffle(names)
    body = {name: body[name] for name in names}
    text = json.dumps(body, indent=2 if rng.random() < 0.05 else None, ensure_ascii=lone)
    text = text if lone else text.replace("\ud800", "ü")
    if rng.random() < 0.05:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "}", "]", '"', ',"x":1', '"messages":[]', "1"]) + text[place + 1 :]
    return text.encode()


def outcome(call):
    try:
        return call()
    except (WireError, ChatError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("again", range(8))
def test_a_request_is_read_as_if_it_were_the_first(name, again):
    seed = random.randrange(2**32) if again else 0
    print("seed", seed)
    rng, wire = random.Random(seed), WIRES[name]
    bodies, earlier, chats = Bodies(), Earlier(), [[wire.said(rng)] for _ in range(3)]
    answers, parsed, went_on = [], 0, 0
    for number in range(120):
        place = rng.randrange(len(chats))
        if rng.random() < 0.1:
            chats[place] = edited(rng, wire, chats[place])
        if rng.random() < 0.1:
            chats[place] = list(rng.choice(chats))
        sent = list(chats[place])
        if rng.random() < 0.2:
            sent.append(wire.said(rng))  # a note that the next request lacks
        body = {"model": "solver", wire.field: sent, "temperature": rng.choice([0, 1])}
        body |= {"tools": []} if rng.random() < 0.3 else {}
        if rng.random() < 0.2 and wire.dialect is anthropic_messages:
            body["system"] = rng.choice(TEXTS)
        text = written(rng, body, lone=again % 2 == 0)

        known = bodies.beginning(text)
        found = outcome(lambda text=text, known=known: parse_body(text, known))
        try:
            fresh = well_formed_texts(json.loads(text.decode()))
        except ValueError as error:
            assert found == (WireError, f"400 invalid_request: the request is no JSON: {error}")
            continue
        given, beginning = found
        assert json.dumps(given) == json.dumps(fresh), "also the order of fields, and 1 for 1.0"
        shuffled = dict(rng.sample(list(fresh.items()), len(fresh)))
        assert given.digest() == parse_body(json.dumps(shuffled, indent=1).encode())[0].digest()
        assert given.digest() != parse_body(json.dumps({**fresh, "seed": 1}).encode())[0].digest()
        bodies.keep(beginning)

        anew = Earlier(earlier.chats, earlier.answers)
        went_on += earlier.settled(wire.dialect.DIALECT, given.get(given.chat)) > 0
        request = outcome(lambda given=given: wire.dialect.parse(given, earlier))
        other = outcome(lambda fresh=fresh, anew=anew: wire.dialect.parse(fresh, anew))
        assert request == other
        if isinstance(request, tuple):
            chats[place] = chats[place][:1]
            continue
        parsed += 1
        chats[place], answer = grown(rng, wire, chats[place], number)
        answers.append((number, answer))
        while answers and rng.random() < 0.8:  # some are known late, when their ids were already looked for
            made, answer = answers.pop(0)
            earlier.keep_answer([str(made), *(call["id"] for call in answer["tool_calls"])], answer)
    print(parsed, went_on)
    assert parsed > 40 and went_on > 5


MESSAGE = '{"role": "user", "content": "ü"}'
ODD = [
    f'{{"messages": [{MESSAGE}], "messages": 1}}',
    f'{{"messages": [{MESSAGE}], "messages": [{MESSAGE}, {MESSAGE}]}}',
    f'{{"messages": [{MESSAGE}], "input": [{MESSAGE}]}}',
    f'{{"messages": [{MESSAGE}], "input": "x"}}',
    f'{{"messages": [{MESSAGE}], "model": "a", "model": "b"}}',
    f'{{"tools": [{{"messages": [1]}}], "messages": [{MESSAGE}]}}',
    f'{{"a\\"messages": [{MESSAGE}]}}',
    f'{{"input": "a", "input": 1, "messages" :\t[ {MESSAGE} , {MESSAGE} ] }}',
    f'{{"messages": [{MESSAGE}, 1]}}',
    f'{{"messages": [{MESSAGE}], "top_p": NaN}}',
    f'{{"messages": [{MESSAGE}], "metadata": {"[" * 99}{"]" * 99}}}',
    f'{{"messages": [{MESSAGE}], "metadata": {"[" * 900}{"]" * 900}}}',
    *(
        f'{{"messages": [{MESSAGE}{end}'
        for end in ("", "]", "]} x", "],}", ",]}", ", ]}", ",,1]}", "}", "]]}", '],"x"}')
    ),
    *('{"messages": []}', f"[{MESSAGE}]", f'\ufeff{{"messages": [{MESSAGE}]}}', "[" * 9999),
]


@pytest.mark.parametrize("text", ODD)
def test_an_odd_body_is_read_as_json_says(text):
    bodies = Bodies()
    bodies.keep(parse_body(f'{{"messages": [{MESSAGE}]}}'.encode())[1])
    text = text.encode()
    found = outcome(lambda: parse_body(text, bodies.beginning(text)))
    try:
        fresh = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        assert found == (WireError, f"400 invalid_request: the request is no JSON: {error}")
        return
    if isinstance(found[0], type):
        assert "too deeply" in found[1] if "metadata" in fresh else not isinstance(fresh, dict)
        return
    body, _ = found
    assert json.dumps(body) == json.dumps(fresh)
    turned = json.dumps(dict(reversed(fresh.items()))).encode()
    assert (
        body.digest()
        == parse_body(turned)[0].digest()
        == parse_body(turned + b" ", bodies.beginning(turned))[0].digest()
    )


@pytest.mark.parametrize(
    ("items", "cuts"),
    [
        ("user call0 call1 out0 out1 text", (4, 5)),
        ("user call0 out0 user text", (4,)),
        ("user call0 out0 text", (3,)),
        ("user call0 out0 text call2 out2", (3, 4)),
        ("user thought user call0 out0 text call2 out2 user", (6,)),
        ("user call0 call1 out0 out1 user out0", (6,)),
        ("user call0 out0 user call0 out0", (4,)),
    ],
)
def test_parts_of_an_answer_are_joined_across_requests(items, cuts):
    """Where a request ends between the parts of one answer, or between its results."""
    given = {
        "user": {"role": "user", "content": "x"},
        "thought": {"type": "reasoning", "id": "rs_4", "content": [{"type": "reasoning_text", "text": "hm"}]},
        "text": {"type": "message", "role": "assistant", "id": "msg_4", "content": "so"},
    }
    for place in range(3):
        given[f"call{place}"] = {"type": "function_call", "call_id": f"c{place}", "name": "add", "arguments": "{}"}
        given[f"out{place}"] = {"type": "function_call_output", "call_id": f"c{place}", "output": f"{place}"}
    wire, bodies, earlier = WIRES["responses"], Bodies(), Earlier()
    calls = [{"id": f"c{place}", "function": {"name": "add", "arguments": {}}} for place in range(2)]
    answer = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls}
    earlier.keep_answer(["4", "c0", "c1"], answer)
    chat = [given[name] for name in items.split()]
    for end in (*cuts, len(chat)):
        text = asked(wire, chat[:end])
        found = outcome(lambda text=text: read(wire, bodies, earlier, text))
        assert found == outcome(lambda text=text: read(wire, Bodies(), Earlier({}, earlier.answers), text))


def without(message, name):
    return {key: value for key, value in message.items() if key != name}


def asked(wire, chat, **fields):
    return json.dumps({"model": "solver", **fields, wire.field: chat}).encode()


def read(wire, bodies, earlier, text):
    body, beginning = parse_body(text, bodies.beginning(text))
    bodies.keep(beginning)
    return wire.dialect.parse(body, earlier)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("responses", lambda number: {"previous_response_id": f"resp_{number}"}),
        ("messages", lambda number: {"thread": {"previous_message_id": f"msg_{number}"}}),
    ],
)
def test_a_chat_that_goes_on_by_the_id_of_its_answer_is_the_one_that_is_sent_as_a_whole(name, named):
    rng, wire, bodies, earlier = random.Random(0), WIRES[name], Bodies(), Earlier()
    begins = {"system": "Be brief."} if name == "messages" else {}
    whole, new, fields = [wire.said(rng)], None, {"thread": {"type": "new"}} if name == "messages" else {}
    for number in range(30):
        found = read(wire, bodies, earlier, asked(wire, new or whole, **fields, **begins))
        assert found.messages == read(wire, Bodies(), Earlier(), asked(wire, whole, **begins)).messages
        answer = answer_of(rng, number)
        calls = [call["id"] for call in answer["tool_calls"]]
        earlier.keep_answer([str(number), *calls], answer)
        earlier.chats[str(number)] = [*found.carried, answer if calls else without(answer, "tool_calls")], []
        new = [wire.result(rng, call) for call in calls] or [wire.said(rng)]
        whole, fields = [*whole, *wire.whole(answer), *new], named(number)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("turns", [1, LATEST])
@pytest.mark.parametrize("noted", [False, True])
def test_a_request_costs_what_is_new_in_it(name, turns, noted):
    """Also where chats take turns, and where each request ends with a note that the next one lacks."""
    wire, bodies, earlier, histories = WIRES[name], Bodies(), Earlier(), Histories()
    chats = [[{"role": "user", "content": f"question {place}"}] for place in range(turns)]
    note = [{"role": "user", "content": "some left"}] if noted else []
    counts = []

    def ask(chat, answer):
        found = read(wire, bodies, earlier, asked(wire, [*chat, *note]))
        if not noted:  # a changed chat is rendered anew
            assert histories.find(found.messages, [])[0] == len(found.messages) - 1
            assert histories.known(found.messages) in (0, len(found.messages) - 1)
            histories.add(found.messages, SampledCall(Prefix.of_tokens([1]), [2], answer, []))

    for number in range(120):
        for place, chat in enumerate(chats):
            answer = {
                "role": "assistant",
                "content": f"so {number} {place}",
                "reasoning_content": "hm",
                "tool_calls": [],
            }
            counts.append(count_operations(lambda chat=chat, answer=answer: ask(chat, answer)))
            chats[place] = [*chat, *wire.whole(answer), {"role": "user", "content": "on"}]
    few, many = (sum(counts[turns * begin : turns * (begin + 10)]) for begin in (10, 110))
    assert many < 1.1 * few, f"{few} and {many} operations"
