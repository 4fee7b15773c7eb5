"""Parts of one answer that come back apart, in any order, with results between them: the chat goes on from it."""

from __future__ import annotations

import itertools
import json

import pytest

from .helpers import USER, call_of, play
from .wires import Chat, Messages, Responses, refusal

SAID = "<think>\nHm.\n</think>\n\nI add." + call_of("add", '{"a": 2, "b": 2}') + call_of("add", '{"a": 3, "b": 3}')
"""An answer with reasoning, text and two calls."""


def plays(wire, chats_of, said=(SAID,)):
    """Play an agent that gets an answer to each of ``said``, and goes on with each of ``chats_of(answers)``."""

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            answers, chat = [], list(USER)
            for _ in said:
                answers.append(await wire.ask(client, messages=chat, tools=wire.tools))
                results = {call: f"result of {call}" for call, _ in wire.calls(answers[-1])}
                chat += [*wire.sent_back(answers[-1]), *wire.results(results)]
            for more in chats_of(answers):
                await wire.ask(client, messages=[*USER, *more], tools=wire.tools)
                seen.append(more)

    return play(agent, [*said, "so"], max_calls=1000)


def check(played, answers=1):
    """Every chat extends the tokens of the last of ``answers`` by the results, in the order of their calls."""
    begun, *later = played.steps[answers - 1 :]
    seen = [*begun.prompt_token_ids, *begun.completion_token_ids]
    for step, chat in zip(later, played.seen, strict=True):
        assert list(step.prompt_token_ids[: len(seen)]) == seen, json.dumps(chat, indent=1)
        text = played.text(step.prompt_token_ids[len(seen) :])
        place = text.find("result of")
        assert place >= 0 and text.find("result of", place + 1) > place
        assert text[place:].split()[2] < text[place + 9 :].partition("result of")[2].split()[0]
    assert played.metrics["gateway/rewritten_rows/solver"] == 0
    assert played.metrics["gateway/extended_rows/solver"] == len(later) + answers - 1


def orders(answer, ids=True):
    """Yield the items of an answer of Responses with results, in each order in which a result follows its call."""
    items = Responses.sent_back(answer)
    if not ids:
        items = [{key: value for key, value in item.items() if key != "id"} for item in items]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": f"result of {call['call_id']}"}
        for call in calls
    ]
    for order in itertools.permutations([*items, *results]):
        if all(order.index(call) < order.index(result) for call, result in zip(calls, results, strict=True)):
            yield list(order)


def beside_calls(order):
    """True if all reasoning and text stands in a row of items with a call."""
    rows = itertools.groupby(order, key=lambda item: item["type"] == "function_call_output")
    kinds = [{item["type"] for item in row} for is_result, row in rows if not is_result]
    return all("function_call" in kind for kind in kinds)


def test_items_of_responses_go_on_from_their_answer_in_any_order():
    played = plays(Responses, lambda answers: itertools.islice(orders(answers[0]), 0, None, 2))
    assert len(played.seen) == 90
    check(played)


@pytest.mark.parametrize("ids", [True, False])
def test_text_before_its_reasoning_goes_on(ids):
    async def agent(seen, models):
        async with Responses.client(models["solver"]) as client:
            items = Responses.sent_back(await Responses.ask(client))
            for order in (items, items[::-1]):
                sent = [{key: value for key, value in item.items() if ids or key != "id"} for item in order]
                await Responses.ask(client, messages=[*USER, *sent, *USER])

    played = play(agent, ["<think>\nHm.\n</think>\n\n4", "so"])
    assert [step.info.get("extends") for step in played.steps] == [None, 0, 0]


def test_items_without_ids_go_on_where_a_call_stands_beside_them():
    check(plays(Responses, lambda answers: filter(beside_calls, orders(answers[0], ids=False))))


def test_items_of_two_answers_stay_apart():
    def chats(answers):
        first, second = (list(itertools.islice(orders(answer), 0, None, 45)) for answer in answers)
        return [[*one, *other] for one in first for other in second]

    check(plays(Responses, chats, said=(SAID, SAID)), answers=2)


