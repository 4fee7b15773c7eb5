"""Sub-agents of an agent that is a process: it opens, pays and ends them by requests."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from turnwise.arena import Rubric
from turnwise.integrations.gateway import (
    Gateway,
    ProcessEpisode,
)
from turnwise.types import EpisodeRequest

from .helpers import Played, arena_of, scripted
from .processes import HEAD, play_process
from .test_children import TEAM, children, family

CODE = """
import urllib.error
root, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
control = os.read(int(os.environ["TURNWISE_CONTROL"]), 100).decode()
again = os.read(int(os.environ["TURNWISE_CONTROL"]), 100)

def post(url, key, path, **body):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return [error.code, json.load(error)["error"]["message"]]

class Child:
    def __init__(self, url=root, **body):
        model = post(url, control, "/children", **body)
        self.url, self.key, self.name = model["base_url"], model["api_key"], model["name"]

    def post(self, path, **body):
        return post(self.url, control, path, **body)

    def say(self):
        messages = [{"role": "user", "content": "go"}]
        return post(self.url, self.key, "/chat/completions", model=self.name, messages=messages)

plain, paid, broken = (Child(model="worker") for _ in range(3))
below = Child(paid.url)
for child in (plain, paid, broken, below):
    child.say()
note("answers", json.dumps([
    paid.post("/reward", reward=0.25),
    paid.post("/reward", reward="good"),
    broken.post("/end", error="no answer"),
    broken.say(),
    broken.post("/children"),
    post(root, control, "/children", model="judge"),
    post(root, control, "/reward", model="worker", reward=1),
    post(paid.url, key, "/reward", reward=1),
    [post(paid.url, paid.key, path, reward=500000)[0] for path in ("/reward", "/children", "/end")],
    post(root, key, "/children", model="worker"),
    post(paid.url, control, "/chat/completions", model="worker", messages=[{"role": "user", "content": "go"}])[0],
    [again.decode(), os.path.exists(os.path.join(os.path.dirname(os.environ["TURNWISE_QUESTION"]), "control"))],
]))
result({"boss": 0.0, "worker": 1.0})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="agents as processes need /proc")
def test_a_process_opens_children_by_requests(tmp_path):
    (tmp_path / "agent.py").write_text(HEAD + CODE)
    arena = arena_of(scripted("a"), actors=TEAM)
    command, files = [sys.executable, "-I", "-S", "agent.py"], {"agent.py": tmp_path / "agent.py"}
    gateway, env = Gateway(renderer="template"), {"NOTES": str(tmp_path)}
    arena.add_episode(ProcessEpisode(command, gateway, actors=TEAM, env=env, files=files, children=True))
    results = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", "x")]))
    played = Played(results, arena.client, arena, gateway)
    assert played.error is None, played.error
    assert [(row[0], row[4]) for row in family(played)] == [
        ("e0.0", 1.0),
        ("e0.1", 0.25),
        ("e0.1.0", 0.25),
        ("e0.2", "failed"),
    ]
    assert "no answer" in children(results[0])[2].rollout.error
    answers = json.loads((tmp_path / "answers").read_text())
    given, wrong, ended, late, opened, unknown, outside, foreign, of_child, of_agent, models, left = answers
    assert (given, ended) == ({"reward": 0.25}, {"ended": True})
    assert wrong[0] == 400 and "expected a finite number" in wrong[1]
    assert late == opened == [410, "the session is over: its sub-agent has ended"]
    assert unknown[0] == 404 and "no model 'judge'" in unknown[1]
    assert outside[0] == 404 and "only its children have it" in outside[1]
    assert foreign[0] == 401
    # A command of the model's finds the keys of the models in the environment; the other key is gone.
    assert of_child == [403, 403, 403] and of_agent[0] == 403 and "TURNWISE_CONTROL" in of_agent[1]
    assert models == 401 and left == ["", False]


MINT = """
import urllib.error
root, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"model": "solver", "messages": [{"role": "user", "content": "x"}]}).encode()

def post(path, body=b"{}"):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    try:
        return json.load(urllib.request.urlopen(urllib.request.Request(root + path, body, headers)))
    except urllib.error.HTTPError as error:
        return [error.code, json.load(error)["error"]["code"]]

post("/chat/completions", body)
found = [post("/children"), post("/reward", b'{"reward": 1000000.0}'), post("/end"), "TURNWISE_CONTROL" in os.environ]
open("answer.txt", "w").write(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="agents as processes need /proc")
@pytest.mark.parametrize("collects", [True, False])
def test_no_command_opens_or_pays_children_unless_the_config_says_so(tmp_path, collects):
    refused = [403, "children_not_allowed"]
    code = MINT if collects else MINT + "result({'result': found})"
    (tmp_path / "agent.py").write_text((HEAD.replace("question =", "question = 0 and") if collects else HEAD) + code)
    arena, seen = arena_of(scripted("4")), []
    rubric = Rubric([lambda extras: seen.append(extras) or 0.25])
    collect = {"collect": ["answer.txt"]} if collects else {}
    episode = ProcessEpisode(
        [sys.executable, "-I", "-S", "agent.py"],
        Gateway(renderer="template"),
        actors=["solver"],
        files={"agent.py": tmp_path / "agent.py"},
        rubric=rubric,
        **collect,
    )
    arena.add_episode(episode)
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("process", "x")]))
    assert result.rollout.error is None, result.rollout.error
    assert result.rollout.rewards == {"solver": 0.25} and not children(result)
    found = json.loads(seen[0]["files"]["answer.txt"]) if collects else seen[0]["result"]["result"]
    assert found == [refused, refused, refused, False]
    with pytest.raises(ValueError, match="children=True: expected no rubric"):
        ProcessEpisode(["true"], Gateway(), rubric=rubric, children=True, **collect)


CLIMB = """
import urllib.error
control, url = os.read(int(os.environ["TURNWISE_CONTROL"]), 100).decode(), os.environ["OPENAI_BASE_URL"]
for depth in range(900):
    headers = {"Authorization": "Bearer " + control, "Content-Type": "application/json"}
    try:
        url = json.load(urllib.request.urlopen(urllib.request.Request(url + "/children", b"{}", headers)))["base_url"]
    except urllib.error.HTTPError as error:
        note("end", json.dumps([depth, error.code, json.load(error)["error"]["code"]]))
        break
ask("x")
result(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="agents as processes need /proc")
def test_a_process_that_nests_children_is_stopped_and_its_attempt_counts(tmp_path):
    [rollout], _ = play_process(tmp_path, CLIMB, children=True)
    assert rollout.error is None, rollout.error
    assert json.loads((tmp_path / "end").read_text()) == [8, 400, "too_many_children"]
    assert rollout.rewards == {"solver": 1.0} and rollout.metrics["gateway/refused/too_many_children/solver"] == 1
