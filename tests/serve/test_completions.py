"""`/v1/completions` and `/v1/chat/completions`."""

from serve.calls import call

HELLO = [{'role': 'user', 'content': 'hello'}]


def test_a_completion_and_its_stream_are_the_same_text(client):
    asked = {'model': 'stub', 'prompt': 'abc', 'max_tokens': 50, 'seed': 3}
    whole = client.completions.create(**asked)
    assert len(whole.choices[0].text.encode()) == 50
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 50)
    assert whole.system_fingerprint == 'step-100'
    *events, last = client.completions.create(**asked, stream=True, stream_options={'include_usage': True})
    assert ''.join(event.choices[0].text for event in events) == whole.choices[0].text
    assert len(events) > 3
    assert {event.system_fingerprint for event in events} == {'step-100'}
    assert last.choices == []
    assert last.usage == whole.usage


def test_a_chat_and_its_stream_are_the_same_text(client):
    asked = {'model': 'stub-chat', 'messages': HELLO, 'max_completion_tokens': 50, 'seed': 3}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == 'assistant'
    first, *events = client.chat.completions.create(**asked, stream=True)
    assert first.choices[0].delta.role == 'assistant'
    text = ''.join(event.choices[0].delta.content or '' for event in events)
    assert text == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == 'length'


def test_a_message_of_the_assistant_is_continued(server, client):
    """The prompt ends with the message, whose turn is open; the answer is only what follows."""
    begun = [*HELLO, {'role': 'assistant', 'content': 'hi'}]
    extra = {'continue_final_message': True, 'add_generation_prompt': False}  # as vLLM's clients send it
    ids = call(server, '/tokenize', {'model': 'stub-chat', 'messages': begun} | extra)[2]['tokens']
    assert bytes(ids).decode() == 'user: hello\nassistant: hi'
    asked = {'model': 'stub-chat', 'messages': begun, 'max_tokens': 9, 'seed': 1}
    answer = client.chat.completions.create(**asked, extra_body=extra)
    same = client.completions.create(model='stub-chat', prompt=ids, max_tokens=9, seed=1)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage.prompt_tokens == len(ids)


def test_the_answers_to_several_prompts_are_in_order(client):
    whole = client.completions.create(model='stub', prompt=['ab', 'cde'], n=2, max_tokens=9, seed=2)
    alone = [
        client.completions.create(model='stub', prompt=prompt, n=2, max_tokens=9, seed=2).choices
        for prompt in ('ab', [ord(letter) for letter in 'cde'])
    ]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [choice.text for pair in alone for choice in pair]
    assert len({choice.text for choice in whole.choices}) == 4
    assert whole.usage.prompt_tokens == 5


def test_a_prompt_is_scored_without_an_answer(client):
    """As lm_eval asks."""
    choice = client.completions.create(model='stub', prompt=[97, 98, 99], max_tokens=0, echo=True, logprobs=1).choices[
        0
    ]
    assert choice.text == 'abc'
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]


def test_an_empty_prompt_begins_a_text(client):
    assert client.completions.create(model='stub', prompt='', max_tokens=3).usage.prompt_tokens == 1


def test_max_tokens_is_16_or_what_is_left(client):
    long = 'x' * 505
    assert client.completions.create(model='stub', prompt='x').usage.completion_tokens == 16
    assert client.completions.create(model='stub', prompt=long).usage.completion_tokens == 7
    assert client.chat.completions.create(model='stub-chat', messages=HELLO).usage.total_tokens == 512