def test_results_of_responses_may_stand_behind_a_users_message():
    def chats(answers):
        *items, one, two = next(orders(answers[0]))
        yield [*items, one, {"role": "user", "content": "Well?"}, two]

    check(plays(Responses, chats))


def test_calls_of_chat_completions_that_come_apart_go_on():
    def chats(answers):
        [whole] = Chat.sent_back(answers[0])
        first, second = whole.pop("tool_calls")
        one, two = Chat.results({call["id"]: f"result of {call['id']}" for call in (first, second)})
        bare = {"role": "assistant", "content": None}
        yield [{**whole, "tool_calls": [first]}, one, {**bare, "tool_calls": [second]}, two]
        yield [{**whole, "tool_calls": [first]}, {**bare, "tool_calls": [second]}, two, one]
        yield [whole, {**bare, "tool_calls": [first, second]}, one, two]
        yield [whole, {**bare, "tool_calls": [first]}, one, {**bare, "tool_calls": [second]}, two]

    check(plays(Chat, chats))


def test_blocks_of_messages_go_on_in_any_order_and_apart():
    def chats(answers):
        [whole] = Messages.sent_back(answers[0])
        results = Messages.results({call: f"result of {call}" for call, _ in Messages.calls(answers[0])})
        for blocks in itertools.permutations(whole["content"]):
            uses = [block["id"] for block in blocks if block["type"] == "tool_use"]
            if uses == sorted(uses):
                yield [{"role": "assistant", "content": list(blocks)}, *results]
                yield [*({"role": "assistant", "content": [block]} for block in blocks), *results]
        thought, text, first, second = whole["content"]
        one, two = results[0]["content"]
        for begun in ([thought, text, first], [text, first], [first, text]):
            yield [
                {"role": "assistant", "content": begun},
                {"role": "user", "content": [one]},
                {"role": "assistant", "content": [second]},
                {"role": "user", "content": [two]},
            ]

    check(plays(Messages, chats))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Let me see.", "<think>\nHm.\n</think>\n\n" + call_of("add", '{"a": 2, "b": 2}')),
        ("I add.", SAID),
        ("<think>\nHm.\n</think>\n\nLet me see.", call_of("add", '{"a": 2, "b": 2}')),
    ],
    ids=["reasoning and a call", "the same text", "a call"],
)
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("wire", [Chat, Responses])
def test_two_answers_behind_each_other_stay_apart(wire, ids, first, second):
    """The agent asks again without a word, and the model calls a tool."""

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            chat = list(USER)
            for _ in range(3):
                answer = await wire.ask(client, messages=chat, tools=wire.tools)
                items = [{key: item[key] for key in item if ids or key != "id"} for item in wire.sent_back(answer)]
                chat += [*items, *wire.results({call: "4" for call, _ in wire.calls(answer)})]

    played = play(agent, [first, second, "so"])
    assert [step.info.get("extends") for step in played.steps] in ([None, 0, 1], [None, None, 1])
    assert played.metrics["gateway/rewritten_rows/solver"] == ("extends" not in played.steps[1].info)


@pytest.mark.parametrize("wire", [Chat, Responses, Messages])
def test_what_the_agent_wrote_itself_and_changed_answers_stay_apart(wire):
    """Calls with ids that the session doesn't know; and a text that was edited, which is counted."""

    def chats(answers):
        back = wire.sent_back(answers[0])
        text = json.dumps(back).replace("I add.", "I subtract.")
        yield [*json.loads(text), *wire.results({call: "4" for call, _ in wire.calls(answers[0])})]
        yield [
            *json.loads(json.dumps(back).replace("call_0", "mine_0")),
            *wire.results({call.replace("call_0", "mine_0"): "4" for call, _ in wire.calls(answers[0])}),
        ]

    played = plays(wire, chats)
    edited, own = played.steps[1:]
    assert (edited.info.get("rewritten"), own.info.get("rewritten")) == ("history", None)
    assert "I subtract." in played.text(edited.prompt_token_ids)
    assert own.info["extends"] == 0, "the content decides, not the ids"


# -- items that a client names by their ids ----------------------------------------------------------------------------
def by_id(answer):
    return [{"type": "item_reference", "id": item.id} for item in answer.output]


