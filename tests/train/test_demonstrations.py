from __future__ import annotations

import json
from dataclasses import replace

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.chat import ChatRenderer
from turnwise.chat.known_formats import chat_format
from turnwise.credit import GRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.tasks.tiny import build_tokenizer
from turnwise.train.config.toml import ConfigError
from turnwise.train.log.run_log import RunLog
from turnwise.train.update.sft_data import fitting, tokenize
from turnwise.train.update.sft_rows import RowReader, SFTRow, demonstrated
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Rollout, Step

from ..chat.families import CHAT_FAMILIES, QWEN, byte_tokenizer, chat_tokenizer, installed_families

CHAT = [{"role": "user", "content": "2 + 2 = ?"}]


@pytest.fixture
def write(tmp_path):
    def to_file(*lines):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return to_file


def step(actor, completion, *, reward=None, finish="stop", trainable=True):
    return Step(actor, 0, CHAT, completion, [1, 2], [3], [-0.1], [(0, 1)], finish, reward=reward, trainable=trainable)


def test_rows_of_one_actor_and_of_all_and_a_bad_byte(write, tmp_path):
    path = write(
        {"messages": CHAT, "completion": "4"},
        "",
        {"messages": CHAT, "completion": "5", "actor": "solver"},
        {"prompt": "2 + 2 =", "completion": " 4"},
    )
    assert RowReader(["solver", "judge"]).read(path) == [
        SFTRow(CHAT, "4", None, f"{path}:1"),
        SFTRow(CHAT, "5", "solver", f"{path}:3"),
        SFTRow("2 + 2 =", " 4", None, f"{path}:4"),
    ]
    # A bad byte names its line and a line separator ends none.
    path = tmp_path / "rows.jsonl"
    good = '{"prompt": "one\u2028two", "completion": "4"}\n'.encode()
    path.write_bytes(good)
    assert RowReader(["solver"]).read(path) == [SFTRow("one\u2028two", "4", None, f"{path}:1")]
    path.write_bytes(good + b'{"prompt": "\xff", "completion": "4"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: not UTF-8"):
        RowReader(["solver"]).read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows.jsonl:2: not JSON"),
        ("[1]", r"rows.jsonl:2: expected a JSON object, got '\[1\]'"),
        ({"messages": CHAT}, r"rows.jsonl:2: expected 'completion' to be a text that is not empty, got None"),
        ({"messages": CHAT, "completion": ""}, r"rows.jsonl:2: expected 'completion' .* got ''"),
        ({"messages": [], "completion": "4"}, r"rows.jsonl:2: expected 'messages' to be a list such as"),
        ({"messages": [{"role": "user"}], "completion": "4"}, r"rows.jsonl:2: expected 'messages' to be a list"),
        ({"messages": [{"role": "human", "content": "2"}], "completion": "4"}, r"rows.jsonl:2: .*role: got 'human'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "completion": "4"}, r"type 'image_url'"),
        ({"completion": "4"}, r"rows.jsonl:2: expected either 'messages' or 'prompt', got keys \['completion'\]"),
        ({"messages": CHAT, "prompt": "2", "completion": "4"}, r"rows.jsonl:2: expected either 'messages' or"),
        ({"messages": CHAT, "completion": "4", "actr": "a"}, r"rows.jsonl:2: unknown key 'actr'; expected actor,"),
        ({"messages": CHAT, "completion": "4", "actor": "x"}, r"'actor' is 'x'; the task's actors are solver, judge"),
        ({"episode_type": "math", "steps": [{}]}, r"rows.jsonl:2: not an episode as rollouts.jsonl has it: KeyError"),
    ],
)
def test_bad_rows_name_file_and_line(write, line, message):
    with pytest.raises(ConfigError, match=message):
        RowReader(["solver", "judge"]).read(write({"messages": CHAT, "completion": "4"}, line))


def test_files_that_give_nothing(write, tmp_path):
    with pytest.raises(ConfigError, match=r"warm_start.data' = .*rows.jsonl': no row to learn from, the file is empty"):
        RowReader(["solver"]).read(write(""))
    with pytest.raises(ConfigError, match=r"warm_start.data' = '.*none.jsonl': can't be read: .*No such file"):
        RowReader(["solver"]).read(tmp_path / "none.jsonl")
    # A reward that none reaches.
    with pytest.raises(ConfigError, match=r"no row to learn from, left out: .*4 rewarded below 2"):
        RowReader(["solver", "judge"], 2).read(recorded(tmp_path))


