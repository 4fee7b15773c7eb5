"""A boss that may hand each part of a question to a sub-agent of its own; both start as a tiny random model."""

import asyncio

actors = ["boss", "worker"]
KINDS = {"vowels": "aeiou", "digits": "0123456789"}
questions = [
    {"parts": parts, "number": n} for n in range(300) for parts in (["vowels", "digits"], ["digits", "vowels"])
]


async def ask(model, text):
    chat = model.async_openai_client().chat.completions
    answer = await chat.create(model=model.name, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


def share(text, part):
    """Return the share of the letters, of at least four, that are of the kind asked for."""
    return sum(letter in KINDS[part] for letter in text) / max(len(text), 4)


async def delegate(worker, parts, paid):
    """Ask one sub-agent for one part or both, and score each part."""
    async with worker.child() as child:
        answer = await ask(child, " ".join(parts))
        scores = [share(answer, part) for part in parts]
        if paid:  # else it gets the worker's reward in the attempt
            child.reward = sum(scores) / len(scores)
        return scores


async def agent(question, models, paid=True):
    """The boss's first letter decides: every other one gives each part a sub-agent of its own, else one does both."""
    parts = question["parts"]
    order = await ask(models["boss"], f"How many workers for {' and '.join(parts)}?")
    split = [[part] for part in parts] if ord((order or "?")[0]) % 2 else [parts]
    found = await asyncio.gather(*(delegate(models["worker"], each, paid) for each in split))
    scores = [score for scores in found for score in scores]
    right = sum(scores) / len(scores)
    return {"boss": right, "worker": right}


async def inheriting(question, models):
    """The same without rewards of the sub-agents' own."""
    return await agent(question, models, paid=False)
