"""What the official OpenAI SDK meets behind a gateway, told as one JSON object a line.

    openai_sdk.py converse|refusals|failures|cut|rest

The address and the key are in OPENAI_BASE_URL and OPENAI_API_KEY. This program judges nothing: the test that starts it
compares what it tells with what the upstreams saw.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

MODEL = "gpt"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells it", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", "strict": False, **FUNCTION}

client = openai.OpenAI()


def tell(**fact):
    print(json.dumps(fact), flush=True)


# The conversations: a tool round trip, then another question, all of them at the same time.


def converse():
    cases = [(api, shape, n) for api in (Chat, Responses) for shape in ("json", "stream") for n in range(4)]
    with ThreadPoolExecutor(len(cases)) as pool:
        for facts in pool.map(lambda case: conversation(*case), cases):
            for fact in facts:
                tell(**fact)


def conversation(api, shape, n):
    name = f"{api.name}-{shape}-{n}"
    # Long enough to be worth a provider's cache, and no beginning in common with another conversation.
    system = f"Handbook of {name}. " + "Answer briefly and in earnest. " * 250
    history = [{"role": "system", "content": system}]
    facts = []
    for question in (f'I am {name}: call tool weather with {{"city": "Riga"}}', "Thank you. And how are you?"):
        history.append({"role": "user", "content": question})
        while True:
            items, calls, text, usage = api.ask(history, stream=shape == "stream")
            facts.append({"conversation": name, "text": text, "calls": calls, "usage": usage})
            history += items
            if not calls:
                break
            history += [api.result(call, f"12 degrees for {name}") for call in calls]
    return facts


class Chat:
    name = "chat"

    def ask(history, stream):
        request = {"model": MODEL, "messages": history, "tools": [CHAT_TOOL]}
        if stream:
            with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
                for _ in events:
                    pass
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**request)
        message = answer.choices[0].message
        asked = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
        calls = [{"id": id, "name": name, "arguments": json.loads(text)} for id, name, text in asked]
        item = {"role": "assistant", "content": message.content}
        if asked:
            item["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in asked
            ]
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return [item], calls, message.content or "", [usage.prompt_tokens, cached, usage.completion_tokens]

    def result(call, text):
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


class Responses:
    name = "responses"

    def ask(history, stream):
        request = {"model": MODEL, "input": history, "tools": [RESPONSES_TOOL], "store": False}
        if stream:
            with client.responses.stream(**request) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**request)
        calls = [
            {"id": item.call_id, "name": item.name, "arguments": json.loads(item.arguments)}
            for item in answer.output
            if item.type == "function_call"
        ]
        # As a programmer would send it back: what the SDK read, whole.
        items = [item.to_dict() for item in answer.output]
        for item in items:
            item.pop("parsed_arguments", None)
        usage = answer.usage
        cached = usage.input_tokens_details.cached_tokens
        return items, calls, answer.output_text, [usage.input_tokens, cached, usage.output_tokens]

    def result(call, text):
        return {"type": "function_call_output", "call_id": call["id"], "output": text}


# What is refused, and as which of the SDK's own errors.


def refusals():
    hello = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    refused("bad key", lambda: openai.OpenAI(api_key="sk-nobody").chat.completions.create(**hello))
    refused("unknown model", lambda: client.chat.completions.create(**hello | {"model": "no-such-model"}))
    conflict = {"extra_headers": {"X-Session-Id": "one"}, "extra_body": {"session_id": "two"}}
    refused("session conflict", lambda: client.chat.completions.create(**hello, **conflict))
    further = {"model": MODEL, "input": "And then?", "previous_response_id": "resp_nobodys"}
    refused("previous response", lambda: client.responses.create(**further))
    refused("previous response, streamed", lambda: client.responses.create(**further, stream=True))
    refused("response", lambda: client.responses.retrieve("resp_nobodys"))


def refused(case, ask):
    try:
        tell(case=case, answered=ask().to_dict())
    except openai.APIStatusError as error:
        tell(case=case, raised=type(error).__name__, status=error.status_code, code=error.code, id=error.request_id)


# What an upstream reports inside a 200 in place of an answer.


def failures():
    hello = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    refused("chat", lambda: client.chat.completions.create(**hello))
    refused("chat, streamed", lambda: client.chat.completions.create(**hello, stream=True))
    refused("responses", lambda: client.responses.create(model=MODEL, input="Hello"))
    broken("responses, streamed", lambda: client.responses.create(model=MODEL, input="Hello", stream=True))


# Streams that are cut after the first words.


def cut():
    # Each way a programmer may read a stream.
    messages = [{"role": "user", "content": "Hello"}]
    broken("chat", lambda: client.chat.completions.create(model=MODEL, messages=messages, stream=True))
    broken("chat helper", lambda: helper(client.chat.completions.stream(model=MODEL, messages=messages)))
    broken("responses", lambda: client.responses.create(model=MODEL, input="Hello", stream=True))
    broken("responses helper", lambda: helper(client.responses.stream(model=MODEL, input="Hello")))


def helper(manager):
    with manager as events:
        yield from events


def broken(case, ask):
    kinds = []
    try:
        for event in ask():
            kinds.append(getattr(event, "type", None) or event.object)
        tell(case=case, raised=None, kinds=kinds)
    except openai.APIError as error:
        tell(case=case, raised=type(error).__name__, kinds=kinds, code=error.code, message=error.message)


# The small endpoints.


def rest():
    tell(models=[model.id for model in client.models.list()], model=client.models.retrieve(MODEL).id)
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    numbers = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    tell(
        vectors=[entry.embedding for entry in answer.data],
        as_numbers=[entry.embedding for entry in numbers.data],
        tokens=answer.usage.prompt_tokens,
    )


{"converse": converse, "refusals": refusals, "failures": failures, "cut": cut, "rest": rest}[sys.argv[1]]()