def recorded(tmp_path):
    """What a run writes: a tree's turn with a nested episode below, one that failed, and one that isn't trained on."""
    child = Rollout("r-2", "solve", 1, [step("judge", "child")], rewards={"judge": 0.9})
    top = Rollout(
        "r-1",
        "propose",
        None,
        [
            step("solver", "own reward", reward=1.0),
            step("solver", "lower", reward=0.2),
            step("solver", "of its actor"),
            step("solver", "cut", reward=1.0, finish="length"),
            step("solver", "pruned", reward=1.0, trainable=False),
            step(None, "judge's own"),
            step("stranger", "unknown", reward=1.0),
        ],
        rewards={"solver": 0.7},
    )
    failed = Rollout("r-3", "propose", None, [step("solver", "failed", reward=1.0)], error="Traceback")
    shown = Rollout("r-4", "propose", None, [step("solver", "shown", reward=1.0)])
    log = RunLog(tmp_path, total_steps=1, rollouts_per_step=9)
    with log:
        results = [GenerateResult(top, [GenerateResult(child)]), GenerateResult(failed)]
        log.step(1, {}, [*results, GenerateResult(shown, is_trainable=False)])
    return tmp_path / "rollouts.jsonl"


@pytest.mark.parametrize(
    ("least", "taken", "left_out"),
    [
        (None, ["own reward", "lower", "of its actor", "child"], {}),
        (0.5, ["own reward", "of its actor", "child"], {"rewarded below 0.5": 1}),
        (0.7, ["own reward", "of its actor", "child"], {"rewarded below 0.7": 1}),
        (0.8, ["own reward", "child"], {"rewarded below 0.8": 2}),
    ],
)
def test_a_runs_own_record(tmp_path, least, taken, left_out):
    reader = RowReader(["solver", "judge"], least)
    rows = reader.read(recorded(tmp_path))
    assert [row.completion for row in rows] == taken
    assert {row.completion: row.actor for row in rows}["child"] == "judge" and rows[0].prompt == CHAT
    always = {"cut off": 1, "not trainable": 3, "of actors that the task doesn't have": 1, "of failed episodes": 1}
    assert reader.left_out == always | left_out
    assert "1 cut off" in reader.describe()


def test_of_a_tree_with_several_ends_each_pays_what_led_to_it_alone(tmp_path):
    steps = [step("solver", text) for text in ("shared", "to the first", "to the second")]
    for one, ends in zip(steps, ([0, 1], [0], [1]), strict=True):
        one.info["ends"] = ends
    meta = {"own_end": 0, "ends": [{"rewards": {"solver": 1.0}}, {"rewards": {"solver": 0.1}}]}
    tree = Rollout("r-1", "propose", None, steps, rewards={"solver": 1.0}, meta=meta)
    with RunLog(tmp_path, total_steps=1, rollouts_per_step=9) as log:
        log.step(1, {}, [GenerateResult(tree)])
    rows = RowReader(["solver"], 0.5).read(tmp_path / "rollouts.jsonl")
    assert [row.completion for row in rows] == ["shared", "to the first"]


def test_tokenized_as_a_call_sends_it(small_model, tmp_path):
    _, tokenizer = small_model()
    renderer = ChatRenderer(tokenizer)
    chat = tokenize(renderer, SFTRow(CHAT, "4", None, ""))
    assert tokenizer.decode(chat.prompt_token_ids) == "<|user|>2 + 2 = ?<|end|><|assistant|>"
    assert tokenizer.decode(chat.completion_token_ids) == "4<|end|>"
    text = tokenize(renderer, SFTRow("2 + 2 =", " 4", None, ""))
    assert tokenizer.decode([*text.prompt_token_ids, *text.completion_token_ids]) == "2 + 2 = 4<|end|>"
    assert all(row.recorded for row in RowReader(["solver", "judge"]).read(recorded(tmp_path)))
    ends = []
    for is_recorded in (True, False):
        ids = tokenize(renderer, SFTRow(CHAT, "4<|end|>5", None, "", is_recorded)).completion_token_ids
        assert tokenizer.decode(ids) == "4<|end|>5<|end|>"
        ends.append(ids.count(tokenizer.eos_token_id))
    assert ends == [1, 2]