@pytest.mark.parametrize("streamed", [False, True])
def test_items_by_their_ids_are_the_answer(streamed):
    async def agent(seen, models):
        async with Responses.client(models["solver"]) as client:
            ask = Responses.streamed if streamed else Responses.ask
            first = await ask(client, tools=Responses.tools, store=True)
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
            results = Responses.results({call: f"result of {call}" for call, _ in Responses.calls(first)})
            for named in (by_id(first), [{"id": item.id} for item in first.output], Responses.sent_back(first)):
                chat = [*USER, *named, *results]
                second = await ask(client, messages=chat, tools=Responses.tools)
            await ask(client, messages=[*chat, *by_id(second), *USER], tools=Responses.tools)

    played = play(agent, [SAID, "so"])
    *same, last = played.steps[1:]
    assert len({tuple(step.prompt_token_ids) for step in same}) == 1
    assert [step.info.get("extends") for step in played.steps] == [None, 0, 0, 0, 3]
    assert list(last.prompt_token_ids[: len(same[0].prompt_token_ids)]) == list(same[0].prompt_token_ids)


def test_an_item_that_no_answer_had_is_refused():
    async def agent(seen, models):
        async with Responses.client(models["solver"]) as client:
            first = await Responses.ask(client)
            for name in (f"msg_{'x' * 9}", f"rs_{first.output[0].id.partition('_')[2]}"):
                seen.append(
                    await refusal(
                        Responses,
                        Responses.ask(client, messages=[*USER, {"type": "item_reference", "id": name}]),
                        400,
                        "BadRequestError",
                    )
                )

    played = play(agent, ["4"])
    assert all("input[1].id: no item" in str(error) for error in played.seen)
    assert played.metrics["gateway/refused/item_not_found/solver"] == 2


# -- results that stand elsewhere --------------------------------------------------------------------------------------
STEER = {"role": "user", "content": "Hurry up."}


@pytest.mark.parametrize("stored", [False, True])
def test_messages_between_calls_and_results_follow_the_results(stored):
    """The user steers while tools run, or the client sends its chat again with the id of the answer."""

    async def agent(seen, models):
        async with Responses.client(models["solver"]) as client:
            first = await Responses.ask(client, tools=Responses.tools)
            one, two = Responses.results({call: f"result of {call}" for call, _ in Responses.calls(first)})
            begun = [] if stored else [*USER, *Responses.sent_back(first)]
            again = Responses.sent_back(first)[-1:] if stored else []
            named = {"previous_response_id": first.id} if stored else {}
            between = [[STEER, STEER], [*USER, *again, STEER]]
            for messages in between:
                for results in ([*messages, one, two], [one, *messages, two]):
                    chat = [*begun, *results]
                    answer = await Responses.ask(client, messages=chat, tools=Responses.tools, **named)
                    more = [*chat, *Responses.sent_back(answer), STEER]
                    await Responses.ask(client, messages=more, tools=Responses.tools, **named)

    played = play(agent, [SAID, "so"], max_calls=100)
    assert played.metrics["gateway/rewritten_rows/solver"] == 0
    begun, *later = played.steps
    seen = [*begun.prompt_token_ids, *begun.completion_token_ids]
    assert len(later) == 8
    for step in later:
        text = played.text(step.prompt_token_ids[len(seen) :])
        assert list(step.prompt_token_ids[: len(seen)]) == seen
        assert 0 < text.find("result of") < text.rfind("result of") < text.find("Hurry up")
    assert [step.info.get("extends") is not None for step in later] == [True] * 8


def test_a_call_without_a_result_is_refused_wherever_it_stands():
    async def agent(seen, models):
        async with Responses.client(models["solver"]) as client:
            first = await Responses.ask(client, tools=Responses.tools)
            one, two = Responses.results({call: "x" for call, _ in Responses.calls(first)})
            for chat in ([STEER, one, STEER], [STEER, STEER, two]):
                whole = [*USER, *Responses.sent_back(first), *chat]
                call = Responses.ask(client, messages=whole, tools=Responses.tools)
                seen.append(await refusal(Responses, call, 400, "BadRequestError"))

    assert all("no result for" in str(error) for error in play(agent, [SAID]).seen)
