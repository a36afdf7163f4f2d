"""An HTTP server with OpenAI's interface. It imports no JAX: engines come from outside, as `infer.engine.Engine`."""