def test_a_recorded_thinking_model_keeps_its_tokens(small_model, tmp_path):
    _, tokenizer = small_model()
    renderer = ChatRenderer(tokenizer)
    prompt, said = renderer.prompt_ids(CHAT), "<think>a</think>4, or <think>b</think>5"
    ids = [*renderer.encode(said), *renderer.end_token_ids]
    row = SFTRow(CHAT, "4, or 5", "solver", "here", True, prompt, ids, "a\n\nb")
    notes: list[str] = []
    [kept] = fitting(tokenizer, [row], None, notes.append)
    assert (kept.completion_token_ids, notes) == (ids, [])
    thinking = replace(step("solver", "", reward=1.0), thought="b", in_thought=True)
    with RunLog(tmp_path, total_steps=1, rollouts_per_step=9) as log:
        log.step(1, {}, [GenerateResult(Rollout("r-1", "x", 1, [thinking, step("solver", "4", reward=1.0)]))])
    reader = RowReader(["solver"])
    assert [row.completion for row in reader.read(tmp_path / "rollouts.jsonl")] == ["4"]
    assert reader.left_out == {"ended in a thought": 1}


def test_rows_that_do_not_fit_are_counted_and_the_longest_named(small_model):
    _, tokenizer = small_model()
    rows = [SFTRow("1" * n, "2", None, f"rows.jsonl:{n}") for n in (3, 8, 9, 7)]
    notes = []
    assert [len(row) for row in fitting(tokenizer, rows, 9, notes.append)] == [5, 9]
    (told,) = notes
    assert "2 of 4 rows left out" in told and "9 tokens; the longest, rows.jsonl:9, has 11" in told
    with pytest.raises(ConfigError, match=r"4 of 4 rows left out.*no row is left"):
        fitting(tokenizer, rows, 4)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def test_a_row_without_actor_is_rendered_as_all_actors_are(small_model):
    """Such prompts lacked the tools, the system prompt and the options of the template that every call has."""
    _, tokenizer = small_model()

    def shown(actors, *rows):
        notes: list[str] = []
        fit = fitting(tokenizer, [SFTRow(*row, "here") for row in rows], None, notes.append, actors)
        return [tokenizer.decode(row.prompt_token_ids) for row in fit], notes

    one, two = (Actor(name, "Be brief.", tools=[add]) for name in ("one", "two"))
    prompt = "<|system|>Be brief.\nadd(a, b)<|end|><|user|>2 + 2 = ?<|end|><|assistant|>"
    rows = [(CHAT, "4", None), (CHAT, "4", "one")]
    assert shown([one], *rows) == shown([one, two], *rows) == ([prompt, prompt], [])
    # A system message in the row replaces the actor's own, and a plain text is no chat.
    own = [{"role": "system", "content": "x"}, *CHAT]
    assert shown([one], (own, "4", None), ("2 + 2 =", "4", None)) == (
        [prompt.replace("Be brief.", "x"), "2 + 2 ="],
        [],
    )
    # Where actors differ, the row has what they share, and one line says so.
    other = Actor("two", "Take your time.", tools=[add])
    prompts, notes = shown([one, other], *rows, (own, "4", None), ("2 + 2 =", "4", None))
    assert prompts == [prompt.replace("Be brief.", ""), prompt, prompt.replace("Be brief.", "x"), "2 + 2 ="]
    assert len(notes) == 1 and "1 of 4 rows may be of several actors, whose system prompts differ" in notes[0]
    prompts, notes = shown([one, Actor("two")], *rows)
    assert prompts == ["<|user|>2 + 2 = ?<|end|><|assistant|>", prompt]
    assert "1 of 2 rows" in notes[0] and "system prompts and tools differ" in notes[0] and "Set 'actor'" in notes[0]
    # Two tasks may have actors of one name.
    prompts, notes = shown([one, Actor("one", "Take your time.", tools=[add])], rows[1])
    assert prompts == [prompt.replace("Be brief.", "")] and "1 of 1 rows" in notes[0]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.mark.parametrize("before", ["", "let me see ", "<think>hm</think>\n\n"])
async def test_recorded_prompts_keep_the_tokens_that_the_actor_saw(tmp_path, before):
    """A template changes earlier answers, so the rendered prompt of a second tool round was another one."""

    class Sums(MultiTurnEpisode):
        episode_type, actors, max_turns = "sums", ("solver",), 1
        rubric = Rubric([lambda completion: 1.0])

        def get_prompt(self, artifact):
            return f"1 + 2 = ? {artifact}"

    def reply(request):
        return before + CALL if request.messages[-1]["role"] == "user" else "3"

    tokenizer = build_tokenizer(["0123456789"], vocab_size=300)
    actor = Actor("solver", tools=[add], max_tokens=200)
    arena = Arena(ScriptedClient(reply, tokenizer=tokenizer), tokenizer, credit=GRPOCredit())
    arena.add_actor(actor)
    arena.add_episode(Sums())
    [result] = await arena.generate_rollouts([EpisodeRequest("sums", "<|end|>")])
    with RunLog(tmp_path, total_steps=1, rollouts_per_step=9) as log:
        log.step(1, {}, [result])
    rows = RowReader(["solver"]).read(tmp_path / "rollouts.jsonl")
    notes: list[str] = []
    seen = [(step.prompt_token_ids, step.completion_token_ids) for step in result.rollout.steps]
    assert len(seen) == 2
    fit = fitting(tokenizer, rows, None, notes.append, [actor])
    assert [(row.prompt_token_ids, row.completion_token_ids) for row in fit] == seen and notes == []
    # Tokens of another tokenizer mean other texts: the prompts are rendered again, and counted.
    foreign = [replace(row, prompt_token_ids=[token + 1 for token in row.prompt_token_ids]) for row in rows]
    fit = fitting(tokenizer, foreign, None, notes.append, [actor])
    assert all("1 + 2 = ?" in tokenizer.decode(row.prompt_token_ids) for row in fit)
    assert len(notes) == 1 and "2 of 2 rows are recorded without token ids of this model's tokenizer" in notes[0]


