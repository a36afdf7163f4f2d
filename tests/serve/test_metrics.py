"""`/metrics`."""

from serve.calls import call, metric
from serve.stub_engine import Running, stub_service

COMPLETION = {'prompt': 'x', 'max_tokens': 1}


def test_metrics_count_requests_by_their_status():
    with Running(stub_service(chat=False)) as server:
        call(server, '/v1/completions', COMPLETION | {'max_tokens': 7})
        call(server, '/v1/completions', {})
        call(server, '/v1/completions')
        for status, count in {'200': 1, '400': 1, '405': 1, '500': 0}.items():
            assert metric(server, 'pretrax_requests_total', endpoint='/v1/completions', status=status) == count
        assert metric(server, 'pretrax_generated_tokens_total', model='stub') == 7
        assert metric(server, 'pretrax_slots') == 4
        assert metric(server, 'pretrax_weights_step') == 100
        assert metric(server, 'pretrax_time_to_first_token_seconds_count') == 1
        assert metric(server, 'pretrax_request_seconds_count') == 1
