"""What the OpenAI Agents SDK meets behind a gateway when it goes on from its own responses, told as one JSON object a line.

    agents_sdk.py task|gone

The address and the key are in OPENAI_BASE_URL and OPENAI_API_KEY. In `gone` the tool puts the configuration of
WAYBILL_NEXT in the place of the one in WAYBILL_CONFIG and waits until the gateway serves by it. This program judges
nothing: the test that starts it compares what it tells with what the upstreams saw.
"""

import json
import os
import sys
import urllib.request

import openai
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled

QUESTION = 'call tool weather with {"city": "Riga"}'

set_tracing_disabled(True)
# A connection a request, so that whoever listens in can count them.
set_default_openai_client(openai.AsyncOpenAI(default_headers={"Connection": "close"}))


def tell(**fact):
    print(json.dumps(fact), flush=True)


def revision():
    page = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/readyz"
    with urllib.request.urlopen(page) as ready:
        return json.load(ready)["detail"]["catalogue"]["revision"]


def weather(city: str) -> str:
    """Tells the weather."""
    return f"12 degrees in {city}"


def weather_of_another_world(city: str) -> str:
    """Tells the weather."""
    before = revision()
    if os.path.exists(os.environ["WAYBILL_NEXT"]):
        os.replace(os.environ["WAYBILL_NEXT"], os.environ["WAYBILL_CONFIG"])
        while revision() == before:
            pass
    return weather(city)


def agent(tool):
    return Agent(
        name="Clerk",
        instructions="Answer briefly.",
        model="gpt",
        model_settings=ModelSettings(store=True),
        tools=[function_tool(tool, name_override="weather")],
    )


def ask(clerk, question, previous=None):
    answer = Runner.run_sync(clerk, question, previous_response_id=previous, auto_previous_response_id=True)
    tell(text=answer.final_output, responses=len(answer.raw_responses), last=answer.last_response_id)
    return answer.last_response_id


def task():
    clerk = agent(weather)
    last = ask(clerk, QUESTION)
    ask(clerk, "Thank you. And how are you?", last)


def gone():
    clerk = agent(weather_of_another_world)
    try:
        ask(clerk, QUESTION)
    except openai.APIStatusError as error:
        tell(raised=type(error).__name__, status=error.status_code, code=error.code)
    # Over again, with the whole input.
    ask(clerk, QUESTION)


{"task": task, "gone": gone}[sys.argv[1]]()
