"""What the official Anthropic SDK meets behind a gateway, told as one JSON object a line.

    anthropic_sdk.py converse|refusals|failures|cut|rest

The address and the key are in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. This program judges nothing: the test that
starts it compares what it tells with what the upstreams saw.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic

MODEL = "gpt"
TOOL = {
    "name": "weather",
    "description": "Tells it",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}

client = anthropic.Anthropic()


def tell(**fact):
    print(json.dumps(fact), flush=True)


# The conversations: a tool round trip, then another question, all of them at the same time.


def converse():
    cases = [(shape, n) for shape in ("json", "stream") for n in range(8)]
    with ThreadPoolExecutor(len(cases)) as pool:
        for facts in pool.map(lambda case: conversation(*case), cases):
            for fact in facts:
                tell(**fact)


def conversation(shape, n):
    name = f"messages-{shape}-{n}"
    # Long enough to be worth a provider's cache, and no beginning in common with another conversation.
    text = f"Handbook of {name}. " + "Answer briefly and in earnest. " * 600
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    history = []
    facts = []
    for question in (f'I am {name}: call tool weather with {{"city": "Riga"}}', "Thank you. And how are you?"):
        history.append({"role": "user", "content": question})
        while True:
            answer = ask(system, history, stream=shape == "stream")
            calls = [block for block in answer.content if block.type == "tool_use"]
            facts.append(
                {
                    "conversation": name,
                    "text": "".join(block.text for block in answer.content if block.type == "text"),
                    "calls": [{"id": call.id, "name": call.name, "arguments": call.input} for call in calls],
                    "usage": usage(answer.usage),
                }
            )
            history.append({"role": "assistant", "content": answer.content})
            if not calls:
                break
            result = f"12 degrees for {name}"
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call in calls]
            history.append({"role": "user", "content": results})
    return facts


def ask(system, history, stream):
    request = {"model": MODEL, "max_tokens": 256, "system": system, "messages": history, "tools": [TOOL]}
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        return events.get_final_message()


def usage(usage):
    """The whole prompt, its cached part, the answer: Anthropic counts the prompt in three parts."""
    cached = usage.cache_read_input_tokens
    return [usage.input_tokens + cached + usage.cache_creation_input_tokens, cached, usage.output_tokens]


# What is refused, and as which of the SDK's own errors.


def refusals():
    hello = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}
    refused("bad key", lambda: anthropic.Anthropic(api_key="sk-nobody").messages.create(**hello))
    refused("unknown model", lambda: client.messages.create(**hello | {"model": "no-such-model"}))
    conflict = {"extra_headers": {"X-Session-Id": "one"}, "extra_body": {"session_id": "two"}}
    refused("session conflict", lambda: client.messages.create(**hello, **conflict))


def refused(case, ask):
    try:
        tell(case=case, answered=ask().to_dict())
    except anthropic.APIStatusError as error:
        code = error.body["error"].get("code", error.body["error"]["type"])
        tell(case=case, raised=type(error).__name__, status=error.status_code, code=code, id=error.request_id)


# What an upstream reports inside a 200 in place of an answer.


def failures():
    hello = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}
    refused("messages", lambda: client.messages.create(**hello))
    refused("messages, streamed", lambda: client.messages.create(**hello, stream=True))


# Streams that are cut after the first words.


def cut():
    request = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}
    broken("messages", lambda: client.messages.create(**request, stream=True))
    broken("messages helper", lambda: helper(client.messages.stream(**request)))


def helper(manager):
    with manager as events:
        yield from events


def broken(case, ask):
    kinds = []
    try:
        for event in ask():
            kinds.append(event.type)
        tell(case=case, raised=None, kinds=kinds)
    except anthropic.APIError as error:
        tell(case=case, raised=type(error).__name__, kinds=kinds, message=error.message)


# The small endpoints.


def rest():
    tell(models=[model.id for model in client.models.list()], model=client.models.retrieve(MODEL).id)
    messages = [{"role": "user", "content": "Hello"}]
    tell(input_tokens=client.messages.count_tokens(model=MODEL, messages=messages).input_tokens)


{"converse": converse, "refusals": refusals, "failures": failures, "cut": cut, "rest": rest}[sys.argv[1]]()