def test_a_recorded_completion_keeps_its_own_end(small_model):
    _, tokenizer = small_model()
    prompt = ChatRenderer(tokenizer).prompt_ids(CHAT)
    end = tokenizer.eos_token_id
    split = [*tokenizer.encode("4"), *tokenizer.encode("2")]
    for sampled in ([*split, end], split):
        [row] = fitting(tokenizer, [SFTRow(CHAT, "42", "a", "here", True, prompt, sampled)], None)
        assert (row.prompt_token_ids, row.completion_token_ids) == (prompt, [*split, end])
    # Ids of another completion are not those of the text.
    [row] = fitting(tokenizer, [SFTRow(CHAT, "42", "a", "here", True, prompt, tokenizer.encode("7"))], None)
    assert tokenizer.decode(row.completion_token_ids) == "42<|end|>"


ENDS = {
    "none": "4",
    "its own": "4<|end|>",
    "twice": "4<|end|><|end|>",
    "with whitespace": "4<|end|>\n",
    "apart": "4 <|end|> <|end|>\n\n",
}


@pytest.mark.parametrize("written", ENDS)
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("prompt", [CHAT, "2 + 2 ="])
def test_a_demonstration_teaches_its_end_once(small_model, written, is_recorded, prompt):
    _, tokenizer = small_model()
    notes = []
    [row] = fitting(tokenizer, [SFTRow(prompt, ENDS[written], None, "demos.jsonl:1", is_recorded)], None, notes.append)
    text = tokenizer.decode(row.completion_token_ids)
    assert text.count("<|end|>") == 1 and text.endswith("<|end|>") and text.replace(" ", "") == "4<|end|>"
    assert row.completion_token_ids.count(tokenizer.eos_token_id) == 1
    assert not any("after a token that ends the turn" in note for note in notes)


@pytest.mark.parametrize("family", installed_families())
def test_of_each_family_a_written_end_is_the_only_one(family):
    tokenizer = chat_tokenizer(family) if family in CHAT_FAMILIES else byte_tokenizer("", QWEN, [])
    format = chat_format(tokenizer) or ChatRenderer(tokenizer)
    plain = tokenize(format, SFTRow(CHAT, "4", None, "")).completion_token_ids
    closing = tokenizer.decode(format.end_token_ids)
    for written in (closing, closing + "\n"):
        assert tokenize(format, SFTRow(CHAT, f"4{written}", None, "")).completion_token_ids == plain


def test_a_row_that_goes_on_after_its_end_is_named(small_model):
    _, tokenizer = small_model()
    rows = [SFTRow(CHAT, text, None, f"demos.jsonl:{n}") for n, text in enumerate(["4", "4<|end|><|user|>more"], 1)]
    notes = []
    fitting(tokenizer, rows, None, notes.append)
    assert len(notes) == 1 and "1 of 2 rows go on after a token that ends the turn" in notes[0]
    assert "demos.jsonl:2" in notes[0]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (("solver", CHAT), "not enough values"),
        (("critic", CHAT, "4"), "'critic' is no actor; expected one of solver"),
        (("solver", CHAT, 4), "expected messages and a text"),
        (("solver", CHAT, "half \ud83d"), "half of a character"),
        (("solver", [], "4"), "expected messages and a text"),
        (7, "cannot unpack"),
    ],
)
def test_a_tasks_bad_demonstration_is_named_by_its_number(bad, told):
    good = ("solver", CHAT, "4")
    assert demonstrated([good], ["solver"], "task 'sums'") == [SFTRow(CHAT, "4", "solver", "demonstration 0")]
    with pytest.raises(ConfigError, match=f"task 'sums': demonstration 1 is .*{told}"):
        demonstrated([good, bad], ["solver"], "task 'sums'")
