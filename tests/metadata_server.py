"""The metadata server of a TPU VM, for tests."""

import contextlib
import http.server
import threading

# A plugin. As on a TPU VM, where JAX finds chips; here it would otherwise not ask the metadata server.
TPU_VM = "import os\nimport jax\nos.environ.pop('TPU_SKIP_MDS_QUERY', None)\n"


@contextlib.contextmanager
def serve_metadata(attributes):
    """Serves the attributes of one VM, as docs.cloud.google.com/compute/docs/metadata describes. Yields the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix('/computeMetadata/v1/instance/attributes/')
            known = self.headers['Metadata-Flavor'] == 'Google' and name in attributes
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(attributes[name].encode() if known else b'')

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f'127.0.0.1:{server.server_address[1]}'
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
