"""Other people's clients, with the defaults that they have."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from serve.calls import call

REQUESTS = json.loads(Path(__file__).with_name('client_requests.json').read_text())
HELLO = [{'role': 'user', 'content': 'hello'}]
PYTHON = """
import sys
import langchain_openai, litellm, openai

url, model = sys.argv[1], 'stub-chat'
hello = [{'role': 'user', 'content': 'hello'}]

client = openai.OpenAI(base_url=url, api_key='none')
message = client.chat.completions.create(model=model, messages=hello).choices[0].message
assert client.chat.completions.create(model=model, messages=[*hello, message, *hello]).choices[0].message.content

message = litellm.completion(model=f'openai/{model}', messages=hello, api_base=url, api_key='none').choices[0].message
more = [*hello, message, *hello]
assert litellm.completion(model=f'openai/{model}', messages=more, api_base=url, api_key='none').choices[0].message.content
parts = litellm.completion(model=f'hosted_vllm/{model}', messages=more, api_base=url, api_key='none', stream=True)
assert ''.join(part.choices[0].delta.content or '' for part in parts)
assert litellm.text_completion(model='text-completion-openai/stub', prompt='x', api_base=url, api_key='none').choices[0].text
assert len(litellm.embedding(model='openai/stub', input=['x'], api_base=url, api_key='none').data[0]['embedding']) == 8

chat = langchain_openai.ChatOpenAI(model=model, base_url=url, api_key='none')
answer = chat.invoke('hello')
assert chat.invoke([('user', 'hello'), answer, ('user', 'hello')]).content
assert ''.join(part.content for part in chat.stream('hello'))
assert langchain_openai.OpenAI(model='stub', base_url=url, api_key='none').invoke('hello')
embeddings = langchain_openai.OpenAIEmbeddings(model='stub', base_url=url, api_key='none', check_embedding_ctx_length=False)
assert [len(one) for one in embeddings.embed_documents(['a', 'b'])] == [8, 8]
"""
JAVASCRIPT = """
import OpenAI from 'openai'
const client = new OpenAI({baseURL: process.argv[2], apiKey: 'none'}), model = 'stub-chat'
const messages = [{role: 'user', content: 'hello'}]
const answer = await client.chat.completions.create({model, messages})
messages.push(answer.choices[0].message, {role: 'user', content: 'more'})
let text = ''
for await (const event of await client.chat.completions.create({model, messages, stream: true})) {
  text += event.choices[0]?.delta?.content ?? ''
}
const completion = await client.completions.create({model: 'stub', prompt: 'x'})
const made = await client.embeddings.create({model: 'stub', input: 'x'})
console.log(JSON.stringify([text.length > 0, completion.choices[0].text.length > 0, made.data[0].embedding.length]))
"""


@pytest.mark.parametrize('client', [client for client in REQUESTS if client != 'comment'])
def test_what_clients_send_is_answered(server, client):
    for path, body in REQUESTS[client]:
        model = {} if 'token' in path else {'model': 'stub-chat' if 'chat' in path else 'stub'}
        status, _, answer = call(server, path, body | model)
        assert status == 200, (path, answer)


def test_a_message_of_the_server_is_appended_to_the_conversation(client):
    message = client.chat.completions.create(model='stub-chat', messages=HELLO, max_tokens=4).choices[0].message
    dumped = message.model_dump()  # with all that the message has not: annotations, audio, function_call, ...
    for one in (message, dumped):
        assert client.chat.completions.create(model='stub-chat', messages=[*HELLO, one, *HELLO], max_tokens=4).choices


@pytest.mark.slow
def test_lm_eval_needs_no_tokenizer_of_its_own(server):
    """Each token of the stub has log probability -0.5, and the end token is one."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    def asked(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    model = LocalCompletionsAPI(base_url=f'{server.url}/v1/completions', model='stub')
    assert model.tokenizer_backend == 'remote'
    assert model.loglikelihood(asked('loglikelihood', 'a question', ' answer'))[0][0] == -0.5 * len(' answer')
    assert model.eot_token_id == 256
    assert model.generate_until(asked('generate_until', 'x', {'until': ['sat'], 'max_gen_toks': 12})) == ['the cat ']
    chat = LocalChatCompletion(base_url=f'{server.url}/v1/chat/completions', model='stub-chat')
    prompt = chat.apply_chat_template(HELLO)
    assert chat.generate_until(asked('generate_until', prompt, {'max_gen_toks': 7})) == ['the cat']


@pytest.fixture
def brief(server):
    """A server whose chats are short, so that their answers fit into the next prompt."""
    server.engines['stub-chat'].script = [104, 105, 1]
    yield server
    server.engines['stub-chat'].script = None


@pytest.mark.nightly
def test_clients_of_python(brief, tmp_path):
    (tmp_path / 'clients.py').write_text(PYTHON)
    packages = ['--with', 'openai', '--with', 'litellm', '--with', 'langchain-openai', '--with', 'llm']
    isolated = ['uv', 'run', '--isolated', '--no-project', *packages]
    environment = os.environ | {
        'OPENAI_API_KEY': 'none',
        'LITELLM_LOCAL_MODEL_COST_MAP': 'True',
        'LLM_USER_PATH': str(tmp_path),
    }
    subprocess.run([*isolated, 'python', 'clients.py', f'{brief.url}/v1'], check=True, cwd=tmp_path, env=environment)
    (tmp_path / 'extra-openai-models.yaml').write_text(
        f'- {{model_id: mine, model_name: stub-chat, api_base: "{brief.url}/v1"}}\n'
    )
    for more in (['hello'], ['--continue', '--no-stream', 'more']):
        command = [*isolated, 'llm', '-m', 'mine', *more]
        answer = subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
        assert answer.stdout.strip()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which('npm') is None, reason='needs npm')
def test_the_client_of_javascript(brief, tmp_path):
    (tmp_path / 'client.mjs').write_text(JAVASCRIPT)
    subprocess.run(['npm', 'install', '--silent', '--no-save', 'openai'], check=True, cwd=tmp_path)
    command = ['node', 'client.mjs', f'{brief.url}/v1']
    answer = subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.PIPE)
    assert json.loads(answer.stdout) == [True, True, 8]
